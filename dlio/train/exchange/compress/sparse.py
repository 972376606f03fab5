"""Entries beyond a level, sent as index and sign; the rest stays in the residual.

A tensor's level and what its entries are sent as come from a rule (`threshold`, `adaptive`). A
message has about a byte for 32 entries, and each tensor a part of it by the square root of its
size, for one entry in 4 to one in 64: small ones (the classifier, convolutions of 1x1) have entries
with by far the larger gradients, and take few bytes.

Of small tensors two fifths are sent, whatever the rule, as the mean of their sign: these are
written whole, each entry as one of three numbers, five entries in a byte, for at most half of a
message's bytes. They have by far the most of a gradient's energy, of which a threshold would leave
much to later.

Of others an entry that is sent takes a byte: a sign, and how many entries it goes over since the
one before it. Where these are more than 126, bytes that go over 127 each stand before it. A tensor
has room for about a sixth more bytes than entries that are to be sent; those that find none are
first in the next message, so that none can be kept waiting by those before it.

What is exact: an entry is sent as q with |q| <= 2|v|, and where |v| > 2|q|, q's last bit is no
finer than v's, because rules give few bits to q, and send only the largest where one entry is far
beyond the others. What is not sent is in the residual as it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.errors import CommError
from dlio.plan.order import keyed_uniforms
from dlio.train.exchange.compress.int8 import SmallTensors
from dlio.train.exchange.compress.layout import (
    CHUNK,
    Piece,
    Scratch,
    all_finite,
    refuse_not_finite,
)

__all__ = [
    "ROOM",
    "SHARE",
    "WHOLE_RATIO",
    "Rule",
    "Sparse",
    "mean_beyond",
    "order_statistic",
    "plan",
    "ratios_of",
]

ROOM: Final = 27
"""Minimum number of entries per byte of a message."""
SHARE: Final = 32
"""Number of entries per entry to send, over the whole region."""
_DENSEST: Final = 4
"""Minimum number of entries per entry to send, in a tensor that is not written whole."""
_SPARSEST: Final = 64
"""Maximum number of entries per entry to send, in any tensor."""
_WHOLE: Final = 12
"""A tensor with at most this many entries per entry to send is written whole."""
WHOLE_RATIO: Final = 2.5
"""Number of entries per entry to send, in a tensor that is written whole."""
_TRITS: Final = 5
"""Entries in a byte of a tensor that is written whole."""
_POWERS: Final = np.array([1, 3, 9, 27, 81], np.uint8)
_READ: Final = (np.arange(3**_TRITS, dtype=np.uint8)[:, None] // _POWERS) % 3
_SAMPLE: Final = 1024
_LONGEST: Final = 127
"""Entries that one byte goes on by, at most."""
_ESCAPE: Final = 127
_SIGN: Final = 128
_NONE: Final = np.iinfo(np.int64).min
_REACH: Final = 2.0**15
_HEAD: Final = 3
"""Words of 32 bits that a tensor has in the head."""


class Rule(Protocol):
    """Selects the entries of a tensor to send, and the value that they are sent as."""

    steps: dict[int, int]
    """State per tensor, by number."""

    def level(self, tensor: int, sample: npt.NDArray[np.float32], ratio: float) -> float:
        """The |v| from which on entries are sent, so that one in `ratio` is, from magnitudes of at
        most 1,024 of them, shape (n,), which may be overwritten. 0 when they do not tell."""

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        """For the entries of one sign: (least, q).

        Those that are smaller than `least` are not sent after all, the others as q, which is cut
        to a bfloat16 number. So that v - q is exact: q <= 2 least and, for the largest v,
        v <= 2^(24 - n) q where q has n significant bits.

        Args:
            sizes: magnitudes, all at least `level`, shape (n > 0,).
        """


def order_statistic(sample: npt.NDArray[np.float32], ratio: float) -> float:
    """The magnitude that one in `ratio` reaches, or, of mostly zeros, the smallest of the others;
    0 where all are zero. The sample is overwritten."""
    place = len(sample) - max(1, int(len(sample) / ratio))
    sample.partition(place)
    level = float(sample[place])
    if level == 0:
        level = float(sample[sample > 0].min(initial=np.inf))
        return 0.0 if level == np.inf else level
    return level


def mean_beyond(sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
    """(least, q) as `Rule.cut` wants them, with q the mean.

    So that v - q is exact for the smallest entries sent, too: where their mean is more than twice
    the level, only those beyond half the mean are sent, as at most twice their smallest. That
    takes a distribution with a tail as heavy as that of 1/v^3, or single entries far beyond all.
    """
    mean = float(sizes.mean(dtype=np.float64))
    least = max(level, float(sizes.max()) / _REACH)
    if mean > 2 * least:
        least = mean / 2
    if least > level:
        sizes = sizes[sizes >= least]
        mean = float(sizes.mean(dtype=np.float64))
    return least, min(mean, 2 * float(sizes.min()))


@dataclass(slots=True)
class _Tensor:
    piece: Piece
    ratio: float
    """Number of entries per entry to send."""
    room: int
    """Maximum bytes of its entries."""
    whole: bool
    begin: int = 0
    """Entry at which the search for entries to send begins."""


class Sparse:
    """Message: for each large tensor three words, uint32: two bfloat16 numbers, for positive and
    (above) for negative entries; the entry that it begins at; its bytes. Then small tensors, whose
    length is fixed, and the bytes, tensor by tensor."""

    def __init__(
        self, pieces: Sequence[Piece], scratch: Scratch, rule: Rule, seed: int = 0
    ) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self._rule = rule
        self._seed, self._messages = seed, 0
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        large = [piece for piece in pieces if not piece.small]
        whole, ratios = plan(np.array([piece.size for piece in large], np.int64))
        self._tensors = [
            _Tensor(piece, WHOLE_RATIO, piece.size, whole=True)
            if is_whole
            else _Tensor(piece, ratio, max(1, int(piece.size / ratio * SHARE / ROOM)), whole=False)
            for piece, is_whole, ratio in zip(large, whole.tolist(), ratios.tolist(), strict=True)
        ]
        self._small_at = 4 * _HEAD * len(self._tensors)
        self._steps_at = self._small_at + self._small.max_bytes
        self.max_bytes = self._steps_at + sum(
            -(-tensor.piece.size // _TRITS) if tensor.whole else tensor.room
            for tensor in self._tensors
        )

    def encode(
        self,
        values: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32],
        message: npt.NDArray[np.uint8],
    ) -> int:
        head = message[: self._small_at].view(np.uint32).reshape(-1, _HEAD)
        at = self._steps_at
        self._messages += 1
        with np.errstate(all="ignore"):
            self._small.encode(values, residual, message[self._small_at :])
            for number, tensor in enumerate(self._tensors):
                piece = tensor.piece
                v = residual[piece.start : piece.stop]
                level = self._level(number, v, values[piece.start : piece.stop])
                begin = tensor.begin
                ahead = self._candidates(tensor, v, values[piece.start : piece.stop], level)
                cut = mean_beyond if tensor.whole else self._rule.cut
                bits, kept, negative = _send(v, _around(ahead, begin, len(v)), level, cut)
                ahead = ahead[kept]
                if tensor.whole:
                    steps = _trits(ahead, negative, piece.size)
                else:
                    steps = _steps(ahead, negative)
                message[at : at + len(steps)] = steps
                at += len(steps)
                head[number] = bits, begin, len(steps)
        return at

    def add(self, message: npt.NDArray[np.uint8], into: npt.NDArray[np.float32]) -> None:
        if len(message) < self._steps_at:
            raise CommError(f"a message of {len(message)} bytes is damaged: it has no whole head")
        head = message[: self._small_at].view(np.uint32).reshape(-1, _HEAD)
        at = self._steps_at
        total = int(head[:, 2].sum(dtype=np.int64))
        if at + total > len(message):
            raise CommError(f"a message says that it holds {total} steps: it is damaged")
        self._small.add(message[self._small_at :], into)
        for tensor, (bits, begin, length) in zip(self._tensors, head.tolist(), strict=True):
            size = tensor.piece.size
            if tensor.whole:
                ahead, negative = _entries_of_trits(message[at : at + length], size)
            else:
                ahead, negative = _entries(message[at : at + length])
            at += length
            if begin >= size or (len(ahead) and int(ahead[-1]) >= size):
                raise CommError(
                    f"a message has an entry beyond the end of {tensor.piece.name}: it is damaged"
                )
            q = np.where(negative, *(_from_bfloat16(each) for each in (bits >> 16, bits & 0xFFFF)))
            into[tensor.piece.start : tensor.piece.stop][_around(ahead, begin, size)] += q

    def state(self) -> npt.NDArray[np.int64]:
        steps = [self._rule.steps.get(number, _NONE) for number in range(len(self._tensors))]
        begins = [tensor.begin for tensor in self._tensors]
        return np.array([self._messages, *begins, *steps], np.int64)

    def load_state(self, state: npt.NDArray[np.int64]) -> None:
        self._messages, *each = state.tolist()
        count = len(self._tensors)
        for tensor, begin in zip(self._tensors, each[:count], strict=True):
            tensor.begin = begin
        self._rule.steps = {k: step for k, step in enumerate(each[count:]) if step != _NONE}

    def _level(
        self, number: int, v: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
    ) -> float:
        """Return the smallest magnitude to send; infinity if all entries are zero."""
        if len(v) > _SAMPLE:
            one = np.array([number], np.int64)
            drawn = keyed_uniforms(self._seed, self._messages, one, _SAMPLE)[0]
            at = (drawn * len(v)).astype(np.int64)
            sample = np.abs(v[at] + values[at])
        else:
            sample = np.abs(v + values)
        tensor = self._tensors[number]
        if tensor.whole:
            level = order_statistic(sample, tensor.ratio)
        else:
            level = self._rule.level(number, sample, tensor.ratio)
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
        """Add values to v and select entries to send.

        Returns their distances ahead of tensor.begin, ascending. Moves tensor.begin to the first
        entry that does not fit.
        """
        limit = np.float32(level)
        begin = tensor.begin
        chunks: list[npt.NDArray[np.int64]] = []
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
            if count > tensor.room:
                continue
            places = np.flatnonzero(np.greater_equal(w, limit, out=mask))
            places += start
            if start <= begin < start + CHUNK:
                first = int(np.searchsorted(places, begin))
                before, places = places[:first], places[first:]
            chunks.append(places)
            count += len(places)
        places = np.concatenate([*chunks, before])
        ahead = np.where(places < begin, places + (len(v) - begin), places - begin)
        fit = int(np.searchsorted(np.cumsum(1 + _escapes(ahead)), tensor.room, side="right"))
        tensor.begin = int(places[fit]) if fit < len(places) else 0
        return ahead[:fit]


def _send(
    v: npt.NDArray[np.float32],
    places: npt.NDArray[np.int64],
    level: float,
    cut: Callable[[npt.NDArray[np.float32], float], tuple[float, float]],
) -> tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Take out of v what is sent of some entries; the bits of both signs' numbers, which entries
    are sent, and which of those are negative."""
    sent = v[places]
    negative = np.signbit(sent)
    sizes = np.abs(sent)
    q = np.zeros_like(sent)
    bits = [0, 0]
    for number, side in enumerate((~negative, negative)):
        of_side = sizes[side]
        if len(of_side):
            least, mean = cut(of_side, level)
            bits[number] = int(np.float32(mean).view(np.uint32)) >> 16
            q[side] = np.where(of_side >= least, _from_bfloat16(bits[number]), 0)
    kept = q != 0
    np.negative(q, out=q, where=negative)
    sent -= q
    v[places] = sent
    return bits[0] | (bits[1] | 1 << 15) << 16, kept, negative[kept]


