"""`dlio verify`: read everything once and say what is damaged."""

from typing import Annotated

import numpy as np
import typer

from dlio.data.schema import IMAGES
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.units import format_bytes
from dlio_staging.tiers import Verified, find_folders, verify_folder

_MOST_SHOWN = 20


def verify(path: str, *, heal: bool = False, source: str | None = None) -> Verified:
    """Check a data set, or the blocks of a tier, byte by byte.

    Shards and tiers: every checksum; a tier with a manifest also for blocks that are missing or
    old. Images: every one is decoded. Goes on after damage.

    Args:
        heal: bring what is damaged or missing in a tier from the source, and nothing else.
        source: where from; by default where it was staged from.

    Raises SourceError when the path is neither, or what heals it is another data set.
    """
    folders = find_folders(path)
    if not folders:
        if heal:
            raise UsageError(f"{path} is no tier: only tiers can be healed, from their source")
        return _verify_data(path)
    found = Verified()
    for folder in folders:
        verify_folder(folder, found, heal=heal, source=source)
    return found


def command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A data set, or the folder of a disk tier.")
    ],
    heal: Annotated[
        bool, typer.Option("--heal", help="Bring again what is broken in a tier.")
    ] = False,
    source: Annotated[
        str | None, typer.Option(help="What to heal from; by default what it was staged from.")
    ] = None,
) -> None:
    """Read all of a data set or tier and check it; exit code 2 when something is damaged."""
    found = verify(path, heal=heal, source=source)
    for line in found.damaged[:_MOST_SHOWN]:
        typer.echo(f"damaged: {line}")
    if len(found.damaged) > _MOST_SHOWN:
        typer.echo(f"damaged: ... and {len(found.damaged) - _MOST_SHOWN} more")
    said = f"{path}: {found.samples:,} samples, {format_bytes(found.bytes)} checked"
    if len(found.damaged) > found.healed:
        raise CorruptBlock(
            f"{said}, {len(found.damaged) - found.healed} damaged: restore or remove them; "
            "in a tier, --heal brings them again"
        )
    healed = f"{found.healed} blocks brought again from the source, " if found.healed else ""
    typer.echo(f"{said}, {healed}all sound")


def _verify_data(path: str) -> Verified:
    from dlio.data.reader import open_reader
    from dlio.image.decode import decode_whole

    reader = open_reader(path)
    images = [name for name, kind in reader.schema.fields if kind in IMAGES]
    found = Verified()
    for block in range(reader.layout.blocks):
        samples = reader.layout.samples_of(block)
        for sample in samples:
            try:
                payload = reader.read(np.array([sample], np.int64))[0]
                values = reader.schema.split(payload)
                for image in images:
                    decode_whole(values[image], reader.name(int(sample)))
            except (CorruptBlock, SourceError) as error:
                found.damaged.append(str(error))
                continue
            found.samples += 1
            found.bytes += len(payload)
    reader.close()
    return found
