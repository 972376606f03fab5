"""`dlio verify`: read a data set or a tier once and report all damage."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader, SampleName
from dlio.data.schema import Buffer
from dlio.data.splits import FormatChoice, ReaderChoices, SplitChoice, reading_options
from dlio.errors import (
    CorruptBlock,
    DlioError,
    SourceError,
    TierError,
    UsageError,
    printable,
    redact,
    shortened,
)
from dlio.storage.manifest import NAME, Manifest, read_manifest
from dlio.util.arguments import PathText, path_in
from dlio.util.json_output import json_text
from dlio.util.limits import is_plausible
from dlio.util.link_free import READING, open_unlinked
from dlio.util.options import Option
from dlio.util.parallel import SourceThread
from dlio.util.printable import hearing, print_line
from dlio.util.trusted_files import closing_descriptor, open_file
from dlio.util.units import counted, format_bytes
from dlio.util.user_folders import open_folder
from dlio_staging.sample_check import SampleCheck

# Verification and healing of disk tiers, by the checksums and manifests of their folders

_GROUP_BYTES: Final = 1 << 18
"""Bytes of samples that are read in one call."""
_LISTING: Final = READING | os.O_DIRECTORY
_BLOCK: Final = re.compile(r"(\d{8,20})\.blk")


@dataclass(slots=True)
class FolderVerification:
    """Result of a verification."""

    samples: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """One line for each sample that loaders refuse, or damaged or missing block of a tier."""
    warned: list[str] = field(default_factory=list)
    """One line for each picture that is damaged, and read as every other loader reads it."""
    notices: list[str] = field(default_factory=list)
    """Warnings about the data set itself, such as about samples that it leaves out."""
    healed: int = 0
    """Damaged blocks of a tier that were fetched again."""


def find_folders(path: str) -> list[str]:
    """Return the folders at and below `path` that hold blocks, or a manifest of blocks.

    No link below it is followed, nor one that takes a folder's name meanwhile.
    """
    folders, real, left = [], os.path.realpath(path), [""]
    while left:
        inner = left.pop()
        try:
            descriptor = open_unlinked(os.path.join(real, inner).rstrip("/"), _LISTING)
        except OSError:
            continue
        with closing_descriptor(descriptor) as opened, os.scandir(opened) as entries:
            rows = [(each.name, each.is_dir(follow_symlinks=False)) for each in entries]
        left += [os.path.join(inner, name) for name, is_folder in rows if is_folder]
        names = [name for name, is_folder in rows if not is_folder]
        if any(_BLOCK.fullmatch(name) for name in names) or NAME in names:
            folders.append(os.path.join(path, inner) if inner else path)
    return sorted(folders)


def verify_folder(
    folder: str,
    result: FolderVerification,
    *,
    heal: bool,
    source: str | None,
    options: dict[str, object],
) -> None:
    """Verify one node's blocks of a data set; add samples, bytes and damage to `result`. To heal is
    to fetch damaged and missing blocks again, from `source` or the one that the manifest names.

    Raises SourceError when the data set to heal from is not the one that was staged, TierError
    when another user has put the folder there, or when another user's is to be healed.
    """
    try:
        descriptor = open_folder(folder)
    except OSError as error:
        raise TierError(
            f"{folder} cannot be verified ({error.strerror}): name a tier of your own"
        ) from error
    with closing_descriptor(descriptor) as opened:
        owner = os.fstat(opened).st_uid
        if heal and (owner != os.geteuid() or os.fstat(opened).st_mode & 0o022):
            raise TierError(
                f"{folder} belongs to user {owner}, or others can write in it: only a tier of your "
                "own can be healed"
            )
        manifest, wanted = None, dict[int, int]()
        try:
            manifest = read_manifest(opened, folder)
        except (CorruptBlock, OSError) as error:
            result.damaged.append(str(error))
        if manifest is not None:
            wanted = dict(zip(manifest.blocks.tolist(), manifest.digests.tolist(), strict=True))
        broken = []
        names = [match[1] for name in os.listdir(opened) if (match := _BLOCK.fullmatch(name))]
        present = {int(name): f"{name}.blk" for name in names}
        for block in sorted(present.keys() | wanted.keys()):
            reason = _damage(opened, folder, present.get(block), block, wanted.get(block), result)
            if reason:
                result.damaged.append(reason)
                broken.append(block)
        if heal and broken:
            result.healed += _heal(folder, broken, manifest, source, options)


def _damage(
    opened: int,
    folder: str,
    name: str | None,
    block: int,
    digest: int | None,
    result: FolderVerification,
) -> str | None:
    """Describe the damage of a block; None if it is intact."""
    from dlio.storage.block import PayloadScratch, read_info

    if name is None:
        return f"block {block} is missing from {folder}"
    path = os.path.join(folder, name)
    try:
        owner = os.fstat(opened).st_uid
        descriptor = open_file(opened, name, os.O_RDONLY, owners=(owner,))
    except OSError as error:
        return f"{path} cannot be opened: {error.strerror}"
    try:
        with closing_descriptor(descriptor):
            info = read_info(descriptor, path)
            if info.block != block:
                return f"{path} holds block {info.block}"
            scratch = PayloadScratch()
            for place in range(len(info)):
                result.bytes += len(info.read(descriptor, place, scratch))
                result.samples += 1
    except (DlioError, OSError) as error:
        return str(error)
    if digest is not None and info.digest != digest:
        return f"{path} is not the block that was staged"
    return None


def _heal(
    folder: str,
    broken: list[int],
    manifest: Manifest | None,
    source: str | None,
    options: dict[str, object],
) -> int:
    """Fetch blocks from the source again; return how many are intact now.

    Raises SourceError when the source is unknown or another data set than the one staged.
    """
    from dlio.data.reader import open_reader
    from dlio.storage.file_system_kind import file_system_of
    from dlio.storage.source_requests import SourceRequests
    from dlio.storage.tier import Tier
    from dlio.storage.tier_spec import TierSpec

    base, node = os.path.split(folder)
    top, fingerprint = os.path.split(base)
    root = os.path.dirname(top)
    path = source or (manifest.about.get("source") if manifest is not None else None)
    if not path:
        raise SourceError(f"{folder} has no manifest that names its source: give --source")
    try:
        reader = open_reader(str(path), follow_links=None, trust=None, **options)
    except (SourceError, UsageError) as error:
        if source:
            raise
        raise SourceError(
            f"{folder} was filled from {path}, which cannot be opened ({error}): give --source, "
            "and --split and --format if it was staged with them"
        ) from error
    if reader.fingerprint != fingerprint:
        raise SourceError(
            f"{path} is not the data set that {folder} was filled with, or has changed: stage it "
            "again, or give --source"
        )
    healed = 0
    spec = TierSpec("disk", root, 0)
    with (
        Tier(spec, fingerprint, node, fingerprint=fingerprint) as tier,
        SourceRequests(reader, file_system_of(str(path)).requests(reader.objects)) as requests,
    ):
        for block in broken:
            if block >= reader.layout.blocks:
                tier.discard(block)
                continue
            with requests.block(block) as (pieces, _):
                tier.discard(block)
                tier.publish(block, pieces)
            tier.check(block)
            healed += 1
    reader.close()
    return healed


# Data sets, and the command

_MOST_SHOWN: Final = 20


def verify(
    path: PathText,
    *,
    heal: bool = False,
    source: PathText | None = None,
    **options: object,
) -> FolderVerification:
    """Check a data set, or the blocks of a tier, byte by byte.

    In shards and tiers every checksum is compared; a tier with a manifest is searched for missing
    and outdated blocks, too. All images, masks and texts are decoded, as loaders do. Damage does
    not end the check.

    Args:
        heal: fetch damaged or missing blocks of a tier from the source again.
        source: data set to heal from; by default the one that was staged.
        options: as for `dlio.open`, of the data set.

    Raises SourceError when the path is neither a data set nor a tier, or `source` is another data
    set than the one that was staged.
    """
    path = path_in("path", path)
    folders = find_folders(path)
    if not folders:
        if heal:
            raise UsageError(f"{path} is not a tier: only tiers can be healed, from their source")
        return _verify_data(path, options)
    verified = FolderVerification()
    origin = None if source is None else path_in("source", source)
    for folder in folders:
        verify_folder(folder, verified, heal=heal, source=origin, options=options)
    return verified


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `dlio verify`."""

    path: Annotated[
        str, Option("Data set, or the folder of a disk tier.", positional=True, metavar="PATH")
    ]
    split: SplitChoice = None
    format: FormatChoice = None
    reader_option: ReaderChoices = ()
    heal: Annotated[bool, Option("Fetch damaged blocks of a tier again from the source.")] = False
    source: Annotated[
        str | None,
        Option(
            "Data set to heal a tier from.",
            metavar="PATH",
            default_text="where it was staged from",
        ),
    ] = None
    as_json: Annotated[bool, Option("Print JSON.", name="json")] = False


