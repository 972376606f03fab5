"""Columns of several files, one after another."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Value
from dlio_readers.columns import Column


class ConcatColumn:
    """A column of several files, concatenated.

    Args:
        parts: columns of the same kind, one of each file.
        counts: rows of each file.
    """

    def __init__(self, parts: Sequence[Column], counts: Sequence[int]) -> None:
        self._parts = parts
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.kind = parts[0].kind
        self.unit = parts[0].unit
        self.dimensions = getattr(parts[0], "dimensions", None)

    def bodies(self) -> npt.NDArray[np.int64] | None:
        bodies = [part.bodies() for part in self._parts]
        known = [body for body in bodies if body is not None]
        return np.concatenate(known) if known else None

    def rows(self, start: int, stop: int) -> Sequence[Value] | npt.NDArray[np.generic]:
        parts: list[Sequence[Value] | npt.NDArray[np.generic]] = []
        first = int(np.searchsorted(self._firsts, start, side="right")) - 1
        for k in range(first, len(self._parts)):
            low, high = int(self._firsts[k]), int(self._firsts[k + 1])
            if low >= stop:
                break
            parts.append(self._parts[k].rows(max(start, low) - low, min(stop, high) - low))
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) == len(parts):
            joined: npt.NDArray[np.generic] = np.concatenate(arrays)
            return joined
        return [value for part in parts for value in part]
