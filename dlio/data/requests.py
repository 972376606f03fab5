"""Requests to local files, and the times of all requests to storage, for benchmarks.

    with observed_requests() as seconds:
        ...  # dlio reads
    seconds  # one value per request, opening the file included

Requests of readers that use a library of the format's own (HDF5, Parquet) are not seen.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from dlio.data.links import DataRoot
from dlio.util.forks import new_lock
from dlio.util.limits import check_regular

_UNCHECKED_BYTES: Final = 16 << 20
"""Bytes that are read without asking first whether the file has them."""

_observers: Final[list[list[float]]] = []
_lock: Final = new_lock()


@contextmanager
def observed_requests() -> Iterator[list[float]]:
    """Collect the seconds of each request of this process, of all threads, within the `with`."""
    seconds: list[float] = []
    with _lock:
        _observers.append(seconds)
    try:
        yield seconds
    finally:
        with _lock:
            _observers[:] = [each for each in _observers if each is not seconds]


class _RequestTimer:
    """Measures the time of its `with` block. Each thread needs its own."""

    __slots__ = ("_began",)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        for each in tuple(_observers):
            each.append(seconds)


_UNTIMED: Final = nullcontext()


def request() -> AbstractContextManager[None]:
    """Return a context manager around one request; it measures if anybody observes."""
    return _RequestTimer() if _observers else _UNTIMED


def are_observed() -> bool:
    """True if somebody measures requests: each is to be one that `request` sees."""
    return bool(_observers)


def pread(
    root: DataRoot,
    path: str,
    offset: int,
    count: int | None,
    check: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Return `count` bytes of a local file, or all up to its end; fewer when it is shorter.

    `check` gets the descriptor when they have been read. Raises OSError, also for what is not a
    file; SourceError for a link out of the root; and whatever `check` raises.
    """
    with request():
        descriptor = root.open(path)
        try:
            if count is None or count > _UNCHECKED_BYTES:
                status = os.fstat(descriptor)
                check_regular(status, path)
                left = max(0, status.st_size - offset)
                count = left if count is None else min(count, left)
            data = os.pread(descriptor, count, offset)
            while len(data) < count:
                more = os.pread(descriptor, count - len(data), offset + len(data))
                if not more:
                    break
                data += more
            check(descriptor)
            return data
        finally:
            os.close(descriptor)


def pread_into(
    root: DataRoot, path: str, offset: int, into: memoryview, check: Callable[[int], None]
) -> int:
    """Fill `into` from a local file; return the bytes that came, fewer when it is too short.

    Bounded: whatever has taken the file's place gives no more than is asked. `check` and errors as
    in `pread`.
    """
    with request():
        descriptor = root.open(path)
        try:
            done = fill(descriptor, offset, into)
            check(descriptor)
            return done
        finally:
            os.close(descriptor)


def fill(descriptor: int, offset: int, into: memoryview) -> int:
    """Fill `into` from an open file; return the bytes that came, fewer when it is too short.

    Raises OSError.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            break
        done += count
    return done
