"""`dlio verify`: read a data set or a tier once and report all damage."""

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from dlio.data.schema import IMAGES
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.arguments import PathText, path_in
from dlio.util.options import Option
from dlio.util.printable import print_line, printable
from dlio.util.units import format_bytes
from dlio_staging.tier_verification import FolderVerification, find_folders, verify_folder

_MOST_SHOWN: Final = 20


def verify(
    path: PathText, *, heal: bool = False, source: PathText | None = None
) -> FolderVerification:
    """Check a data set, or the blocks of a tier, byte by byte.

    In shards and tiers every checksum is compared; a tier with a manifest is searched for missing
    and outdated blocks, too. All images are decoded. Damage does not end the check.

    Args:
        heal: fetch damaged or missing blocks of a tier from the source again.
        source: data set to heal from; by default the one that was staged.

    Raises SourceError when the path is neither a data set nor a tier, or `source` is another data
    set than the one that was staged.
    """
    path = path_in("path", path)
    folders = find_folders(path)
    if not folders:
        if heal:
            raise UsageError(f"{path} is not a tier: only tiers can be healed, from their source")
        return _verify_data(path)
    verified = FolderVerification()
    origin = None if source is None else path_in("source", source)
    for folder in folders:
        verify_folder(folder, verified, heal=heal, source=origin)
    return verified


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `dlio verify`."""

    path: Annotated[
        str, Option("Data set, or the folder of a disk tier.", positional=True, metavar="PATH")
    ]
    heal: Annotated[bool, Option("Fetch damaged blocks of a tier again from the source.")] = False
    source: Annotated[
        str | None,
        Option(
            "Data set to heal a tier from.",
            metavar="PATH",
            default_text="where it was staged from",
        ),
    ] = None


def command(options: VerifyOptions) -> None:
    """Read a data set or a tier completely and verify it.

    Exit code 2 when something is damaged.
    """
    checked = verify(options.path, heal=options.heal, source=options.source)
    for line in checked.damaged[:_MOST_SHOWN]:
        print_line(f"damaged: {printable(line)}")
    if len(checked.damaged) > _MOST_SHOWN:
        print_line(f"damaged: ... and {len(checked.damaged) - _MOST_SHOWN} more")
    summary = f"{options.path}: {checked.samples:,} samples, {format_bytes(checked.bytes)} checked"
    left = len(checked.damaged) - checked.healed
    if left > 0:
        which = f" ({checked.damaged[0]})" if len(checked.damaged) == 1 else ""
        raise CorruptBlock(
            f"{summary}, {left} damaged{which}: restore or remove {'it' if left == 1 else 'them'}; "
            "in a tier, --heal fetches damaged blocks again"
        )
    healed = f"{checked.healed} blocks fetched again from the source, " if checked.healed else ""
    print_line(f"{summary}, {healed}all sound")


def _verify_data(path: str) -> FolderVerification:
    """Read every sample of a data set and decode its images."""
    from dlio.data.reader import open_reader
    from dlio.image.decoder import decode_whole

    reader = open_reader(path)
    images = [name for name, kind in reader.schema.fields if kind in IMAGES]
    checked = FolderVerification()
    for block in range(reader.layout.blocks):
        samples = reader.layout.samples_of(block)
        for sample in samples:
            try:
                payload = reader.read(np.array([sample], np.int64))[0]
                values = reader.schema.split(payload)
                for image in images:
                    decode_whole(values[image], reader.name(int(sample)))
            except (CorruptBlock, SourceError) as error:
                checked.damaged.append(str(error))
                continue
            checked.samples += 1
            checked.bytes += len(payload)
    reader.close()
    return checked
