"""Memory for samples, of which large pieces are used again.

Fresh memory is slow: the system clears every page at its first use. And a thread that asks the
system for memory, or returns it, holds the interpreter's lock and waits for page faults of the
process's other threads: some milliseconds for each sample of 8 MiB while others are being read. So
large pieces come from a pool, and go back to it when nothing refers to them any more.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LARGE: Final = 1 << 20
"""Bytes from which on memory is used again."""
_SPARE: Final = 64 << 20
"""Free bytes that are kept in any case."""


class _PieceLoan(weakref.ref[Any]):
    """A piece in use, until the array that it refers to is gone."""

    __slots__ = ("piece",)

    piece: mmap.mmap


class _PiecePool:
    """Pieces of private memory, by size.

    Without a lock: pieces come back in any thread at any moment, also while this one is inside a
    method. Each step below is a single operation of a dict or a deque.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._loans: dict[int, _PieceLoan] = {}

    def take(self, count: int) -> memoryview:
        """Return `count` bytes with undefined contents, which begin with a page."""
        size = _rounded(count)
        try:
            piece = self._free[size].pop()
        except (KeyError, IndexError):
            piece = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # Not on every system.
                piece.madvise(mmap.MADV_HUGEPAGE)
        # All that is made of the memoryview refers to this array, and to no other.
        array = np.frombuffer(piece, np.uint8, count)
        loan = _PieceLoan(array, self._give)
        loan.piece = piece
        self._loans[id(loan)] = loan
        return array.data

    @property
    def free_bytes(self) -> int:
        return sum(size * len(pieces) for size, pieces in self._free.copy().items())

    @property
    def lent_bytes(self) -> int:
        return sum(len(loan.piece) for loan in self._loans.copy().values())

    def _give(self, loan: weakref.ref[Any]) -> None:
        piece = self._loans.pop(id(loan)).piece
        self._free.setdefault(len(piece), deque()).append(piece)
        # As much is kept as is in use, so that the memory of a batch waits for the next one.
        excess = self.free_bytes - max(_SPARE, self.lent_bytes)
        for size in sorted(self._free.copy(), reverse=True) if excess > 0 else ():
            with suppress(IndexError):
                while excess > 0:
                    self._free[size].popleft()
                    excess -= size


_pool: Final = _PiecePool()


def new_memory(count: int) -> memoryview:
    """Return writable memory of `count` bytes with undefined contents.

    At least `LARGE` bytes begin with a page: FUSE divides requests whose memory does not.
    """
    return np.empty(count, np.uint8).data if count < LARGE else _pool.take(count)


def joined(parts: "Sequence[bytes | bytearray | memoryview]") -> "bytes | memoryview":
    """Return parts one after another, in new memory.

    Other threads run while much is copied, which `bytes.join` does not allow.
    """
    size = sum(map(len, parts))
    if size < LARGE:
        return b"".join(parts)
    memory = new_memory(size)
    into: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    at = 0
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return memory


def _rounded(count: int) -> int:
    """The next of eight sizes between two powers of two, so that few sizes serve all."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
