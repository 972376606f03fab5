"""Entries beyond a level, as index and sign; the rest waits in the residual.

A tensor's level and what its entries are sent as come from a rule (`threshold`, `adaptive`). For
each tensor no more than a 64th of its entries is sent: those that found no room are first in the
next message, so that none can be kept waiting by those before it.

An entry takes 16 bits: its place in a block of 32,768 entries, and its sign.

What is exact: an entry is sent as q with |q| <= 2|v|, and where |v| > 2|q|, q's last bit is no
finer than v's, because rules give few bits to q, and send only the largest where one entry is far
beyond the others. What is not sent is in the residual as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.errors import CommError
from dlio.train.exchange.compress.int8 import SmallTensors
from dlio.train.exchange.compress.layout import (
    CHUNK,
    Piece,
    Scratch,
    all_finite,
    refuse_not_finite,
)

MOST_SENT: Final = 64
"""One entry in so many, at most."""
_SAMPLE: Final = 1024
_BLOCK: Final = 1 << 15
_PLACE: Final = _BLOCK - 1
_SIGN: Final = np.uint16(_BLOCK)


class Rule(Protocol):
    """What is sent of a tensor, and as what."""

    def level(self, tensor: int, sample: npt.NDArray[np.float32]) -> float:
        """The |v| from which on entries are sent, from magnitudes of at most 1,024 of them,
        shape (n,), which may be overwritten. 0 when they do not tell."""

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        """For the entries of one sign: (least, q).

        Those that are smaller than `least` are not sent after all, the others as q, which is cut
        to a bfloat16 number. So that v - q is exact: q <= 2 least and, for the largest v, either
        v <= 2^15 q, or q is a power of two and v <= 2^23 q.

        Args:
            sizes: magnitudes, all at least `level`, shape (n > 0,).
        """

    def crowded(self, tensor: int) -> None:
        """More entries were beyond the level than can be sent."""


@dataclass(slots=True)
class _Tensor:
    piece: Piece
    most: int
    """Entries sent, at most."""
    blocks: slice
    """Of the message's counts."""
    next_entry: int = 0
    """Where to begin to look for what is to be sent."""


