"""A pool of reusable memory: the first touch of new pages costs as much as reading into them.

There are two ways to get memory from a `BufferPool`:

- `take` returns a buffer, which the caller gives back, once. Use it where references to the memory
  may outlive its use.
- `lend` returns an array whose memory returns to the pool when the array and all its views,
  memoryviews and tensors have been garbage-collected. Use it for memory that is given to users, or
  that many samples share. It costs a weak reference per call.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.util.forks import new_lock


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """State of a pool: number of the buffers in use, and of the spare ones."""

    out: int
    spare: int
    allocated: int
    """Buffers that have been allocated since the pool exists."""


class BufferPool:
    """A pool of byte buffers. Thread-safe.

    Memory is aligned to 16 bytes. If a buffer is dropped without `give_back`, or outlives the pool,
    Python frees its memory like any array's, and the pool cannot reuse it.

    Args:
        most_spare: maximum number of spare buffers; beyond it the oldest is freed.
        slack: a spare buffer may be used for requests of at least 1/slack of its size,
        waste: or of at most this many bytes less than its size.
        headroom: share by which a new buffer exceeds the requested size, so that it can later
            serve slightly larger requests.
        allocate: returns a new buffer of that many bytes; ordinary memory by default.
    """

    def __init__(
        self,
        most_spare: int,
        *,
        slack: float = 2.0,
        waste: int = 0,
        headroom: float = 0.0,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self._allocate = allocate or (lambda size: np.empty(size, np.uint8))
        self._allocated = 0
        self._most_spare = most_spare
        self._slack, self._waste = slack, waste
        self._headroom = headroom
        self._lock = new_lock()
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._out = 0
        self._lent: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}
        self._keys = itertools.count()
        self._returned: deque[int] = deque()
        """Keys of lent memory without references. Weak-reference callbacks append to it, at any
        point of any thread, so they must not take the lock."""

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` uninitialised bytes or more until they are given back."""
        with self._lock:
            return self._buffer(size)

    def give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Let the memory of a buffer that was taken be used again, by others."""
        with self._lock:
            self._keep(buffer)

    def lend(self, size: int) -> npt.NDArray[np.uint8]:
        """Lend `size` uninitialised bytes until nothing refers to them; shape (size,)."""
        with self._lock:
            buffer = self._buffer(size)
            # Created from a memoryview: views of a view of `buffer` would refer to `buffer`
            # directly, not to `array`, which the weak reference watches.
            array = np.frombuffer(buffer.data, np.uint8, size)
            key, returned = next(self._keys), self._returned
            self._lent[key] = weakref.ref(array, lambda _: returned.append(key)), buffer
            return array

    def statistics(self) -> PoolStatistics:
        """Count the buffers in use and the spare ones."""
        with self._lock:
            self._collect()
            return PoolStatistics(self._out, len(self._spare), self._allocated)

    def clear(self) -> None:
        """Free the spare memory."""
        with self._lock:
            self._collect()
            self._spare.clear()

    def _buffer(self, size: int) -> npt.NDArray[np.uint8]:
        self._collect()
        for k in reversed(range(len(self._spare))):  # The last one may still be in a CPU cache.
            if size <= len(self._spare[k]) <= max(self._slack * size, size + self._waste):
                buffer = self._spare.pop(k)
                break
        else:
            buffer = self._allocate(max(1, size + int(self._headroom * size)))
            self._allocated += 1
        self._out += 1
        return buffer

    def _collect(self) -> None:
        while self._returned:
            _, buffer = self._lent.pop(self._returned.popleft())
            self._keep(buffer)

    def _keep(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._out -= 1
        self._spare.append(buffer)
        del self._spare[: len(self._spare) - self._most_spare]
