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

from dlio.util.limits import open_regular
from dlio.util.trusted_files import closing_descriptor

_BLOCK: Final = 4096
_BLOCKS: Final = 8
"""Parts of a file that are read: the first, the last, and some between."""
_WALKED: Final = 4096
"""Files of a store of many that are looked at."""
_READ: Final = 64
"""Files of a store of many that are sampled."""
_SAMPLED: Final = (64, 50, 512)
"""Of a folder of many files, one in 50 is sampled: 64 at least, and 512 at most."""
_STAMPS: Final = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
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
        size = os.fstat(descriptor).st_size
        digest = xxhash.xxh3_64()
        if size <= blocks * _BLOCK:
            digest.update(os.pread(descriptor, size, 0))
        else:
            for at in spread(size - _BLOCK + 1, blocks):
                digest.update(os.pread(descriptor, _BLOCK, at))
        return digest.hexdigest()


def store_sample(root: str, opened: Callable[[str], int] = open_regular) -> str:
    """Return a hash of sizes, times and parts of the files in a local folder, of the first 4,096.

    Raises OSError.
    """
    files: list[str] = []
    for folder, below, names in os.walk(root):
        below.sort()
        files += [os.path.join(folder, name) for name in sorted(names)]
        if len(files) >= _WALKED:
            break
    files = files[:_WALKED]
    digest = xxhash.xxh3_64()
    sampled = set(spread(len(files), _READ))
    for number, path in enumerate(files):
        status = os.stat(path)
        name = os.path.relpath(path, root)
        content = content_sample(path, 3, opened) if number in sampled else ""
        row = f"{name} {status.st_size} {status.st_mtime_ns} {content}\n"
        digest.update(row.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