class Sparse:
    """Message: for each large tensor, two bfloat16 numbers, for positive and negative entries;
    entries of each block, uint16 (blocks,); words uint16 (sum of these,); small tensors, whose
    length is fixed, stand before the words."""

    def __init__(
        self, pieces: Sequence[Piece], scratch: Scratch, rule: Rule, seed: int = 0
    ) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self._rule = rule
        self._random = np.random.default_rng(seed)
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        self._tensors: list[_Tensor] = []
        starts = []
        blocks = 0
        for piece in pieces:
            if not piece.small:
                starts.append(np.arange(piece.start, piece.stop, _BLOCK))
                last = blocks + len(starts[-1])
                most = max(1, piece.size // MOST_SENT)
                self._tensors.append(_Tensor(piece, most, slice(blocks, last)))
                blocks = last
        self._block_starts = np.concatenate([*starts, np.empty(0, np.int64)])
        self._block_tensors = np.repeat(np.arange(len(starts)), [len(each) for each in starts])
        self._counts_at = 4 * len(self._tensors)
        self._small_at = self._counts_at + 2 * blocks
        self._words_at = self._small_at + self._small.max_bytes + self._small.max_bytes % 2
        self._most = sum(tensor.most for tensor in self._tensors)
        self.max_bytes = self._words_at + 2 * self._most

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        means = message[: self._counts_at].view(np.uint16).reshape(-1, 2)
        counts = message[self._counts_at : self._small_at].view(np.uint16)
        words = message[self._words_at : self.max_bytes].view(np.uint16)
        at = 0
        with np.errstate(all="ignore"):
            self._small.encode(values, residual, message[self._small_at :])
            for number, tensor in enumerate(self._tensors):
                piece = tensor.piece
                v = residual[piece.start : piece.stop]
                level = self._level(number, v, values[piece.start : piece.stop])
                places = self._candidates(tensor, v, values[piece.start : piece.stop], level)
                if tensor.next_entry:
                    self._rule.crowded(number)
                means[number], places, negative = self._send(v, places, level)
                word = (places & _PLACE).astype(np.uint16)
                word[negative] |= _SIGN
                words[at : at + len(word)] = word
                at += len(word)
                length = tensor.blocks.stop - tensor.blocks.start
                counts[tensor.blocks] = np.bincount(places // _BLOCK, minlength=length)
        return self._words_at + 2 * at

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        if len(message) < self._words_at:
            raise CommError(f"a message of {len(message)} bytes is damaged: it has no whole head")
        means = message[: self._counts_at].view(np.uint16).reshape(-1, 2)
        counts = message[self._counts_at : self._small_at].view(np.uint16).astype(np.int64)
        total = int(counts.sum())
        if total > self._most or self._words_at + 2 * total > len(message):
            raise CommError(f"a message says that it holds {total} entries: it is damaged")
        self._small.add(message[self._small_at :], into)
        words = message[self._words_at :][: 2 * total].view(np.uint16)
        places = (words & _PLACE).astype(np.int64)
        places += np.repeat(self._block_starts, counts)
        if total and int(places.max()) >= self.entries:
            raise CommError("a message has an entry beyond the region's end: it is damaged")
        plus, minus = (means.T.astype(np.uint32) << 16).view(np.float32)[:, self._block_tensors]
        q = np.where(words & _SIGN, np.repeat(minus, counts), np.repeat(plus, counts))
        into[places] += q

    def _level(
        self, number: int, v: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
    ) -> float:
        """From which magnitude on to send; infinity when all is zero."""
        if len(v) > _SAMPLE:
            at = self._random.integers(0, len(v), _SAMPLE)
            sample = np.abs(v[at] + values[at])
        else:
            sample = np.abs(v + values)
        level = self._rule.level(number, sample)
        if level == 0:
            largest = max(
                float(np.abs(v[start : start + CHUNK] + values[start : start + CHUNK]).max())
                for start in range(0, len(v), CHUNK)
            )
            # The power of two below it: `threshold` sends the level itself.
            level = math.ldexp(0.5, math.frexp(largest)[1]) if largest else math.inf
        return level

    def _candidates(
        self,
        tensor: _Tensor,
        v: npt.NDArray[np.float32],
        values: npt.NDArray[np.float32],
        level: float,
    ) -> npt.NDArray[np.int64]:
        """Add values to v; the entries that are to be sent, at most tensor.most, in order."""
        limit = np.float32(level)
        begin = tensor.next_entry
        found: list[npt.NDArray[np.int64]] = []
        count = 0
        before = np.empty(0, np.int64)
        starts = range(0, len(v), CHUNK)
        turn = begin // CHUNK
        for start in [*starts[turn:], *starts[:turn]]:
            chunk = v[start : start + CHUNK]
            w, mask = self._scratch.floats[: len(chunk)], self._scratch.mask[: len(chunk)]
            np.add(chunk, values[start : start + CHUNK], out=chunk)
            np.abs(chunk, out=w)
            if not all_finite(w):
                refuse_not_finite(chunk, tensor.piece.start + start, self._pieces)
            if count > tensor.most:
                continue
            places = np.flatnonzero(np.greater_equal(w, limit, out=mask))
            places += start
            if start <= begin < start + CHUNK:
                first = int(np.searchsorted(places, begin))
                before, places = places[:first], places[first:]
            found.append(places)
            count += len(places)
        places = np.concatenate([*found, before])
        tensor.next_entry = 0
        if len(places) > tensor.most:
            tensor.next_entry = int(places[tensor.most])
            places = places[: tensor.most]
        if begin:
            places.sort()
        return places

    def _send(
        self, v: npt.NDArray[np.float32], places: npt.NDArray[np.int64], level: float
    ) -> tuple[tuple[int, int], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Take out of v what is sent; its bits for each sign, the entries, which are negative."""
        sent = v[places]
        negative = np.signbit(sent)
        sizes = np.abs(sent)
        q = np.zeros_like(sent)
        bits = [0, 0]
        for number, side in enumerate((~negative, negative)):
            of_side = sizes[side]
            if len(of_side):
                least, mean = self._rule.cut(of_side, level)
                bits[number] = int(np.float32(mean).view(np.uint32)) >> 16
                q[side] = np.where(of_side >= least, _from_bfloat16(bits[number]), 0)
        kept = q != 0
        np.negative(q, out=q, where=negative)
        sent -= q
        v[places] = sent
        if not kept.all():
            places, negative = places[kept], negative[kept]
        return (bits[0], bits[1] | int(_SIGN)), places, negative


def _from_bfloat16(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)
