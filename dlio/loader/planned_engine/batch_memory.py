"""Memory of batches, used again."""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.image.native.pool_library import address_of
from dlio.loader.delivery import HostMemoryKind, pinned_memory
from dlio.util.buffer_pool import BufferPool

_MOST_SPARE_BATCHES: Final = 64
"""Spare batches that are kept, more than are ever under way together."""
_TOGETHER_BYTES: Final = 8 << 20
"""Bytes of batches that are made together: a user who keeps one of them keeps the memory of all,
but for crops."""
MOST_TOGETHER: Final = 16


def batches_together(batch_bytes: int) -> int:
    """Return how many batches are made as one, by the bytes of each."""
    return max(1, min(MOST_TOGETHER, _TOGETHER_BYTES // max(1, batch_bytes)))


class BatchMemory:
    """Arrays of a shape for batches, used again as soon as nothing refers to them. Thread-safe.

    Fresh memory for each batch would cost as much as reading into it: the kernel has to clear its
    pages first.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, kind: HostMemoryKind) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self.bytes = math.prod(shape) * self._dtype.itemsize
        self._kind = kind
        in_pool = kind is HostMemoryKind.IN_POOL
        # Page-locked memory takes tens of milliseconds to allocate; torch's cache is for users,
        # whose copies it knows of.
        self._pool = BufferPool(_MOST_SPARE_BATCHES, allocate=pinned_memory if in_pool else None)

    def take(self, rows: int | None = None) -> npt.NDArray[Any]:
        """Return an uninitialised array, of so many rows if not of the batch's; its memory comes
        back with its last tensor or view."""
        shape, size = self._shape, self.bytes
        if rows is not None:
            shape = (rows, *shape[1:])
            size = math.prod(shape) * self._dtype.itemsize
        if self._kind is HostMemoryKind.BY_TORCH:
            kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
            return torch.empty(shape, dtype=kind, pin_memory=True).numpy()
        return self._pool.lend(size).view(self._dtype).reshape(shape)


class CropMemory:
    """Uninitialised crops of batches that are made as one, each with memory of its own: whoever
    keeps one batch keeps no other. `sizes` are the samples of each."""

    def __init__(self, memory: BatchMemory, sizes: Sequence[int]) -> None:
        self.arrays = [memory.take() for _ in sizes]
        """Of each batch, with all rows of `memory`."""
        self._sizes, self._ends = sizes, list(itertools.accumulate(sizes))

    def batch_of(self, slot: int) -> tuple[npt.NDArray[Any], int]:
        """Return (the array of a slot's batch, the first slot in it)."""
        # Partners have rows behind those of the last batch.
        batch = min(bisect.bisect_right(self._ends, slot), len(self._ends) - 1)
        return self.arrays[batch], self._ends[batch] - self._sizes[batch]

    def __getitem__(self, slot: int) -> npt.NDArray[Any]:
        array, first = self.batch_of(slot)
        crop: npt.NDArray[Any] = array[slot - first]
        return crop

    def addresses(self) -> npt.NDArray[np.int64]:
        """Return the address of each slot's crop."""
        rows = zip(self.arrays, self._sizes, strict=True)
        return np.concatenate(
            [address_of(array) + np.arange(size) * array.strides[0] for array, size in rows]
        )
