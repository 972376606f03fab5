"""One bit per entry: signs of the gradient after a random rotation, one magnitude per 1,024 signs
(Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021).

Signs of the gradient itself, with one mean per sign (Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014), approximate it badly if few entries are large: all small ones are sent
as the mean, too. After a rotation all entries of a block have similar magnitudes, and the message
holds 0.64 of the gradient's energy. With error feedback, networks then train as with exact
gradients; with signs of the gradient itself, they did not quite (docs/LOG.md).

A block of W entries v is rotated by w = H D v, where D flips the signs of a fixed pseudo-random
half of the entries and H is the Walsh-Hadamard matrix of +1 and -1 (H H = W). The message has the
signs of w and, as bfloat16, s = mean(|w|) / W. It is decoded as q = s D H sign(w), whose entries
are integer multiples of s. A tensor's last entries form smaller blocks; blocks of fewer than 64
entries are not rotated.

Exactness: D H sign(w) has at most 11 bits and s has 8, so q is computed without rounding. |v| does
not exceed W s, up to the rounding of s, so v - q is exact if q has the sign of v and |v| >= |q|/2.
Otherwise it may be rounded, by at most 2^-24 (|v| + |q|); `compress` explains why this is
unavoidable.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.compressor_base import Bytes, Compressor
from dlio.exchange.compress.int8 import SmallTensors
from dlio.exchange.compress.message_layout import (
    CHUNK,
    F32,
    ChunkScratch,
    Piece,
    Pieces,
    all_finite,
    refuse_not_finite,
)
from dlio.plan.order import mix

_BLOCK: Final = 1 << 10
_LEAST: Final = 1 << 6
"""Number of entries of the smallest block that is rotated."""
LARGEST: Final = np.float32(2.0**120)
"""Maximum of q. Blocks beyond it are sent as zeros: the sum of two of them would overflow."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Blocks of the same width that are processed together."""

    start: int
    blocks: int
    width: int
    """Number of entries of a block."""
    first_block: int
    first_byte: int
    """Offset of its signs in the message; the last byte may be partly used."""

    @property
    def stop(self) -> int:
        return self.start + self.blocks * self.width

    @property
    def bytes(self) -> int:
        return -(-(self.blocks * self.width) // 8)


class OneBit(Compressor):
    """A compressor to signs.

    A message has each block's s as bfloat16, the small tensors as int8, and one bit per sign.
    """

    def __init__(self, pieces: Pieces, scratch: ChunkScratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        shapes = [shape for piece in pieces if not piece.small for shape in blocks_of(piece)]
        self._blocks = sum(blocks for _, blocks, _ in shapes)
        self._tiles: list[_Tile] = []
        block, at = 0, 2 * self._blocks + self._small.max_bytes
        for start, blocks, width in shapes:
            tile = _Tile(start, blocks, width, block, at)
            self._tiles.append(tile)
            block, at = block + blocks, at + tile.bytes
        self.max_bytes = at

    def encode(self, values: F32, residual: F32, message: Bytes) -> int:
        sizes = message[: 2 * self._blocks].view(np.uint16)
        with np.errstate(all="ignore"):
            self._small.encode(values, residual, message[2 * self._blocks :])
            for tile in self._tiles:
                v = residual[tile.start : tile.stop].reshape(tile.blocks, tile.width)
                np.add(v, values[tile.start : tile.stop].reshape(v.shape), out=v)
                if not all_finite(v.reshape(-1)):
                    refuse_not_finite(v.reshape(-1), tile.start, self._pieces)
                w = self._numbers(tile)
                # Divide by W before, not after the rotation: its sums can then not overflow.
                np.multiply(v, flips(tile.width) / np.float32(turned(tile.width)), out=w)
                self._turn(w)
                # Signs of v itself, with a mean for each, send every small entry as the mean: on
                # tiny ImageNet 32.5 to 33.5 % held out, where the rotation has 33.6 to 35.1 and
                # exact sums 34.0 to 34.9.
                signs = np.signbit(w, out=self._scratch.mask[: v.size].reshape(v.shape))
                message[tile.first_byte :][: tile.bytes] = np.packbits(signs)
                means = np.einsum("ij->i", np.abs(w, out=w)) / np.float32(tile.width)
                means[means > LARGEST / np.float32(turned(tile.width))] = 0
                sizes[tile.first_block :][: tile.blocks] = _to_bfloat16(means)
                np.subtract(v, self._decoded(tile, message, sizes), out=v)
        return self.max_bytes

    def add(self, message: Bytes, into: F32) -> None:
        self._small.add(message[2 * self._blocks :], into)
        sizes = message[: 2 * self._blocks].view(np.uint16)
        for tile in self._tiles:
            into[tile.start : tile.stop] += self._decoded(tile, message, sizes).reshape(-1)

    def _decoded(self, tile: _Tile, message: Bytes, sizes: npt.NDArray[np.uint16]) -> F32:
        """Decode a tile into scratch memory; shape (blocks, width)."""
        q = self._numbers(tile)
        negative = np.unpackbits(message[tile.first_byte :][: tile.bytes], count=q.size)
        np.multiply(negative.reshape(q.shape), np.float32(-2), out=q)
        np.add(q, np.float32(1), out=q)
        self._turn(q)
        of_tile = sizes[tile.first_block :][: tile.blocks].astype(np.uint32) << 16
        np.multiply(q, of_tile.view(np.float32)[:, None], out=q)
        return np.multiply(q, flips(tile.width), out=q)

    def _turn(self, w: F32) -> None:
        """Multiply each row by the Walsh-Hadamard matrix, in place.

        A row of W entries is laid out as a matrix and multiplied from both sides by the matrices of
        about sqrt(W) rows whose Kronecker product the Walsh-Hadamard matrix is. This takes up to 64
        multiplications per entry, in products small enough to stay in the calling thread.
        """
        if turned(w.shape[1]) == 1:
            return
        left, right = walsh(w.shape[1])
        blocks = w.reshape(-1, len(left), len(right))
        between = self._scratch.between[: w.size].reshape(blocks.shape)
        # Two small products, not log2 W passes of additions: each pass of numpy's would read and
        # write all entries.
        np.matmul(blocks, right, out=between)
        np.matmul(left, between, out=blocks)

    def _numbers(self, tile: _Tile) -> F32:
        """Return scratch memory for a tile's entries; shape (blocks, width)."""
        return self._scratch.floats[: tile.blocks * tile.width].reshape(tile.blocks, tile.width)


def blocks_of(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield (start, blocks, entries per block) of tiles of at most a chunk."""
    start, left, width = piece.start, piece.size, _BLOCK
    while left >= _LEAST:
        while width > left:
            width //= 2
        blocks = min(left, CHUNK) // width
        yield start, blocks, width
        start, left = start + blocks * width, left - blocks * width
    if left:
        yield start, 1, left


def turned(width: int) -> int:
    """Number of entries that the rotation combines: `width`, or 1 if the block is not rotated."""
    return width if width >= _LEAST else 1


@cache
def flips(width: int) -> F32:
    """The diagonal of D: +1 or -1 for each entry of a block; shape (width,)."""
    # The same flips for all blocks and steps: they need no seed in the message.
    odd = mix(np.arange(width, dtype=np.uint64), np.uint64(0)) & np.uint64(1)
    return 1 - 2 * odd.astype(np.float32)


@cache
def walsh(width: int) -> tuple[F32, F32]:
    """Return two matrices, for columns and rows, whose Kronecker product is the Walsh-Hadamard
    matrix of `width` rows, a power of two."""
    bits = width.bit_length() - 1
    matrices = [np.ones((1, 1), np.float32)]
    for _ in range(bits - bits // 2):
        half = matrices[-1]
        matrices.append(np.block([[half, half], [half, -half]]))
    return matrices[bits // 2], matrices[bits - bits // 2]


def _to_bfloat16(values: F32) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16 numbers and return their bits. Values are finite and >= 0."""
    bits = values.view(np.uint32)
    return np.asarray((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, np.uint16)
