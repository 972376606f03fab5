"""Eight bits per entry: integer multiples of a scale, one power of two per 256 entries.

Entries are rounded to the nearest multiple, not stochastically. Error feedback sends rounding
errors later, so stochastic rounding would remove no bias and add noise. Rounding to nearest halves
the largest error, needs no random numbers, gives the same bytes in every run, and keeps v - q
exact: v rounds to q = k s with k != 0 only if |v| >= s/2, which implies q/2 <= v <= 2q.

A scale that is a power of two costs up to one of the eight bits, but makes division exact, and is
stored in one byte.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.compressor_base import Bytes, ChunkwiseCompressor
from dlio.exchange.compress.message_layout import (
    F32,
    ChunkScratch,
    Piece,
    Pieces,
    refuse_not_finite,
)

_BLOCK: Final = 256
_MOST: Final = 127
_LOWEST: Final = 7
"""Minimum exponent of a block, biased by 127 as in float32. Below it, 2^-120, scales would be
denormal; smaller entries mostly stay in the residual."""
_HIGHEST: Final = 254
_ROOM: Final = 1 << 17
"""Added to the bits of a block's largest entry, this raises its exponent if the entry is at least
127/128 of the next power of two: it would otherwise be rounded to 128, which int8 cannot hold."""
_TO_SCALE: Final = 6
"""A block whose largest entry is in [2^e, 2^(e+1)) has the scale 2^(e-6)."""
_TO_INVERSE: Final = 260


class Int8(ChunkwiseCompressor):
    """A compressor to int8. Message: exponents uint8 (blocks,), then multiples int8 (entries,)."""

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        super().__init__(pieces, scratch)
        self._blocks = -(-self.entries // _BLOCK)
        self.max_bytes = self._blocks + self.entries

    def encode_chunk(self, start: int, v: F32, w: F32, message: Bytes) -> None:
        for at, rows, width in _tiles(len(v)):
            here = slice(at, at + rows * width)
            v2, w2 = v[here].reshape(rows, width), w[here].reshape(rows, width)
            np.abs(v2, out=w2)
            largest = np.maximum.reduce(w2, axis=1)
            if not np.isfinite(largest).all():
                refuse_not_finite(v[here], start + at, self.pieces)
            exponents = np.maximum((largest.view(np.uint32) + _ROOM) >> 23, _LOWEST)
            overflows = int(exponents.max()) > _HIGHEST
            np.minimum(exponents, _HIGHEST, out=exponents)
            message[(start + at) // _BLOCK :][:rows] = exponents
            np.multiply(v2, _power(_TO_INVERSE - exponents), out=w2)
            # Not stochastic rounding: error feedback leaves no bias that its noise could remove.
            np.rint(w2, out=w2)
            if overflows:
                np.clip(w2, -_MOST, _MOST, out=w2)
            numbers = message[self._blocks + start + at :][: rows * width].view(np.int8)
            np.copyto(numbers, w[here], casting="unsafe")
            np.multiply(w2, _power(exponents - _TO_SCALE), out=w2)
            np.subtract(v2, w2, out=v2)

    def decode_chunk(self, start: int, w: F32, message: Bytes) -> None:
        np.copyto(w, message[self._blocks + start :][: len(w)].view(np.int8))
        for at, rows, width in _tiles(len(w)):
            w2 = w[at : at + rows * width].reshape(rows, width)
            exponents = message[(start + at) // _BLOCK :][:rows].astype(np.uint32)
            np.multiply(w2, _power(exponents - _TO_SCALE), out=w2)


def _tiles(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, blocks, entries per block) of a chunk: whole blocks, then a short last one."""
    rows, rest = divmod(size, _BLOCK)
    if rows:
        yield 0, rows, _BLOCK
    if rest:
        yield size - rest, 1, rest


class SmallTensors:
    """The small pieces of a region, sent as int8 within a message of a stronger compressor."""

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        small = [piece for piece in pieces if piece.small]
        where = [np.arange(piece.start, piece.stop) for piece in small]
        self._where = np.concatenate([*where, np.empty(0, np.int64)])
        gathered, at = [], 0
        for piece in small:
            gathered.append(Piece(piece.name, at, 1, piece.size, small=True))
            at += piece.size
        self._int8 = Int8(gathered, scratch)
        self.max_bytes = self._int8.max_bytes

    def encode(self, values: F32, residual: F32, message: Bytes) -> None:
        left = residual[self._where]
        self._int8.encode(values[self._where], left, message)
        residual[self._where] = left

    def add(self, message: Bytes, into: F32) -> None:
        sums = into[self._where]
        self._int8.add(message, sums)
        into[self._where] = sums


def _power(biased: npt.NDArray[np.uint32]) -> F32:
    """Return 2^(biased - 127) as a column; shape (n,) to (n, 1)."""
    return (biased << 23).astype(np.uint32).view(np.float32)[:, None]
