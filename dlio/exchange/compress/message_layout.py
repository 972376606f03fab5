"""Positions of tensors in a flat region, its division among ranks, and working memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import DlioError

F32 = npt.NDArray[np.float32]

CHUNK: Final = 1 << 16
"""Number of entries processed at a time: a chunk and its scratch memory fit into a core's cache.

Nearly all work is done by numpy in the calling thread. torch would divide such chunks among its
threads; on cores that are busy decoding, these would wait for each other longer than they work.
"""
_SMALL_VECTOR: Final = 1 << 16
_SMALL_MATRIX: Final = 1 << 10
_BALANCE: Final = 8
"""A rank's part ends at the end of a row if one is within a part's size divided by this number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or consecutive entries of one, in a flat region: a matrix (rows, width)."""

    name: str
    start: int
    """Index of its first entry in the region."""
    rows: int
    width: int
    """Number of entries per row. In torch's layout (out, in, ...), a row has the weights of one
    output; papers that write a layer as W^T x call it a column."""
    small: bool

    @property
    def size(self) -> int:
        return self.rows * self.width

    @property
    def stop(self) -> int:
        return self.start + self.size


Pieces = Sequence[Piece]


def is_small(shape: Sequence[int]) -> bool:
    """True for biases, norms and tensors too small to gain from stronger compression."""
    count = math.prod(shape)
    return count <= (_SMALL_MATRIX if len(shape) > 1 else _SMALL_VECTOR)


def pieces_of(tensors: Sequence[tuple[str, Sequence[int]]]) -> list[Piece]:
    """Return the pieces of consecutive tensors (name, shape). Empty tensors have none."""
    pieces = []
    start = 0
    for name, shape in tensors:
        count = math.prod(shape)
        if count:
            rows = shape[0] if len(shape) > 1 else 1
            pieces.append(Piece(name, start, rows, count // rows, is_small(shape)))
            start += count
    return pieces


def split(pieces: Pieces, parts: int) -> list[list[Piece]]:
    """Cut a region into `parts` of about the same size, at the end of a row if one is near.

    `start` of the returned pieces counts from the beginning of their part. Parts may be empty.
    """
    return [within(pieces, start, stop) for start, stop in pairwise(cuts(pieces, parts))]


def cuts(pieces: Pieces, parts: int) -> list[int]:
    """Return where `split` cuts a region: the ends of its parts, from 0 on; parts + 1 of them."""
    total = pieces[-1].stop if pieces else 0
    # At the ends of rows: means and thresholds then belong to whole outputs of a layer.
    between = (_cut(pieces, total * k // parts, total // parts) for k in range(1, parts))
    return [0, *between, total]


def within(pieces: Pieces, start: int, stop: int) -> list[Piece]:
    """Return the pieces of start:stop of a region; their `start` counts from there."""
    return [
        replace(each, start=each.start - start)
        for piece in pieces
        for each in _between(piece, start, stop)
    ]


def _cut(pieces: Pieces, wanted: int, part: int) -> int:
    """Return the row's end nearest to `wanted`, or `wanted` itself if that is too far away."""
    piece = next((p for p in pieces if p.start <= wanted < p.stop), None)
    if piece is None:
        return wanted
    nearest = piece.start + round((wanted - piece.start) / piece.width) * piece.width
    return nearest if abs(nearest - wanted) * _BALANCE <= part else wanted


def _between(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of a piece within start:stop: a row's end, whole rows, a row's beginning."""
    start, stop = max(start, piece.start), min(stop, piece.stop)
    if start >= stop:
        return
    first = piece.start + math.ceil((start - piece.start) / piece.width) * piece.width
    last = piece.start + (stop - piece.start) // piece.width * piece.width
    if first > last:  # Within one row.
        yield replace(piece, start=start, rows=1, width=stop - start)
        return
    if start < first:
        yield replace(piece, start=start, rows=1, width=first - start)
    if first < last:
        yield replace(piece, start=first, rows=(last - first) // piece.width)
    if last < stop:
        yield replace(piece, start=last, rows=1, width=stop - last)


class ChunkScratch:
    """Working memory for one chunk. Not thread-safe."""

    def __init__(self) -> None:
        self.floats = np.empty(CHUNK, np.float32)
        self.between = np.empty(CHUNK, np.float32)
        self.mask = np.empty(CHUNK, np.bool_)


def chunks(size: int, chunk: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of a region."""
    for start in range(0, size, chunk):
        yield start, min(start + chunk, size)


def all_finite(numbers: F32) -> bool:
    """True if all numbers, shape (n,), and their sum are finite. Four times as fast as np.sum."""
    # np.isfinite(numbers).all() would write a mask as long as the chunk. A sum that overflows only
    # leads to the exact check in `refuse_not_finite`, which then finds nothing.
    return math.isfinite(np.einsum("i->", numbers))


def refuse_not_finite(values: F32, start: int, pieces: Pieces) -> None:
    """Raise DlioError, naming the tensor, if an entry is NaN or infinite; values begin at `start`
    of the region.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return
    first = start + int(bad[0])
    name = next(piece.name for piece in pieces if piece.start <= first < piece.stop)
    raise DlioError(
        f"the gradient of {name} plus its residual contains {values[bad[0]]} and cannot be "
        "compressed: training diverges; lower the learning rate (--lr)"
    )