def plan(
    sizes: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """For tensors of such sizes: which are written whole, for at most half of the bytes; and of
    entries to those that are to be sent of the others, so that it is a byte for `SHARE` of all."""
    order = np.argsort(sizes, kind="stable")
    bytes_whole = -(-sizes // _TRITS)
    whole = ratios_of(sizes, sizes.sum() / SHARE) <= _WHOLE
    fit = np.cumsum((bytes_whole * whole)[order]) <= sizes.sum() / SHARE / 2
    whole[order] &= fit
    ratios = np.ones(len(sizes))
    left = sizes.sum() / SHARE - (bytes_whole * whole).sum()
    ratios[~whole] = ratios_of(sizes[~whole], left)
    return whole, ratios


def ratios_of(sizes: npt.NDArray[np.int64], wanted: float) -> npt.NDArray[np.float64]:
    """Return the number of entries per entry to send, for tensors of these sizes.

    Entries to send are in proportion to the square roots of sizes, within bounds, `wanted` in all.
    """
    roots = np.sqrt(sizes)
    least, most = sizes / _SPARSEST, sizes / _DENSEST
    low, high = 0.0, float(roots.max(initial=0.0))
    for _ in range(50):
        factor = (low + high) / 2
        if np.clip(factor * roots, least, most).sum() < wanted:
            low = factor
        else:
            high = factor
    ratios: npt.NDArray[np.float64] = sizes / np.clip(high * roots, least, most)
    return ratios


def _around(ahead: npt.NDArray[np.int64], begin: int, size: int) -> npt.NDArray[np.int64]:
    """Places in a tensor of what lies so far ahead of `begin`: behind its end comes its start."""
    places = ahead + begin
    places[places >= size] -= size
    return places


def _escapes(ahead: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many bytes stand before each entry's own, to come near enough to it."""
    escapes: npt.NDArray[np.int64] = (np.diff(ahead, prepend=-1) - 1) // _LONGEST
    return escapes


def _steps(ahead: npt.NDArray[np.int64], negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """A byte for each entry: how many entries it goes over, and the sign above; and before it,
    where these are too many, bytes that go on by 127 without an entry."""
    escapes = _escapes(ahead)
    steps = np.full(len(ahead) + int(escapes.sum()), _ESCAPE, np.uint8)
    over = (np.diff(ahead, prepend=-1) - 1) - _LONGEST * escapes
    steps[np.cumsum(escapes + 1) - 1] = over + _SIGN * negative
    return steps


def _entries(
    steps: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Decode `_steps`: (distances, signs)."""
    over = steps & np.uint8(_SIGN - 1)
    ahead = np.cumsum(np.minimum(over + np.uint8(1), np.uint8(_LONGEST)), dtype=np.int64) - 1
    is_entry = over != _ESCAPE
    return ahead[is_entry], steps[is_entry] >= _SIGN


def _trits(
    places: npt.NDArray[np.int64], negative: npt.NDArray[np.bool_], size: int
) -> npt.NDArray[np.uint8]:
    """A third of a byte and less for each of a tensor's entries: 0, or 1 for positive ones that are
    sent and 2 for negative ones."""
    digits = np.zeros(-(-size // _TRITS) * _TRITS, np.uint8)
    digits[places] = 1 + negative
    return digits.reshape(-1, _TRITS) @ _POWERS


def _entries_of_trits(
    trits: npt.NDArray[np.uint8], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Decode `_trits`: (places, signs)."""
    if len(trits) != -(-size // _TRITS) or (size and int(trits.max()) >= len(_READ)):
        raise CommError(f"a message has {len(trits)} bytes for {size} entries: it is damaged")
    digits = _READ[trits].reshape(-1)
    places = np.flatnonzero(digits)
    return places, digits[places] == 2


def _from_bfloat16(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)
