"""Memory of batches, used again when nobody holds it any more."""

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class BatchMemory:
    """Arrays for batches, used again as soon as nobody else refers to them. Thread-safe.

    Page-locked ones are left to torch's own caching allocator: a copy to the GPU may be under way
    when the last reference goes, and torch knows until when.

    Args:
        shape: of one batch.
        pinned: page-locked, for asynchronous copies to a GPU.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, pinned: bool) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._pinned = pinned
        self._arrays: list[npt.NDArray[Any]] = []
        self._lock = threading.Lock()

    def take(self) -> npt.NDArray[Any]:
        if self._pinned:
            kind = torch.from_numpy(np.empty(0, self._dtype)).dtype
            return torch.empty(self._shape, dtype=kind, pin_memory=True).numpy()
        with self._lock:
            for k in range(len(self._arrays)):
                # Two references: the list's and the call's. A tensor made of it holds another.
                if sys.getrefcount(self._arrays[k]) == 2:
                    return self._arrays[k]
            fresh = np.empty(self._shape, self._dtype)
            self._arrays.append(fresh)
            return fresh
