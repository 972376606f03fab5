"""Memory that compressed data become and that is kept, counted together for a data set's opening.

A file that allows no random access is decompressed as a whole, and stays so as long as its data set
is open. One file may become as much as `dlio.util.limits` says; of a folder of a hundred, each may.
So kept memory has one account, from the first file that is looked at to the reader that is
returned, and memory that is freed meanwhile is taken off again.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import numpy as np

from dlio.errors import SourceError
from dlio.util.forks import new_lock
from dlio.util.limits import is_plausible


class _Account:
    """The bytes that are kept by the readers that are opened together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._bytes = 0
        self._gone: deque[int] = deque()

    def add(self, count: int) -> int:
        """Count more bytes; return how many there are."""
        with self._lock:
            self._bytes += count
            while self._gone:
                self._bytes -= self._gone.popleft()
            return self._bytes

    def take_off(self, count: int) -> None:
        """Count fewer bytes. Memory goes in any thread at any moment, also in one inside `add`."""
        self._gone.append(count)


_account: Final[ContextVar[_Account | None]] = ContextVar("kept", default=None)


@contextmanager
def counted_together() -> Iterator[None]:
    """Count memory that is kept in the block, by this thread and those that it asks, as one.
    Inside of another such block, with that."""
    token = _account.set(_account.get() or _Account())
    try:
        yield
    finally:
        _account.reset(token)


class KeptMemory:
    """The bytes of one file, counted while it is decompressed; see `keeping`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._account = _account.get() or _Account()
        self._bytes = 0

    def grow(self, count: int) -> None:
        """Count more bytes, before they are kept. Raises SourceError if all are too many."""
        self._bytes += count
        total = self._account.add(count)
        if not is_plausible(total, 0):
            raise SourceError(
                f"{self._where}: compressed files that are kept in memory become {total} bytes or "
                "more: that is more than a quarter of this process's memory; decompress them, or "
                "open fewer; if you trust whoever made them, give --trust (in Python, trust=True)"
            )

    def hold(self, data: bytes | bytearray) -> memoryview:
        """Return the data; they are counted until nothing refers to them."""
        owner = np.frombuffer(data, np.uint8)
        weakref.finalize(owner, self._account.take_off, self._bytes).atexit = False
        self._bytes = 0
        return owner.data

    def drop(self) -> None:
        """Take off all that has not been held."""
        self._account.take_off(self._bytes)
        self._bytes = 0


@contextmanager
def keeping(where: str) -> Iterator[KeptMemory]:
    """Count the bytes of a file; those not in `hold` at the end of the block are taken off."""
    kept = KeptMemory(where)
    try:
        yield kept
    finally:
        kept.drop()
