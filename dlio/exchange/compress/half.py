"""Sixteen bits per entry: plain bfloat16, or float16 with a power of two as scale for each chunk.

Both round to nearest, so that q/2 <= v <= 2q or q = 0, and v - q is exact. torch converts, because
numpy does not have bfloat16.
"""

from typing import Final

import numpy as np
import torch

from dlio.errors import CommError
from dlio.exchange.compress.compressor_base import Bytes, ChunkwiseCompressor
from dlio.exchange.compress.message_layout import (
    F32,
    ChunkScratch,
    Pieces,
    all_finite,
    refuse_not_finite,
)

_CHUNK: Final = 1 << 15
"""Number of entries up to which torch works in the calling thread. More are shared among threads,
which wait for each other longer than they work on cores that are busy with decoding."""
_MOST_BFLOAT16: Final = float(torch.finfo(torch.bfloat16).max)
_MOST_FLOAT16: Final = 32752.0
"""The largest float16 below 2^15: a chunk's largest entry is scaled to [2^14, 2^15)."""
_LOWEST: Final = 15
"""Minimum biased exponent of a chunk: below it, scales would be denormal."""
_HIGHEST: Final = 254
"""Biased exponent of the largest finite float32 numbers."""
_TO_SCALE: Final = 14
_TO_INVERSE: Final = 268


class Bfloat16(ChunkwiseCompressor):
    """A compressor to bfloat16. Message: bfloat16 (entries,).

    Entries beyond the largest bfloat16 number are clamped, and leave a residual.
    """

    chunk = _CHUNK

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        super().__init__(pieces, scratch)
        self.max_bytes = 2 * self.entries

    def encode_chunk(self, start: int, v: F32, w: F32, message: Bytes) -> None:
        if not all_finite(v):
            refuse_not_finite(v, start, self.pieces)
        halves = _typed(message[2 * start : 2 * (start + len(v))], torch.bfloat16)
        left, near = torch.from_numpy(v), torch.from_numpy(w)
        # Conversion alone would make infinity of the largest entries, and of their residuals.
        torch.clamp(left, -_MOST_BFLOAT16, _MOST_BFLOAT16, out=near)
        halves.copy_(near)
        near.copy_(halves)
        left.sub_(near)

    def decode_chunk(self, start: int, w: F32, message: Bytes) -> None:
        halves = _typed(message[2 * start : 2 * (start + len(w))], torch.bfloat16)
        torch.from_numpy(w).copy_(halves)


class Float16(ChunkwiseCompressor):
    """A compressor to float16. Message: float16 (entries,), then exponents uint8 (chunks,)."""

    chunk = _CHUNK

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        super().__init__(pieces, scratch)
        self.max_bytes = 2 * self.entries + -(-self.entries // _CHUNK)

    def encode_chunk(self, start: int, v: F32, w: F32, message: Bytes) -> None:
        largest = np.maximum.reduce(np.abs(v, out=w))
        if not np.isfinite(largest):
            refuse_not_finite(v, start, self.pieces)
        # A scale per chunk: plain float16 would flush most gradients to denormal numbers or zero.
        exponent = max(int(largest.view(np.uint32)) >> 23, _LOWEST)
        message[2 * self.entries + start // _CHUNK] = exponent
        np.multiply(v, _power(_TO_INVERSE - exponent), out=w)
        halves = _typed(message[2 * start : 2 * (start + len(v))], torch.float16)
        scaled = torch.from_numpy(w)
        halves.copy_(scaled.clamp_(-_MOST_FLOAT16, _MOST_FLOAT16))
        scaled.copy_(halves)
        np.multiply(w, _power(exponent - _TO_SCALE), out=w)
        np.subtract(v, w, out=v)

    def add(self, message: Bytes, into: F32) -> None:
        exponents = message[2 * self.entries : self.max_bytes]
        if len(exponents) and not _LOWEST <= exponents.min() <= exponents.max() <= _HIGHEST:
            raise CommError("a message is damaged: it has an invalid scale")
        super().add(message, into)

    def decode_chunk(self, start: int, w: F32, message: Bytes) -> None:
        halves = _typed(message[2 * start : 2 * (start + len(w))], torch.float16)
        torch.from_numpy(w).copy_(halves)
        exponent = int(message[2 * self.entries + start // _CHUNK])
        np.multiply(w, _power(exponent - _TO_SCALE), out=w)


def _typed(message: Bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(message).view(dtype)


def _power(biased: int) -> np.float32:
    """Return 2^(biased - 127)."""
    return np.uint32(biased << 23).view(np.float32)
