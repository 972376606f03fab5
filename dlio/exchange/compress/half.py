"""Sixteen bits per entry: plain bfloat16, or float16 with a power of two as scale for each chunk.

Both round to nearest, so that q/2 <= v <= 2q or q = 0, and v - q is exact. torch converts, because
numpy does not have bfloat16.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import CommError
from dlio.exchange.compress.message_layout import (
    ChunkScratch,
    Piece,
    StatelessCompressor,
    all_finite,
    refuse_not_finite,
)

HALF_CHUNK: Final = 1 << 15
"""Number of entries up to which torch works in the calling thread."""
MOST_BFLOAT16: Final = float(torch.finfo(torch.bfloat16).max)
MOST_FLOAT16: Final = 32752.0
"""The largest float16 below 2^15: a chunk's largest entry is scaled to [2^14, 2^15)."""
LOWEST: Final = 15
"""Minimum biased exponent of a chunk: below it, scales would be denormal."""
_HIGHEST: Final = 254
"""Biased exponent of the largest finite float32 numbers."""
_TO_SCALE: Final = 14
_TO_INVERSE: Final = 268


class Bfloat16(StatelessCompressor):
    """A compressor to bfloat16. Message: bfloat16 (entries,).

    Entries beyond the largest bfloat16 number are clamped, and leave a residual.
    """

    def __init__(self, pieces: Sequence[Piece], scratch: ChunkScratch) -> None:
        self._pieces = pieces
        self._scratch = torch.from_numpy(scratch.floats)
        self.entries = pieces[-1].stop if pieces else 0
        self.max_bytes = 2 * self.entries

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        halves = _typed(message[: self.max_bytes], torch.bfloat16)
        for start, stop in _chunks(self.entries):
            with np.errstate(all="ignore"):
                v = np.add(residual[start:stop], values[start:stop], out=residual[start:stop])
                if not all_finite(v):
                    refuse_not_finite(v, start, self._pieces)
            left, w = torch.from_numpy(v), self._scratch[: stop - start]
            torch.clamp(left, -MOST_BFLOAT16, MOST_BFLOAT16, out=w)
            halves[start:stop].copy_(w)
            w.copy_(halves[start:stop])
            left.sub_(w)
        return self.max_bytes

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        halves = _typed(message[: self.max_bytes], torch.bfloat16)
        for start, stop in _chunks(self.entries):
            w = self._scratch[: stop - start].copy_(halves[start:stop])
            torch.from_numpy(into[start:stop]).add_(w)


class Float16(StatelessCompressor):
    """A compressor to float16. Message: float16 (entries,), then exponents uint8 (chunks,)."""

    def __init__(self, pieces: Sequence[Piece], scratch: ChunkScratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self.entries = pieces[-1].stop if pieces else 0
        self.max_bytes = 2 * self.entries + -(-self.entries // HALF_CHUNK)

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        halves = _typed(message[: 2 * self.entries], torch.float16)
        exponents = message[2 * self.entries : self.max_bytes]
        for number, (start, stop) in enumerate(_chunks(self.entries)):
            v, w = residual[start:stop], self._scratch.floats[: stop - start]
            with np.errstate(all="ignore"):
                np.add(v, values[start:stop], out=v)
                largest = np.maximum.reduce(np.abs(v, out=w))
                if not np.isfinite(largest):
                    refuse_not_finite(v, start, self._pieces)
                exponent = max(int(largest.view(np.uint32)) >> 23, LOWEST)
                exponents[number] = exponent
                np.multiply(v, _power(_TO_INVERSE - exponent), out=w)
                scaled = torch.from_numpy(w)
                halves[start:stop].copy_(scaled.clamp_(-MOST_FLOAT16, MOST_FLOAT16))
                scaled.copy_(halves[start:stop])
                np.multiply(w, _power(exponent - _TO_SCALE), out=w)
                np.subtract(v, w, out=v)
        return self.max_bytes

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        halves = _typed(message[: 2 * self.entries], torch.float16)
        exponents = message[2 * self.entries : self.max_bytes]
        if len(exponents) and not LOWEST <= exponents.min() <= exponents.max() <= _HIGHEST:
            raise CommError("a message is damaged: it has an invalid scale")
        for number, (start, stop) in enumerate(_chunks(self.entries)):
            w = self._scratch.floats[: stop - start]
            torch.from_numpy(w).copy_(halves[start:stop])
            with np.errstate(under="ignore"):
                np.multiply(w, _power(int(exponents[number]) - _TO_SCALE), out=w)
            np.add(into[start:stop], w, out=into[start:stop])


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, HALF_CHUNK):
        yield start, min(start + HALF_CHUNK, size)


def _typed(message: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """View a message's bytes as a tensor of numbers."""
    if not len(message):
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(message).view(dtype)


def _power(biased: int) -> np.float32:
    """Return 2^(biased - 127)."""
    return np.uint32(biased << 23).view(np.float32)
