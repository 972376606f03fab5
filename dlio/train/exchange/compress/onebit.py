"""One bit per entry: signs of the gradient after a random rotation, and one size per 1,024 signs
(Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021).

Signs of the gradient itself, with the mean of each sign (Seide et al., "1-Bit Stochastic Gradient
Descent", Interspeech 2014), say little where a few entries are large and most are not: every small
one is sent as the mean. Turned, all entries of a block are about alike, whatever they were, and
0.64 of the gradient's square arrives. With what is left kept for the next step, a network then
learns as from exact gradients, which it did not quite before (docs/LOG.md).

A block of W entries v is turned by w = H D v: D flips the signs of a fixed, arbitrary half of the
entries, H is Walsh's matrix of +1 and -1 (H H = W). Sent are the signs of w and s, the mean of |w|
over W as bfloat16; they stand for q = s D H sign(w), the entries of which are whole multiples of s.
A tensor's last entries go in smaller blocks, fewer than 64 unturned.

What is exact: D H sign(w) has at most 11 bits and s has 8, so that q is computed without rounding;
and no |v| exceeds W s by more than s was rounded, so that v - q is exact where q has v's sign and
|v| >= |q|/2. Else it may be rounded, by at most 2^-24 (|v| + |q|): no q could serve all, see
`compress`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.plan.order import mix
from dlio.train.exchange.compress.int8 import SmallTensors
from dlio.train.exchange.compress.layout import (
    CHUNK,
    Memoryless,
    Piece,
    Scratch,
    all_finite,
    refuse_not_finite,
)

__all__ = ["OneBit"]

_F32 = npt.NDArray[np.float32]
_U8 = npt.NDArray[np.uint8]
_BLOCK: Final = 1 << 10
_LEAST: Final = 1 << 6
"""Entries of the smallest block that is turned."""
_LARGEST: Final = np.float32(2.0**120)
"""Limit of q. Larger blocks are not sent: the sum of two such gradients would overflow."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Blocks of the same width that are processed together."""

    start: int
    blocks: int
    width: int
    """Entries of a block."""
    first_block: int
    first_byte: int
    """First byte of its signs in the message; the last byte may be partly used."""

    @property
    def stop(self) -> int:
        return self.start + self.blocks * self.width

    @property
    def bytes(self) -> int:
        return -(-(self.blocks * self.width) // 8)


class OneBit(Memoryless):
    """Message: s of each block, bfloat16; small tensors; signs, a bit each."""

    def __init__(self, pieces: Sequence[Piece], scratch: Scratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        shapes = [shape for piece in pieces if not piece.small for shape in _blocks(piece)]
        self._blocks = sum(blocks for _, blocks, _ in shapes)
        self._tiles: list[_Tile] = []
        block, at = 0, 2 * self._blocks + self._small.max_bytes
        for start, blocks, width in shapes:
            tile = _Tile(start, blocks, width, block, at)
            self._tiles.append(tile)
            block, at = block + blocks, at + tile.bytes
        self.max_bytes = at

    def encode(self, values: _F32, residual: _F32, message: _U8) -> int:
        sizes = message[: 2 * self._blocks].view(np.uint16)
        with np.errstate(all="ignore"):
            self._small.encode(values, residual, message[2 * self._blocks :])
            for tile in self._tiles:
                v = residual[tile.start : tile.stop].reshape(tile.blocks, tile.width)
                np.add(v, values[tile.start : tile.stop].reshape(v.shape), out=v)
                if not all_finite(v.reshape(-1)):
                    refuse_not_finite(v.reshape(-1), tile.start, self._pieces)
                w = self._numbers(tile)
                # By W less at once: no sum of numbers is then larger than all of them.
                np.multiply(v, _flips(tile.width) / np.float32(_turned(tile.width)), out=w)
                self._turn(w)
                signs = np.signbit(w, out=self._scratch.mask[: v.size].reshape(v.shape))
                message[tile.first_byte :][: tile.bytes] = np.packbits(signs)
                means = np.einsum("ij->i", np.abs(w, out=w)) / np.float32(tile.width)
                means[means > _LARGEST / np.float32(_turned(tile.width))] = 0
                sizes[tile.first_block :][: tile.blocks] = _to_bfloat16(means)
                np.subtract(v, self._decoded(tile, message, sizes), out=v)
        return self.max_bytes

    def add(self, message: _U8, into: _F32) -> None:
        self._small.add(message[2 * self._blocks :], into)
        sizes = message[: 2 * self._blocks].view(np.uint16)
        for tile in self._tiles:
            into[tile.start : tile.stop] += self._decoded(tile, message, sizes).reshape(-1)

    def _decoded(self, tile: _Tile, message: _U8, sizes: npt.NDArray[np.uint16]) -> _F32:
        """Decode a tile into scratch memory; shape (blocks, width)."""
        q = self._numbers(tile)
        negative = np.unpackbits(message[tile.first_byte :][: tile.bytes], count=q.size)
        np.multiply(negative.reshape(q.shape), np.float32(-2), out=q)
        np.add(q, np.float32(1), out=q)
        self._turn(q)
        of_tile = sizes[tile.first_block :][: tile.blocks].astype(np.uint32) << 16
        np.multiply(q, of_tile.view(np.float32)[:, None], out=q)
        return np.multiply(q, _flips(tile.width), out=q)

    def _turn(self, w: _F32) -> None:
        """Each row times Walsh's matrix, in place. Row by row of a block laid out as a matrix, then
        column by column: 64 multiplications an entry, as small products that one thread does."""
        if _turned(w.shape[1]) == 1:
            return
        left, right = _walsh(w.shape[1])
        blocks = w.reshape(-1, len(left), len(right))
        between = self._scratch.between[: w.size].reshape(blocks.shape)
        np.matmul(blocks, right, out=between)
        np.matmul(left, between, out=blocks)

    def _numbers(self, tile: _Tile) -> _F32:
        """Scratch memory for a tile's entries."""
        return self._scratch.floats[: tile.blocks * tile.width].reshape(tile.blocks, tile.width)


def _blocks(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(start, blocks, entries a block) of tiles of at most a chunk."""
    start, left, width = piece.start, piece.size, _BLOCK
    while left >= _LEAST:
        while width > left:
            width //= 2
        blocks = min(left, CHUNK) // width
        yield start, blocks, width
        start, left = start + blocks * width, left - blocks * width
    if left:
        yield start, 1, left


def _turned(width: int) -> int:
    """How many entries of a block are mixed: all, or one where the block is too small to turn."""
    return width if width >= _LEAST else 1


@cache
def _flips(width: int) -> _F32:
    """+1 or -1 of each entry of a block."""
    odd = mix(np.arange(width, dtype=np.uint64), np.uint64(0)) & np.uint64(1)
    return 1 - 2 * odd.astype(np.float32)


@cache
def _walsh(width: int) -> tuple[_F32, _F32]:
    """Walsh's matrix of a power of two, as one for the columns and one for the rows of a block."""
    bits = width.bit_length() - 1
    matrices = [np.ones((1, 1), np.float32)]
    for _ in range(bits - bits // 2):
        half = matrices[-1]
        matrices.append(np.block([[half, half], [half, -half]]))
    return matrices[bits // 2], matrices[bits - bits // 2]


def _to_bfloat16(values: _F32) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 numbers, as bits, of numbers that are 0 or more and finite."""
    bits = values.view(np.uint32)
    return np.asarray((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, np.uint16)
