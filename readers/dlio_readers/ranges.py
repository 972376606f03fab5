"""Arrays that lie in a file as they are: only the bytes of the rows, or of a part, are read."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray, plain_chunks
from dlio.data.source import File
from dlio.util.memory import new_memory

_MOST_TOGETHER: Final = 16 << 20
_LEAST_RUN: Final = 4096
"""Consecutive bytes of a part that are worth a request: storage reads no less than a page."""


class StoredArray:
    """An array in C order, without gaps in a file from a byte `offset` on, read in place.

    `stored` is the type of the elements, with their byte order. Thread-safe.
    """

    def __init__(
        self, file: File, offset: int, shape: tuple[int, ...], stored: npt.DTypeLike
    ) -> None:
        self._file, self._offset, self.shape = file, offset, shape
        self._stored = np.dtype(stored)
        self.dtype = self._stored.newbyteorder("=")
        self._row = math.prod(shape[1:]) * self._stored.itemsize
        self.sides = plain_chunks(shape, self._stored.itemsize)
        """Sides of the parts, of up to 1 MiB, that stand for its chunks."""

    def chunked(self, where: str) -> ChunkedArray:
        """Return the array with parts of it in place of chunks."""
        return ChunkedArray(where, self.shape, self.dtype, self.sides, self.read, self.place)

    @property
    def place(self) -> tuple[File, int] | None:
        """The file and the byte from which on its elements lie as payloads have them; None if they
        have another byte order."""
        is_little = self._stored.newbyteorder("<") == self._stored
        return (self._file, self._offset) if is_little else None

    @property
    def range(self) -> tuple[File, int, int]:
        """(file, offset, bytes) of the data."""
        return self._file, self._offset, self.shape[0] * self._row

    def rows_of(self, data: memoryview, count: int | None = None) -> npt.NDArray[np.generic]:
        """Return the rows, by default all, whose bytes are `data`; they may have none."""
        count = self.shape[0] if count is None else count
        rows = np.frombuffer(data, self._stored).reshape(count, *self.shape[1:])
        return rows.astype(self.dtype, copy=False)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        parts = key if isinstance(key, tuple) else (key,)
        if parts[0] is Ellipsis:
            parts = (slice(None),)
        if len(parts) > 1:
            part = self._slab(parts)
            if part is not None:
                return part.astype(self.dtype, copy=False)
        first, last, _ = parts[0].indices(self.shape[0])
        count = max(0, last - first)
        memory = new_memory(count * self._row)
        if len(memory):
            self._file.read_into(self._offset + first * self._row, memory)
        return self.rows_of(memory, count)[(slice(None), *parts[1:])]

    def _slab(self, parts: Sequence[slice | int]) -> npt.NDArray[Any] | None:
        """Read parts of the leading dimensions alone, rows first; None if these are all of some
        rows, or many small pieces of each.
        """
        shape = self.shape
        sides = [slice(None)] * len(shape)
        sides[: len(parts)] = [p if isinstance(p, slice) else slice(p, p + 1) for p in parts]
        bounds = [side.indices(size) for side, size in zip(sides, shape, strict=True)]
        box = tuple(slice(first, max(first, last)) for first, last, _ in bounds)
        counts = [side.stop - side.start for side in box]
        if not math.prod(counts) or counts[1:] == list(shape[1:]):
            return None
        axis = max(k for k, count in enumerate(counts) if count < shape[k] or k == 0)
        if axis > 1 and math.prod(counts[axis:]) * self._stored.itemsize < _LEAST_RUN:
            return None
        steps = [slice(None, None, step) for _, _, step in bounds]
        inner = zip(parts[1:], steps[1:], strict=False)
        key = [0 if not isinstance(part, slice) else step for part, step in inner]
        return self.read(box)[(slice(None), *key)]

    def read(self, box: Box) -> npt.NDArray[np.generic]:
        """Read a part, as it is stored, each run of consecutive bytes with one request."""
        shape, itemsize = self.shape, self._stored.itemsize
        sides = tuple(part.stop - part.start for part in box)
        memory = new_memory(math.prod(sides) * itemsize)
        whole = len(shape)
        while whole and sides[whole - 1] == shape[whole - 1]:
            whole -= 1
        outer = max(0, whole - 1)
        """Dimensions before those that a run covers."""
        run = math.prod(sides[outer:]) * itemsize
        steps = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
        first = sum(part.start * step for part, step in zip(box, steps, strict=True))
        if run:
            for number, place in enumerate(np.ndindex(*sides[:outer])):
                at = first + sum(k * step for k, step in zip(place, steps, strict=False))
                into = memory[number * run : (number + 1) * run]
                self._file.read_into(self._offset + at, into)
        return np.frombuffer(memory, self._stored).reshape(sides)


class FortranArray:
    """An array in Fortran order, without gaps in a file from a byte `offset` on, read in place.

    The values of a row lie apart, so neighbouring rows are read together, `unit` of them.
    """

    def __init__(
        self, file: File, offset: int, shape: tuple[int, ...], stored: npt.DTypeLike
    ) -> None:
        # The first dimension varies fastest.
        self._array = StoredArray(file, offset, shape[::-1], stored)
        self.shape, self.dtype = shape, self._array.dtype
        size = self.dtype.itemsize
        row = max(1, math.prod(shape[1:]) * size)
        self.unit = max(1, min(shape[0], _LEAST_RUN // size, _MOST_TOGETHER // row))

    def chunked(self, where: str) -> ChunkedArray:
        """Return the array with parts of it in place of chunks."""
        return ChunkedArray(where, self.shape, self.dtype, self._array.sides[::-1], self.read)

    def read(self, box: Box) -> npt.NDArray[np.generic]:
        """Read a part, as it is stored."""
        return self._array.read(box[::-1]).T

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        parts = key if isinstance(key, tuple) else (key,)
        if parts[0] is Ellipsis:
            parts = (slice(None),)
        first, last, _ = parts[0].indices(self.shape[0])
        box = (slice(first, max(first, last)), *(slice(0, size) for size in self.shape[1:]))
        read = self.read(box)[(slice(None), *parts[1:])]
        return np.ascontiguousarray(read).astype(self.dtype, copy=False)