def command(options: VerifyOptions) -> None:
    """Read a data set or a tier completely and verify it.

    Exit code 2 when something is damaged, or samples are refused.
    """
    is_tier = bool(find_folders(options.path))
    checked = verify(
        options.path,
        heal=options.heal,
        source=options.source,
        **reading_options(options.split, options.format, options.reader_option),
    )
    if options.as_json:
        print(json_text({"path": options.path, **asdict(checked)}, indent=2))
    else:
        _print_lines("warning", checked.notices)
        _print_lines("damaged" if is_tier else "refused", checked.damaged)
        _print_lines("read with a warning", checked.warned)
    samples = counted(checked.samples, "sample")
    summary = f"{options.path}: {samples}, {format_bytes(checked.bytes)} checked"
    left = len(checked.damaged) - checked.healed
    if left > 0:
        which = f" ({checked.damaged[0]})" if len(checked.damaged) == 1 else ""
        them = "it" if left == 1 else "them"
        # A sound sample may be refused as well, such as a mask in colours.
        raise CorruptBlock(
            f"{summary}, {left} damaged{which}: --heal fetches damaged blocks again, or remove "
            f"{them}"
            if is_tier
            else f"{summary}, {counted(left, 'sample')} refused{which}: repair, convert or remove "
            f"{them}"
        )
    if options.as_json:
        return
    healed = (
        f"{counted(checked.healed, 'block')} fetched again from the source, "
        if checked.healed
        else ""
    )
    remarks = [f"{len(checked.warned)} read with a warning"] if checked.warned else []
    if checked.notices:
        remarks.append(f"{counted(len(checked.notices), 'warning')} about the whole")
    print_line(f"{summary}, {healed}{', '.join(remarks) or 'all sound'}")


