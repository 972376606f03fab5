"""One bit an entry: its sign, and the mean of each sign for every run of rows (Seide et al.,
"1-Bit Stochastic Gradient Descent", Interspeech 2014).

The papers have two means for each column of the weight matrix, which is a row of torch's. Rows of
fewer than 1,024 entries share theirs with the next ones, so that two bfloat16 means cost at most
1/32 bit an entry; rows of more than 32,768 are cut.

What is exact: a mean has 8 significant bits, and the largest of n <= 32,768 entries of a sign is at
most n times their mean, so that q's last bit is no finer than v's; hence v - q is exact for
|v| >= |q|/2. For smaller v it is rounded, by at most 2^-24 |q|: no q could serve all (`compress`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.train.exchange.compress.int8 import SmallTensors
from dlio.train.exchange.compress.layout import (
    CHUNK,
    Memoryless,
    Piece,
    Scratch,
    all_finite,
    refuse_not_finite,
)

_SHORTEST: Final = 1 << 10
_LONGEST: Final = 1 << 15
_MOST_BFLOAT16: Final = np.uint32(0x7F7F)
_SIGN: Final = np.uint32(1 << 31)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some groups of entries, each group with two means, that are worked on at once."""

    start: int
    groups: int
    width: int
    """Entries of a group."""
    first_group: int
    first_byte: int
    """Of its signs in the message; the last byte may be half used."""

    @property
    def stop(self) -> int:
        return self.start + self.groups * self.width

    @property
    def bytes(self) -> int:
        return -(-(self.groups * self.width) // 8)


class OneBit(Memoryless):
    """Message: means bfloat16 (groups, 2), non-negative first; small tensors; signs, a bit each."""

    def __init__(self, pieces: Sequence[Piece], scratch: Scratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        shapes = [shape for piece in pieces if not piece.small for shape in _grouped(piece)]
        self._groups = sum(groups for _, groups, _ in shapes)
        self._tiles: list[_Tile] = []
        group, at = 0, 4 * self._groups + self._small.max_bytes
        for start, groups, width in shapes:
            tile = _Tile(start, groups, width, group, at)
            self._tiles.append(tile)
            group, at = group + groups, at + tile.bytes
        self.max_bytes = at

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        means = message[: 4 * self._groups].view(np.uint16).reshape(-1, 2)
        with np.errstate(all="ignore"):
            self._small.encode(values, residual, message[4 * self._groups :])
            for tile in self._tiles:
                v = residual[tile.start : tile.stop].reshape(tile.groups, tile.width)
                np.add(v, values[tile.start : tile.stop].reshape(v.shape), out=v)
                sums = self._sums(tile, v)
                mask = self._scratch.mask[: v.size].reshape(v.shape)
                signs = np.packbits(np.signbit(v, out=mask))
                message[tile.first_byte :][: tile.bytes] = signs
                negative = _counted(signs, mask)
                counts = np.stack([tile.width - negative, negative])
                rounded = _to_bfloat16((sums / np.maximum(counts, 1)).astype(np.float32))
                means[tile.first_group :][: tile.groups] = rounded.T
                q = self._numbers(tile)
                # -1 where v is negative, or 0.
                np.right_shift(v.view(np.int32), 31, out=q.view(np.int32))
                _choose(q, rounded)
                np.subtract(v, q, out=v)
        return self.max_bytes

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        self._small.add(message[4 * self._groups :], into)
        means = message[: 4 * self._groups].view(np.uint16).reshape(-1, 2)
        for tile in self._tiles:
            q = self._numbers(tile)
            signs = np.unpackbits(message[tile.first_byte :][: tile.bytes], count=q.size)
            np.negative(signs.view(np.int8), out=signs.view(np.int8))
            np.copyto(q.view(np.int32), signs.view(np.int8).reshape(q.shape))
            _choose(q, means[tile.first_group :][: tile.groups].T)
            into[tile.start : tile.stop] += q.reshape(-1)

    def _numbers(self, tile: _Tile) -> npt.NDArray[np.float32]:
        """Scratch memory for a tile's entries."""
        return self._scratch.floats[: tile.groups * tile.width].reshape(tile.groups, tile.width)

    def _sums(
        self, tile: _Tile, v: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
        """Of each group's non-negative and of its negative entries; shape (2, groups)."""
        # v + |v| and v - |v|: four times as fast as np.maximum, and as exact.
        twice = np.empty((2, tile.groups), np.float32)
        w = self._numbers(tile)
        np.einsum("ij->i", np.add(np.abs(v, out=w), v, out=w), out=twice[0])
        np.einsum("ij->i", np.subtract(v, np.abs(v, out=w), out=w), out=twice[1])
        if all_finite(twice.reshape(-1)):
            return twice * np.float32(0.5)
        refuse_not_finite(v.reshape(-1), tile.start, self._pieces)
        # Finite entries whose sum is not.
        return np.stack([np.maximum(v, 0).sum(1, np.float64), np.minimum(v, 0).sum(1, np.float64)])


def _grouped(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """(start, groups, entries a group) of tiles of at most a chunk."""
    if piece.width > _LONGEST:
        width = _LONGEST
    else:
        width = piece.width * min(piece.rows, -(-_SHORTEST // piece.width))
    start, left = piece.start, piece.size // width
    while left:
        groups = min(left, CHUNK // width)
        yield start, groups, width
        start, left = start + groups * width, left - groups
    if start < piece.stop:
        yield start, 1, piece.stop - start


def _counted(signs: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many of each row are set. Packed bits are an eighth of the bytes to look at."""
    groups, width = mask.shape
    if width % 64:
        return np.asarray(np.count_nonzero(mask, axis=1), np.int64)
    words = np.bitwise_count(signs.view(np.uint64)).reshape(groups, -1)
    counts: npt.NDArray[np.int64] = words.sum(axis=1, dtype=np.int64)
    return counts


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 number that is finite, as bits."""
    bits = values.view(np.uint32)
    size = bits & ~_SIGN
    size = np.minimum((size + 0x7FFF + (size >> 16 & 1)) >> 16, _MOST_BFLOAT16)
    return np.asarray(size | (bits & _SIGN) >> 16, np.uint16)


def _choose(q: npt.NDArray[np.float32], means: npt.NDArray[np.uint16]) -> None:
    """Overwrite masks with means.

    Args:
        q: shape (groups, entries), as int32: 0 to choose the first mean, -1 for the second.
        means: bfloat16 bits, shape (2, groups).
    """
    plus, minus = means.astype(np.uint32) << 16
    bits = q.view(np.uint32)
    np.bitwise_and(bits, (plus ^ minus)[:, None], out=bits)
    np.bitwise_xor(bits, plus[:, None], out=bits)
