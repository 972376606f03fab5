"""Memory of a large index while it is built: files without a name in this node's cache.

The kernel writes their pages out where memory is short, and a process that trains for a week does
not keep the memory of a minute. Small arrays are in the process's own memory, and all where a file
cannot be made, or has no space.
"""

import mmap
import os
import threading
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.data.index import open_local_cache
from dlio.util.closable import Closable
from dlio.util.whole_files import open_unnamed

_SMALL: Final = 1 << 20
"""Bytes that need no file."""
Scalar = TypeVar("Scalar", bound=np.generic)
Kept = bytes | tuple[int, int]
"""Bytes that are kept, or where they are in the file, as (offset, bytes)."""


class KeptParts(Closable):
    """Arrays that are kept until an index is made of them. Thread-safe; to be closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = -1
        self._held = self._written = 0
        self._is_full = False

    def add(self, *arrays: npt.NDArray[np.generic]) -> Kept:
        """Keep the bytes of arrays, one after another; returns the argument of `get`."""
        data = b"".join(each.tobytes() for each in arrays)
        with self._lock:
            if not self._is_full and self._held + len(data) > _SMALL:
                try:
                    if self._file < 0:
                        self._file = _unnamed_file()
                    at = self._written
                    self._is_full = os.pwrite(self._file, data, at) != len(data)
                except OSError:
                    self._is_full = True
                if not self._is_full:
                    self._written += len(data)
                    return at, len(data)
            self._held += len(data)
            return data

    def get(self, kept: Kept) -> bytes:
        """Return bytes that were added. Raises OSError."""
        return kept if isinstance(kept, bytes) else os.pread(self._file, kept[1], kept[0])

    def close(self) -> None:
        """Let the file go."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def new_column(count: int, dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return an array of shape (count,) to be filled; a large one is in a file.

    Pages that `dlio.data.index.let_go` takes out of memory stay in the file.
    """
    size = count * np.dtype(dtype).itemsize
    if size > _SMALL:
        try:
            file = _unnamed_file()
            try:
                os.posix_fallocate(file, 0, size)  # A page without space would kill the process.
                return np.ndarray((count,), dtype, mmap.mmap(file, size))
            finally:
                os.close(file)
        except OSError:
            pass
    return np.empty(count, dtype)


def _unnamed_file() -> int:
    """Open a file that is gone when it is closed. Raises OSError."""
    with open_local_cache() as cache:
        return open_unnamed(cache)
