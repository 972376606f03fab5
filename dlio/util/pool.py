"""Memory that is used again: touching fresh pages costs as much as reading into them.

Two ways to get memory from a `Pool`:

- `take` gives a `Lease`, which whoever took it releases. For memory with one user.
- `lend` gives an array whose memory comes back by itself when nothing refers to the array, or to a
  view, a memoryview or a tensor of it, any more. For memory that is handed to users, or shared by
  as many holders as there are samples in it, and only there: it costs a weak reference each time.
"""

import itertools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

__all__ = ["Lease", "Pool", "PoolStatistics"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The state of a pool: buffers and bytes that are out, and that wait to be used again."""

    out: int
    spare: int
    out_bytes: int
    spare_bytes: int


class Lease:
    """Memory that is one user's until `release`. Works as a context manager.

    Releasing twice is an error: the memory may be somebody else's by then.
    """

    __slots__ = ("_buffer", "_pool", "array")

    def __init__(self, pool: "Pool", buffer: npt.NDArray[np.uint8], size: int) -> None:
        self._pool = pool
        self._buffer: npt.NDArray[np.uint8] | None = buffer
        self.array: npt.NDArray[np.uint8] = buffer[:size]
        """The memory, uninitialised; shape (size,)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the memory back. The array and its views must not be used after this.

        Raises RuntimeError when it has been given back before.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise RuntimeError("a lease of pooled memory was released twice")
        del self.array
        self._pool._give_back(buffer)


class Pool:
    """Byte buffers that are used again. Thread-safe.

    Memory is aligned to 16 bytes. A lease that is dropped without `release`, or outlives the pool,
    is freed by Python like any array; the pool only never sees its memory again.

    Args:
        most_spare: buffers that are kept for the next user; the oldest goes first.
        slack: a spare buffer serves a request of at least 1/slack of its size,
        waste: or of at most so many bytes less than its size.
        headroom: share by which a fresh buffer is larger than asked for, so that it serves
            requests that differ a little in size.
    """

    def __init__(
        self, most_spare: int, *, slack: float = 2.0, waste: int = 0, headroom: float = 0.0
    ) -> None:
        self._most_spare = most_spare
        self._slack, self._waste = slack, waste
        self._headroom = headroom
        self._lock = threading.Lock()
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._out = self._out_bytes = 0
        self._lent: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}
        self._keys = itertools.count()
        self._returned: deque[int] = deque()
        """Keys of lent memory that nothing refers to any more. The garbage collector appends to it,
        in the midst of anything and in any thread, and therefore takes no lock."""

    def take(self, size: int) -> Lease:
        """Lease `size` bytes, until they are released."""
        with self._lock:
            return Lease(self, self._buffer(size), size)

    def lend(self, size: int) -> npt.NDArray[np.uint8]:
        """Lend `size` uninitialised bytes, until nothing refers to them; shape (size,)."""
        with self._lock:
            buffer = self._buffer(size)
            # Made over a memoryview, not of `buffer`: numpy shortens chains of arrays, and views
            # would otherwise keep `buffer` alive and not `array`, whose end is watched.
            array = np.frombuffer(buffer.data, np.uint8, size)
            key, returned = next(self._keys), self._returned
            self._lent[key] = weakref.ref(array, lambda _: returned.append(key)), buffer
            return array

    def statistics(self) -> PoolStatistics:
        """Count the memory that is out and that is spare."""
        with self._lock:
            self._collect()
            spare_bytes = sum(len(buffer) for buffer in self._spare)
            return PoolStatistics(self._out, len(self._spare), self._out_bytes, spare_bytes)

    def clear(self) -> None:
        """Free the spare memory."""
        with self._lock:
            self._collect()
            self._spare.clear()

    def _buffer(self, size: int) -> npt.NDArray[np.uint8]:
        self._collect()
        for k in reversed(range(len(self._spare))):  # The last one may still lie in the cache.
            if size <= len(self._spare[k]) <= max(self._slack * size, size + self._waste):
                buffer = self._spare.pop(k)
                break
        else:
            buffer = np.empty(max(1, size + int(self._headroom * size)), np.uint8)
        self._out += 1
        self._out_bytes += len(buffer)
        return buffer

    def _collect(self) -> None:
        while self._returned:
            _, buffer = self._lent.pop(self._returned.popleft())
            self._keep(buffer)

    def _give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._keep(buffer)

    def _keep(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._out -= 1
        self._out_bytes -= len(buffer)
        self._spare.append(buffer)
        del self._spare[: len(self._spare) - self._most_spare]
