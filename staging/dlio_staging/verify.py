"""`dlio verify`: read everything once and say what is damaged."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import typer

from dlio.errors import CorruptBlock, DlioError, SourceError
from dlio.units import format_bytes

_MOST_SHOWN = 20


@dataclass(slots=True)
class Verified:
    """What a verification read, and found."""

    samples: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """One line for each damaged sample or block."""


def verify(path: str) -> Verified:
    """Check a data set, or the blocks of a tier, byte by byte.

    Shards and tiers: every checksum. Images: every one is decoded. Goes on after damage.

    Raises SourceError when the path is neither.
    """
    blocks = sorted(_tier_blocks(path))
    return _verify_tier(blocks) if blocks else _verify_data(path)


def command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A data set, or the folder of a disk tier.")
    ],
) -> None:
    """Read all of a data set or tier and check it; exit code 2 when something is damaged."""
    found = verify(path)
    for line in found.damaged[:_MOST_SHOWN]:
        typer.echo(f"damaged: {line}")
    if len(found.damaged) > _MOST_SHOWN:
        typer.echo(f"damaged: ... and {len(found.damaged) - _MOST_SHOWN} more")
    said = f"{path}: {found.samples:,} samples, {format_bytes(found.bytes)} checked"
    if found.damaged:
        raise CorruptBlock(f"{said}, {len(found.damaged)} damaged: restore or remove them")
    typer.echo(f"{said}, all sound")


def _verify_data(path: str) -> Verified:
    from dlio.decode import decode_whole
    from dlio.reader import open_reader

    reader = open_reader(path)
    image = next((name for name, kind in reader.schema.fields if kind in ("image", "jpeg")), None)
    found = Verified()
    for block in range(reader.layout.blocks):
        samples = reader.layout.samples_of(block)
        for sample in samples:
            try:
                payload = reader.read(np.array([sample], np.int64))[0]
                if image is not None:
                    value = reader.schema.split(payload)[image]
                    assert not isinstance(value, int | float)
                    decode_whole(value, reader.name(int(sample)))
            except (CorruptBlock, SourceError) as error:
                found.damaged.append(str(error))
                continue
            found.samples += 1
            found.bytes += len(payload)
    reader.close()
    return found


def _verify_tier(files: list[str]) -> Verified:
    from dlio.storage.block import Scratch, read_info

    found = Verified()
    scratch = Scratch()
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            found.damaged.append(f"{file} cannot be opened: {error.strerror}")
            continue
        try:
            info = read_info(descriptor, file)
            for place in range(len(info)):
                try:
                    found.bytes += len(info.read(descriptor, place, scratch))
                    found.samples += 1
                except CorruptBlock as error:
                    found.damaged.append(str(error))
        except (DlioError, OSError) as error:
            found.damaged.append(str(error))
        finally:
            os.close(descriptor)
    return found


def _tier_blocks(path: str) -> Iterator[str]:
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names if name.endswith(".blk"))
