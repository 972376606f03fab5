"""Verification and healing of disk tiers, by the checksums and manifests of their folders."""

import os
import re
from dataclasses import dataclass, field
from typing import Final

from dlio.errors import CorruptBlock, DlioError, SourceError, TierError
from dlio.storage.manifest import NAME, Manifest, read_manifest
from dlio.util.trusted_files import closing_descriptor, open_file
from dlio.util.user_folders import open_folder

_BLOCK: Final = re.compile(r"(\d{8,20})\.blk")


@dataclass(slots=True)
class FolderVerification:
    """Result of a verification."""

    samples: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """One line for each damaged sample, or damaged or missing block of a tier."""
    healed: int = 0
    """Damaged blocks of a tier that were fetched again."""


def find_folders(path: str) -> list[str]:
    """Return the folders at and below `path` that hold blocks, or a manifest of blocks."""
    folders = []
    for folder, _, names in os.walk(path):
        if any(_BLOCK.fullmatch(name) for name in names) or NAME in names:
            folders.append(folder)
    return sorted(folders)


def verify_folder(
    folder: str, result: FolderVerification, *, heal: bool, source: str | None
) -> None:
    """Verify one node's blocks of a data set; add samples, bytes and damage to `result`.

    Args:
        heal: fetch damaged and missing blocks again.
        source: data set to heal from; None for the one that the manifest names.

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
        _verify(opened, folder, result, heal=heal, source=source)


def _verify(
    opened: int, folder: str, result: FolderVerification, *, heal: bool, source: str | None
) -> None:
    owner = os.fstat(opened).st_uid
    if heal and (owner != os.geteuid() or os.fstat(opened).st_mode & 0o022):
        raise TierError(
            f"{folder} belongs to user {owner}, or others can write in it: only a tier of your "
            "own can be healed"
        )
    manifest = _manifest(opened, folder, result)
    wanted: dict[int, int] = {}
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
        result.healed += _heal(folder, broken, manifest, source)


def _manifest(opened: int, folder: str, result: FolderVerification) -> Manifest | None:
    """Return the manifest of a folder; None without one that is intact."""
    try:
        return read_manifest(opened, folder)
    except (CorruptBlock, OSError) as error:
        result.damaged.append(str(error))
        return None


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
        info = read_info(descriptor, path)
        if info.block != block:
            return f"{path} holds block {info.block}"
        scratch = PayloadScratch()
        for place in range(len(info)):
            result.bytes += len(info.read(descriptor, place, scratch))
            result.samples += 1
        if digest is not None and info.digest != digest:
            return f"{path} is not the block that was staged"
    except (DlioError, OSError) as error:
        return str(error)
    finally:
        os.close(descriptor)
    return None


def _heal(folder: str, broken: list[int], manifest: Manifest | None, source: str | None) -> int:
    """Fetch blocks from the source again; return how many are intact now.

    Raises SourceError when the source is unknown or another data set than the one staged.
    """
    from dlio.data.reader import open_reader
    from dlio.storage.block_fetcher import SourceRequests
    from dlio.storage.file_system_kind import file_system_of
    from dlio.storage.tier import Tier
    from dlio.storage.tier_spec import TierSpec

    base, node = os.path.split(folder)
    top, fingerprint = os.path.split(base)
    root = os.path.dirname(top)
    path = source or (manifest.about.get("source") if manifest is not None else None)
    if not path:
        raise SourceError(f"{folder} has no manifest that names its source: give --source")
    reader = open_reader(str(path))
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