def _print_lines(kind: str, lines: list[str]) -> None:
    for line in lines[:_MOST_SHOWN]:
        print_line(f"{kind}: {printable(line)}")
    if len(lines) > _MOST_SHOWN:
        print_line(f"{kind}: ... and {len(lines) - _MOST_SHOWN} more")


def _verify_data(path: str, options: dict[str, object]) -> FolderVerification:
    """Read every sample of a data set and decode it."""
    checked = FolderVerification()
    with _noting(checked.notices):
        _verify_samples(path, checked, options)
    return checked


def _verify_samples(path: str, checked: FolderVerification, options: dict[str, object]) -> None:
    from dlio.data.reader import open_reader
    from dlio.image import image_warnings
    from dlio.image.decoder import decode_whole

    reader = open_reader(path, follow_links=None, trust=None, **options)
    check = SampleCheck(reader.schema, decode_whole)
    with SourceThread(redact(path)) as thread:
        for block in range(reader.layout.blocks):
            samples = reader.layout.samples_of(block)
            for sample, payload in _payloads(reader, samples, thread, checked.damaged):
                name = SampleName(reader, sample)
                try:
                    check.check(payload, name)
                except (CorruptBlock, SourceError) as error:
                    checked.damaged.append(str(error))
                    continue
                if (reason := image_warnings.WARNINGS.of(name)) is not None:
                    checked.warned.append(f"{name}: {reason}")
                checked.samples += 1
                checked.bytes += len(payload)
    reader.close()


def _payloads(
    reader: Reader, samples: npt.NDArray[np.int64], thread: SourceThread, damaged: list[str]
) -> Iterator[tuple[int, Buffer]]:
    """Yield samples with their payloads; add a line to `damaged` for each that cannot be read.

    Raises SourceError if the source hangs.
    """
    group: list[int] = []
    total = 0
    for sample in samples.tolist():
        size = int(reader.sizes[sample])
        if not is_plausible(size, 0):
            damaged.append(
                f"{SampleName(reader, sample)} has {size} bytes, more than a quarter of this "
                "process's memory, and is not read: store it in smaller parts, or give --trust"
            )
            continue
        if group and total + size > _GROUP_BYTES:
            yield from _group(reader, group, thread, damaged)
            group, total = [], 0
        group.append(sample)
        total += size
    yield from _group(reader, group, thread, damaged)


def _group(
    reader: Reader, group: list[int], thread: SourceThread, damaged: list[str]
) -> Iterator[tuple[int, Buffer]]:
    """Yield samples that are read together, or one by one if one of them cannot be read."""
    if not group:
        return
    try:
        payloads = thread.call(partial(reader.read, np.array(group, np.int64)))
    except (CorruptBlock, SourceError) as error:
        if thread.hangs:
            raise
        if len(group) == 1:
            damaged.append(str(error))
            return
        for sample in group:
            yield from _group(reader, [sample], thread, damaged)
        return
    yield from zip(group, payloads, strict=True)


@contextmanager
def _noting(lines: list[str]) -> Iterator[None]:
    """Add to `lines` the warnings that are logged in the block, or would be, had this process not
    told them before, each once; but those about pictures, which are counted."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if record.module != "image_warnings" and line not in lines:
                lines.append(line)

    handler, log = Notes(logging.WARNING), logging.getLogger("dlio")
    log.addHandler(handler)
    try:
        with hearing() as heard:
            yield
    finally:
        log.removeHandler(handler)
    words = dict.fromkeys(shortened(printable(text)) for text in heard)
    lines += [line for line in words if line not in lines]
