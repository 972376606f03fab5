"""The parts of many patches at once, as arrays: `PatchReader.cuts` for copies outside of Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import ChunkedArray
from dlio.data.patches import PatchReader

MOST_DIMENSIONS: Final = 6
"""Of an array. Volumes over time with channels have five."""
_I64 = npt.NDArray[np.int64]

PIECE: Final = np.dtype(
    [
        ("at", np.int64),
        ("to", np.int64),
        *((name, np.int64, MOST_DIMENSIONS) for name in ("count", "from_step", "to_step")),
    ]
)
"""A part of a chunk that goes into a patch: first byte in the chunk, and in the batch's array, then
for each dimension the number of elements, and bytes from one to the next in the chunk and in the
array. The last dimension is that of single bytes."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of chunks that make up one field of patches; a row for each."""

    row: _I64
    """Number of the patch, among those that were asked for."""
    chunk: _I64
    """Sample of the chunks' reader."""
    piece: npt.NDArray[np.void]
    """Of type PIECE."""
    padded: npt.NDArray[np.bool_]
    """True for the patches that are not filled by their pieces; shape (patches,)."""


class FieldTable:
    """The arrays of one field, one a file, as tables. All have the same dtype and dimensions."""

    def __init__(self, reader: PatchReader, name: str, arrays: Sequence[ChunkedArray]) -> None:
        self.name = name
        self.dtype: np.dtype[Any] = arrays[0].dtype.newbyteorder("=")
        chunks = reader.chunks
        self._shapes = np.array([each.shape for each in arrays], np.int64)
        self._chunks = np.array([each.chunks for each in arrays], np.int64)
        self._grids = np.array([each.grid for each in arrays], np.int64)
        self._firsts = np.array([chunks.first(name, k) for k in range(len(arrays))], np.int64)
        by_row = reader.by_row
        cut = reader.cut_dimensions(self._shapes.shape[1])
        self._cut = [(at, k) for k, at in enumerate(cut) if at is not None]
        self._sides = reader.sides
        self._by_row = by_row
        whole = self._shapes[0].copy()
        if by_row:
            whole[0] = 1
        for at, k in self._cut:
            whole[at] = self._sides[k]
        self._patch = whole
        self.pad = reader.pad_of(name)
        self.shape: tuple[int, ...] = tuple(whole[1:].tolist() if by_row else whole.tolist())
        """Of a patch."""
        self._to_step = _steps(whole[None], self.dtype.itemsize)[0]
        self.bytes = math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, files: _I64, rows: _I64, starts: _I64, slots: _I64) -> Pieces:
        """Return the parts of chunks that make up patches: by file and row of each, first indices
        along the axes that are cut, shape (n, axes), and its slot of the batch."""
        shape = self._shapes[files]
        low, high = np.zeros_like(shape), shape.copy()
        before = np.zeros_like(shape)
        if self._by_row:
            low[:, 0], high[:, 0] = rows, rows + 1
        for at, k in self._cut:
            low[:, at] = np.maximum(starts[:, k], 0)
            high[:, at] = np.minimum(starts[:, k] + self._sides[k], shape[:, at])
            before[:, at] = np.maximum(-starts[:, k], 0)
        padded = (high - low != self._patch).any(1)
        chunks = self._chunks[files]
        first = low // chunks
        touched = (high - 1) // chunks + 1 - first
        counts = touched.prod(1)
        row = np.repeat(np.arange(len(files)), counts)
        if len(row) > len(files):
            rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            place = first[row]
            for at in reversed(range(shape.shape[1])):
                along = touched[row, at]
                place[:, at] += rank % along
                rank //= along
            low, high, before, shape, chunks = (
                each[row] for each in (low, high, before, shape, chunks)
            )
            files, slots = files[row], slots[row]
        else:
            place = first
        begin = place * chunks
        sides = np.minimum(begin + chunks, shape) - begin
        inside = np.maximum(low, begin)
        count = np.minimum(high, begin + sides) - inside
        size = self.dtype.itemsize
        steps = _steps(sides, size)
        piece = np.zeros(len(row), PIECE)
        piece["at"] = ((inside - begin) * steps).sum(1)
        piece["to"] = slots * self.bytes + ((inside - low + before) * self._to_step).sum(1)
        piece["count"][:] = 1
        # One dimension more, of an element's bytes.
        fill = slice(MOST_DIMENSIONS - 1 - shape.shape[1], -1)
        piece["count"][:, fill] = count
        piece["from_step"][:, fill], piece["to_step"][:, fill] = steps, self._to_step
        piece["count"][:, -1] = size
        piece["from_step"][:, -1] = piece["to_step"][:, -1] = 1
        number = place[:, 0].copy()
        grid = self._grids[files]
        for at in range(1, shape.shape[1]):
            number *= grid[:, at]
            number += place[:, at]
        return Pieces(row, self._firsts[files] + number, piece, padded)


class PatchTables:
    """The formula of patches as tables: which parts of which chunks many patches have.

    Made by `tables_of`.
    """

    def __init__(self, reader: PatchReader, fields: Sequence[FieldTable]) -> None:
        self._reader, self.fields = reader, fields
        volumes = reader.volumes
        self._files = np.array([each.file for each in volumes], np.int64)
        self._rows = np.array([each.row or 0 for each in volumes], np.int64)

    def pieces(
        self, numbers: _I64, slots: _I64, seed: int, epoch: int
    ) -> tuple[list[Pieces], _I64, _I64]:
        """Return (parts by field, numbers of volumes, shape (n,), first index along each axis cut,
        shape (n, axes)) of patches, which go into `slots` of a batch."""
        volumes, starts = self._reader.places(numbers, seed, epoch)
        files, rows = self._files[volumes], self._rows[volumes]
        made = [field.pieces(files, rows, starts, slots) for field in self.fields]
        return made, volumes, starts


def tables_of(reader: PatchReader) -> PatchTables | None:
    """Return the tables of patches; None if these differ in shape or type, or have too many
    dimensions."""
    fields = []
    for name, arrays in reader.chunks.arrays.items():
        if len({each.dtype for each in arrays}) > 1:
            return None
        if len({len(each.shape) for each in arrays}) > 1:
            return None
        if not 0 < len(arrays[0].shape) < MOST_DIMENSIONS:
            return None
        if any(0 in each.shape for each in arrays) or arrays[0].dtype.kind not in "biuf":
            return None
        table = FieldTable(reader, name, arrays)
        dimensions = len(arrays[0].shape)
        differ = {*reader.cut_dimensions(dimensions), *([0] if reader.by_row else [])}
        kept = [at for at in range(dimensions) if at not in differ]
        if len({tuple(each.shape[at] for at in kept) for each in arrays}) > 1:
            return None
        fields.append(table)
    return PatchTables(reader, fields)


def _steps(shapes: _I64, itemsize: int) -> _I64:
    """Return the bytes from an element to the next along each dimension, of arrays in C order;
    both of shape (n, dimensions)."""
    steps = np.full_like(shapes, itemsize)
    for at in reversed(range(shapes.shape[1] - 1)):
        steps[:, at] = steps[:, at + 1] * shapes[:, at + 1]
    return steps
