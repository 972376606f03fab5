"""The page cache: dropping the data's pages from it, and how many of them it holds.

A benchmark of storage that reads from the page cache measures memory. Pages are dropped with
`posix_fadvise(DONTNEED)`, which any user may do for files that are on the disk, and by
`/proc/sys/vm/drop_caches` where this process may write it. Afterwards `mincore` tells the pages
that are still there, so that nothing rests on a promise.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dlio.errors import UsageError
from dlio.util.trusted_files import closing_descriptor
from dlio.util.units import counted
from dlio_bench.file_systems import FileSystem, file_system_of

DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
_WINDOW: Final = 1 << 30
"""Bytes of a file that are mapped at a time; a multiple of any page size."""
_THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Residency:
    """Pages of files that are in this machine's page cache."""

    pages: int
    """Pages of all files whose residency could be asked."""
    resident_pages: int
    unknown_files: int = 0
    """Files whose pages this user cannot ask for."""
    notes: tuple[str, ...] = ()
    """Sentences on caches that could not be dropped."""

    @property
    def share(self) -> float:
        """Share of the pages that are resident, 0 to 1; 0 without pages."""
        return self.resident_pages / self.pages if self.pages else 0.0


def drop(files: Sequence[str], *, everything: bool = False) -> Residency:
    """Drop the pages of files from this machine's page cache; return what is left of them.

    Args:
        files: paths of data files, which may be on any file system.
        everything: also write `drop_caches` where this process may; that drops the pages,
            directory entries and inodes of all files of this machine.

    Raises UsageError for a file that cannot be opened.
    """
    with ThreadPoolExecutor(_THREADS, "dlio-cache") as pool:
        list(pool.map(_advise, files))
    if everything and os.access(DROP_CACHES, os.W_OK):
        with suppress(OSError), open(DROP_CACHES, "w", encoding="ascii") as switch:
            switch.write("3\n")
    left = residency(files)
    folders = {os.path.dirname(os.path.abspath(path)) for path in files}
    kinds = {each.type: each for each in map(file_system_of, folders)}
    return replace(left, notes=tuple(_notes(kinds.values(), left)))


def residency(files: Sequence[str]) -> Residency:
    """Count the pages of files that are in this machine's page cache.

    The kernel tells them only to those who may write the file, as it would tell strangers what
    others read. Raises UsageError for a file that cannot be opened.
    """
    # Many are opened at a time, as that may be slow.
    with ThreadPoolExecutor(_THREADS, "dlio-cache") as pool:
        counted = list(pool.map(_pages_of, files))
    known = [each for each in counted if each is not None]
    return Residency(
        sum(pages for pages, _ in known),
        sum(present for _, present in known),
        len(counted) - len(known),
    )


def _advise(path: str) -> None:
    with closing_descriptor(_opened(path)) as descriptor:
        # Pages that are not written yet stay; not all file systems sync a read-only descriptor.
        with suppress(OSError):
            os.fdatasync(descriptor)
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _pages_of(path: str) -> tuple[int, int] | None:
    """Return (pages of a file, those that are resident); None if they cannot be asked for."""
    descriptor = _opened(path)
    try:
        status = os.fstat(descriptor)
        may_ask = os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)
        return _count(descriptor, status.st_size) if may_ask else None
    except OSError:
        return None  # The file system cannot map files.
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be opened ({error.strerror}): generate the data again, or make the "
            "file readable"
        ) from error


def _count(descriptor: int, size: int) -> tuple[int, int]:
    """Return (pages of a file, those that are resident). Raises OSError."""
    pages = present = 0
    for start in range(0, size, _WINDOW):
        length = min(_WINDOW, size - start)
        window = mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start)
        with window:
            # An array of no use but its address: mapping a file reads nothing of it.
            mapped = np.frombuffer(window, np.uint8)
            count = -(-length // mmap.PAGESIZE)
            vector = np.empty(count, np.uint8)
            failed = _LIBC.mincore(
                ctypes.c_void_p(mapped.ctypes.data),
                ctypes.c_size_t(length),
                ctypes.c_void_p(vector.ctypes.data),
            )
            del mapped
            if failed:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            pages += count
            present += int((vector & 1).sum())
    return pages, present


def _notes(kinds: Iterable[FileSystem], left: Residency) -> Iterable[str]:
    for kind in kinds:
        if kind.in_memory:
            yield (
                f"{kind.mountpoint} is {kind.type}: its files are memory, and cannot be dropped; "
                "name a folder on a disk or a parallel file system"
            )
        elif kind.remote:
            yield (
                f"{kind.mountpoint} is {kind.type}: caches of its servers cannot be seen or "
                "dropped from here; use data of at least 5 times their memory"
            )
        elif kind.fuse:
            yield (
                f"{kind.mountpoint} is {kind.type}: a cache of the process that serves it cannot "
                "be seen from here"
            )
    if left.unknown_files:
        yield (
            f"the pages of {counted(left.unknown_files, 'file')} cannot be asked for: only their "
            "owner may, "
            "on file systems that map files"
        )


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
