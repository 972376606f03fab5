"""Eight bits per entry: integer multiples of a scale, one power of two per 256 entries.

Entries are rounded to the nearest multiple, not stochastically. Error feedback sends rounding
errors later, so stochastic rounding would remove no bias and add noise. Rounding to nearest halves
the largest error, needs no random numbers, gives the same bytes in every run, and keeps v - q
exact: v rounds to q = k s with k != 0 only if |v| >= s/2, which implies q/2 <= v <= 2q.

A scale that is a power of two costs up to one of the eight bits, but makes division exact, and is
stored in one byte.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.message_layout import (
    ChunkScratch,
    Piece,
    StatelessCompressor,
    chunks,
    refuse_not_finite,
)

BLOCK: Final = 256
MOST: Final = 127
LOWEST: Final = 7
"""Minimum exponent of a block, biased by 127 as in float32. Below it, 2^-120, scales would be
denormal; smaller entries mostly stay in the residual."""
HIGHEST: Final = 254
ROOM: Final = 1 << 17
"""Added to the bits of a block's largest entry, this raises its exponent if the entry is at least
127/128 of the next power of two: it would otherwise be rounded to 128, which int8 cannot hold."""
_TO_SCALE: Final = 6
"""A block whose largest entry is in [2^e, 2^(e+1)) has the scale 2^(e-6)."""
_TO_INVERSE: Final = 260


class Int8(StatelessCompressor):
    """A compressor to int8. Message: exponents uint8 (blocks,), then multiples int8 (entries,)."""

    def __init__(self, pieces: Sequence[Piece], scratch: ChunkScratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self.entries = pieces[-1].stop if pieces else 0
        self._blocks = -(-self.entries // BLOCK)
        self.max_bytes = self._blocks + self.entries

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        numbers = message[self._blocks : self.max_bytes].view(np.int8)
        with np.errstate(all="ignore"):
            for start, rows, width in self._tiles():
                stop = start + rows * width
                v, w = residual[start:stop], self._scratch.floats[: stop - start]
                v2, w2 = v.reshape(rows, width), w.reshape(rows, width)
                np.add(v, values[start:stop], out=v)
                np.abs(v, out=w)
                largest = np.maximum.reduce(w2, axis=1)
                if not np.isfinite(largest).all():
                    refuse_not_finite(v, start, self._pieces)
                exponents = np.maximum((largest.view(np.uint32) + ROOM) >> 23, LOWEST)
                overflows = int(exponents.max()) > HIGHEST
                np.minimum(exponents, HIGHEST, out=exponents)
                message[start // BLOCK :][:rows] = exponents
                np.multiply(v2, _power(_TO_INVERSE - exponents), out=w2)
                np.rint(w, out=w)
                if overflows:
                    np.clip(w, -MOST, MOST, out=w)
                np.copyto(numbers[start:stop], w, casting="unsafe")
                np.multiply(w2, _power(exponents - _TO_SCALE), out=w2)
                np.subtract(v, w, out=v)
        return self.max_bytes

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        numbers = message[self._blocks : self.max_bytes].view(np.int8)
        for start, rows, width in self._tiles():
            stop = start + rows * width
            w = self._scratch.floats[: stop - start]
            w2 = w.reshape(rows, width)
            exponents = message[start // BLOCK :][:rows].astype(np.uint32)
            np.copyto(w, numbers[start:stop])
            np.multiply(w2, _power(exponents - _TO_SCALE), out=w2)
            np.add(into[start:stop], w, out=into[start:stop])

    def _tiles(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, blocks, entries per block), chunk by chunk; the last block may be short."""
        for start, stop in chunks(self.entries):
            rows, rest = divmod(stop - start, BLOCK)
            if rows:
                yield start, rows, BLOCK
            if rest:
                yield stop - rest, 1, rest


class SmallTensors:
    """The small pieces of a region, sent as int8 within a message of a stronger compressor."""

    def __init__(self, pieces: Sequence[Piece], scratch: ChunkScratch) -> None:
        small = [piece for piece in pieces if piece.small]
        where = [np.arange(piece.start, piece.stop) for piece in small]
        self._where = np.concatenate([*where, np.empty(0, np.int64)])
        gathered, at = [], 0
        for piece in small:
            gathered.append(Piece(piece.name, at, 1, piece.size, small=True))
            at += piece.size
        self._int8 = Int8(gathered, scratch)
        self.max_bytes = self._int8.max_bytes

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> None:
        left = residual[self._where]
        self._int8.encode(values[self._where], left, message)
        residual[self._where] = left

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        sums = into[self._where]
        self._int8.add(message, sums)
        into[self._where] = sums


def _power(biased: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Return 2^(biased - 127) as a column; shape (n,) to (n, 1)."""
    return (biased << 23).astype(np.uint32).view(np.float32)[:, None]
