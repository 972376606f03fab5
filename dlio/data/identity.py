"""Samples of the contents of files, by which a rewritten file differs from the one before.

Size and time of change can be those of another file: `cp -p`, `rsync -t` and `touch -d` set them.
So some bytes belong to a file's identity, too. The time of change that nobody can set (ctime) and
the inode do not: they differ between copies, and change with permissions. They make dlio look
again.
"""

import os
from collections.abc import Callable, Mapping
from typing import Final

import xxhash

from dlio.errors import SourceError
from dlio.util.limits import open_regular, regular
from dlio.util.printable import tell_once
from dlio.util.trusted_files import closing_descriptor

_BLOCK: Final = 4096
_BLOCKS: Final = 8
"""Parts of a file that are read: the first, the last, and some between."""
_COARSEST_NS: Final = 2_000_000_000
"""Step of the coarsest clock of file systems: FAT's."""
_LOOKED_AT: Final = 64
"""Files of a store of many that are sampled, next to those that describe its arrays."""
_SAMPLED: Final = (64, 50, 512)
"""Of a folder of many files, one in 50 is sampled: 64 at least, and 512 at most."""
_STAMPS: Final = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "created",
    "date_time",
    "md5Hash",
    "CRC",
)
"""Attributes of a file, by file system, that change when the file does."""


def stamp_of(info: Mapping[str, object]) -> str:
    """Return the attributes of a remote file that change when it does."""
    return " ".join(f"{key} {info[key]}" for key in _STAMPS if key in info)


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of the numbers below `count`, evenly spread, with first and last."""
    if count <= most:
        return list(range(count))
    return [k * (count - 1) // (most - 1) for k in range(most)]


def sampled_of(count: int) -> list[int]:
    """Return the numbers of files of a folder of which parts are read, a small share of `count`."""
    least, share, most = _SAMPLED
    return spread(count, max(least, min(count // share, most)))


def content_sample(
    path: str, blocks: int = _BLOCKS, opened: Callable[[str], int] = open_regular
) -> str:
    """Return a hash of parts of a local file; of all of a file of up to `blocks` x 4 KiB. `opened`
    opens a regular file.

    Raises OSError.
    """
    with closing_descriptor(opened(path)) as descriptor:
        return sample_of(descriptor, os.fstat(descriptor).st_size, blocks)


def sample_of(descriptor: int, size: int, blocks: int = _BLOCKS) -> str:
    """Do what `content_sample` does, of the first `size` bytes of a file that is open."""
    digest = xxhash.xxh3_64()
    if size <= blocks * _BLOCK:
        digest.update(os.pread(descriptor, size, 0))
    else:
        for at in spread(size - _BLOCK + 1, blocks):
            digest.update(os.pread(descriptor, _BLOCK, at))
    return digest.hexdigest()


def look_again(
    descriptor: int, name: str, known: tuple[int, int], size: int, content: str | None
) -> tuple[int, int]:
    """Return the size and the time of change of an open file, which are not the `known` ones.

    If bytes were added at most to its `size`, its `content_sample` is compared, if it was
    taken: that somebody has touched a file, as against a purge, ends no run, and is told unless all
    of it was compared.

    Raises SourceError if it has changed.
    """
    status = os.fstat(descriptor)
    if status.st_size < size or content not in (None, sample_of(descriptor, size)):
        raise SourceError(f"{name} has changed since it was opened: run again")
    now = status.st_size, status.st_mtime_ns
    is_whole = content is not None and status.st_size == size <= _BLOCKS * _BLOCK
    # A server with a coarse clock cuts the time that it gave at first.
    is_cut = content is not None and now[0] == known[0] and 0 < known[1] - now[1] < _COARSEST_NS
    if not is_whole and not is_cut:
        compared = (
            "no part of it was compared"
            if content is None
            else "parts of it that were compared are as they were"
        )
        tell_once(
            f"{name} was written to, or touched, since it was opened: {compared}; if its samples "
            "have changed, run again"
        )
    return now


def store_sample(root: str, opened: Callable[[str, int], int]) -> str:
    """Return a hash of a local folder of many files, by a bounded number of system calls. `opened`
    opens a path below it, with flags; folders are listed by the descriptors that it returns.

    It has the names in the folders on the way to 64 files, evenly spread, and to those that
    describe arrays (`zarr.json`, `.zarray`); the times of these folders; sizes, times and parts of
    these files. Links to folders are not followed.

    Raises OSError, and whatever `opened` raises.
    """
    digest = xxhash.xxh3_64()

    def add(*parts: object) -> None:
        digest.update(f"{parts}\n".encode("utf-8", "surrogateescape"))

    def look(folder: str, most: int) -> None:
        with closing_descriptor(opened(folder, os.O_DIRECTORY)) as here, os.scandir(here) as rows:
            entries = sorted((row.name, row.is_dir(follow_symlinks=False)) for row in rows)
            modified_ns = os.fstat(here).st_mtime_ns
        add(folder or ".", modified_ns, len(entries))
        digest.update("\n".join(name for name, _ in entries).encode("utf-8", "surrogateescape"))
        chosen = entries[:1]
        if most > 1:
            chosen = [entries[number] for number in spread(len(entries), most)]
        chosen += [each for each in entries if _describes(each[0]) and each not in chosen]
        below = [name for name, is_folder in chosen if is_folder]
        for name, is_folder in chosen:
            path = os.path.join(folder, name)
            if not is_folder and not os.path.isdir(os.path.join(root, path)):
                status = os.stat(os.path.join(root, path))
                sample = content_sample(path, 3, lambda path: regular(opened(path, 0), path))
                add(name, status.st_size, status.st_mtime_ns, sample)
        share = (most - (len(chosen) - len(below))) // max(1, len(below))
        for name in below:
            look(os.path.join(folder, name), max(1, share))  # noqa: F821 - until the end

    try:
        look("", _LOOKED_AT)
    finally:
        del look  # It holds itself, and the store by `opened`, until Python looks for cycles.
    return digest.hexdigest()


def _describes(name: str) -> bool:
    """True for a file of a store with metadata, such as `.zarray`; not of chunks."""
    return name.startswith(".") or name.endswith(".json")
