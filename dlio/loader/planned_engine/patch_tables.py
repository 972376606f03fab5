"""The parts of many patches at once, as arrays: `PatchReader.cuts` for copies outside of Python."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import ChunkedArray
from dlio.data.patches import PatchReader
from dlio.image.native import pool_library
from dlio.image.native.pool_library import DIMENSIONS, PIECE, FieldLayout, address_of
from dlio.util.buffer_pool import BufferPool

_I64 = npt.NDArray[np.int64]
_CHUNKS_A_PATCH: Final = 2
"""That there is room for at first."""
_SPARE: Final = 4
"""Batches whose memory for pieces is kept."""


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
        shapes = np.array([each.shape for each in arrays], np.int64)
        firsts = [reader.chunks.first(name, k) for k in range(len(arrays))]
        tables = (
            shapes,
            np.array([each.chunks for each in arrays], np.int64),
            np.array([each.grid for each in arrays], np.int64),
            np.array(firsts, np.int64),
        )
        by_row, dimensions, sides = reader.by_row, shapes.shape[1], reader.sides
        patch: list[int] = shapes[0].tolist()
        if by_row:
            patch[0] = 1
        axes = [-1] * dimensions
        for axis, at in enumerate(reader.cut_dimensions(dimensions)):
            if at is not None:
                patch[at], axes[at] = sides[axis], axis
        self.pad = reader.pad_of(name)
        self.shape = tuple(patch[1:] if by_row else patch)
        """Of a patch."""
        item = self.dtype.itemsize
        self.bytes = math.prod(self.shape) * item
        steps = [item * math.prod(patch[at + 1 :]) for at in range(dimensions)]
        numbers = ctypes.c_int64 * DIMENSIONS
        self._layout = FieldLayout(
            *(dimensions, item, by_row, self.bytes, len(sides)),
            *(numbers(*each) for each in (axes, patch, steps)),
            *map(address_of, tables),
        )
        self._tables = tables  # The layout has their addresses.
        # New memory for each batch would take longer than to fill it.
        self._memory = BufferPool(_SPARE)

    def pieces(self, files: _I64, rows: _I64, starts: _I64, slots: _I64, to: int = 0) -> Pieces:
        """Return the parts of chunks that make up patches: by file and row of each, first indices
        along the axes that are cut, shape (n, axes), and its slot of the batch, whose array is at
        the address `to`."""
        library = pool_library.find()
        assert library is not None
        given = [np.ascontiguousarray(each, np.int64) for each in (files, rows, starts, slots)]
        padded = np.empty(len(files), np.bool_)
        made = _CHUNKS_A_PATCH * len(files)
        while True:
            room = made
            row, chunk = np.empty((2, room), np.int64)
            piece = self._memory.lend(room * PIECE.itemsize).view(PIECE)
            made = library.pieces(
                *(ctypes.byref(self._layout), len(files), *map(address_of, given), to, room),
                *map(address_of, (row, chunk, piece, padded)),
            )
            if made <= room:
                return Pieces(row[:made], chunk[:made], piece[:made], padded)


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
        self, numbers: _I64, slots: _I64, seed: int, epoch: int, to: Sequence[int]
    ) -> tuple[list[Pieces], _I64, _I64]:
        """Return (parts by field, numbers of volumes, shape (n,), first index along each axis cut,
        shape (n, axes)) of patches, which go into `slots` of a batch, whose arrays of the fields
        are at the addresses `to`."""
        volumes, starts = self._reader.places(numbers, seed, epoch)
        files, rows = self._files[volumes], self._rows[volumes]
        made = [
            field.pieces(files, rows, starts, slots, at)
            for field, at in zip(self.fields, to, strict=True)
        ]
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
        if not 0 < len(arrays[0].shape) < DIMENSIONS:
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
