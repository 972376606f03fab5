"""Sparse compression: entries that reach a level are sent as index and sign.

The other entries stay in the residual. A rule (`threshold`, `adaptive`) chooses each tensor's level
and the value that its sent entries stand for.

Budget: a message has about one byte per 32 entries. Tensors share it in proportion to the square
roots of their sizes, within one sent entry in 4 and one in 64. Small tensors (the classifier, 1x1
convolutions) therefore send a larger fraction: their gradients are much larger, and they cost few
bytes.

Dense tensors: the smallest tensors, in up to half of a message's bytes, send two fifths of their
entries under every rule, as the mean of the entries of the same sign. Each entry is a ternary digit
(zero, positive, negative), five of them in a byte. These tensors have most of the gradient's
energy, and a threshold would delay much of it. Under `ternary` all tensors are dense: 1.6 bits per
entry.

Other tensors: a sent entry takes one byte, its sign and the number of entries skipped since the
previous one. If that number exceeds 126, escape bytes that skip 127 entries each precede it. A
tensor has room for a sixth more bytes than it should send entries. Entries that do not fit come
first in the next message, so that none waits for ever.

Exactness: an entry v is sent as q with |q| <= 2|v|, and if |v| > 2|q|, the last bit of q is at
least as coarse as that of v. Rules ensure this by giving q few bits, and by sending only the
largest entries if one is far beyond the others. The residual of an unsent entry is the entry.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import CommError
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
from dlio.plan.order import keyed_uniforms
from dlio.util.units import counted

ROOM: Final = 27
"""Minimum number of entries per byte of a message."""
SHARE: Final = 32
"""Number of entries per entry to send, over the whole region."""
_DENSEST: Final = 4
"""Minimum number of entries per entry to send, in a tensor that is not dense."""
_SPARSEST: Final = 64
"""Maximum number of entries per entry to send, in any tensor."""
_WHOLE: Final = 12
"""A tensor with at most this many entries per entry to send may be sent dense."""
WHOLE_RATIO: Final = 2.5
"""Number of entries per entry to send, in a dense tensor."""
TRITS: Final = 5
"""Entries per byte of a dense tensor."""
POWERS: Final = np.array([1, 3, 9, 27, 81], np.uint8)
_READ: Final = (np.arange(3**TRITS, dtype=np.uint8)[:, None] // POWERS) % 3
SAMPLE: Final = 1024
LONGEST: Final = 127
"""Maximum number of entries that one byte advances by."""
ESCAPE: Final = 127
SIGN: Final = 128
NONE: Final = np.iinfo(np.int64).min
REACH: Final = 2.0**15
"""Maximum ratio of the largest to the smallest entry sent: half of 2^(24 - n) for the n = 8
significant bits of a bfloat16."""
HEAD: Final = 3
"""Words of 32 bits per tensor in a message's head."""


def order_statistic(sample: F32, ratio: float) -> float:
    """Return the magnitude that one entry in `ratio` reaches. Overwrites the sample.

    If that is zero, return the smallest magnitude above zero; 0 if there is none.
    """
    place = len(sample) - max(1, int(len(sample) / ratio))
    sample.partition(place)
    level = float(sample[place])
    if level == 0:
        level = float(sample[sample > 0].min(initial=np.inf))
        return 0.0 if level == np.inf else level
    return level


def mean_beyond(sizes: F32, level: float) -> tuple[float, float]:
    """Return (least, q) for `LevelRule.cut`, with q the mean of the sent entries.

    For v - q to be exact for the smallest entries, too: if the mean exceeds twice the level, only
    entries beyond half the mean are sent, as at most twice the smallest of them. This occurs only
    if the distribution's tail is as heavy as 1/v^3, or if a few entries are far beyond the others.
    """
    mean = float(sizes.mean(dtype=np.float64))
    least = max(level, float(sizes.max()) / REACH)
    if mean > 2 * least:
        least = mean / 2
    if least > level:
        sizes = sizes[sizes >= least]
        mean = float(sizes.mean(dtype=np.float64))
    return least, min(mean, 2 * float(sizes.min()))


@dataclass(slots=True)
class TensorPlan:
    """A tensor, and its share of a message."""

    piece: Piece
    ratio: float
    """Number of entries per entry to send."""
    room: int
    """Maximum number of bytes for its entries."""
    whole: bool
    """True if the tensor is dense: all of its entries are sent as ternary digits."""
    begin: int = 0
    """Entry at which the search for entries to send begins."""


class LevelRule:
    """Sends the largest entries, one in 32, as the mean of those with the same sign (Dryden et al.,
    "Communication quantization for data-parallel training of deep neural networks", MLHPC 2016).

    The level is an order statistic of a tensor's entries, estimated from a new random sample at
    each step. Other rules override both methods.
    """

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """State per tensor, by number."""

    def level(self, tensor: int, sample: F32, ratio: float) -> float:
        """Return the magnitude from which entries are sent, so that about one in `ratio` is.

        The sample, shape (n,), are magnitudes of at most 1,024 entries, and may be overwritten.
        Returns 0 if it is all zeros and the rule has no other level.
        """
        return order_statistic(sample, ratio)

    def cut(self, sizes: F32, level: float) -> tuple[float, float]:
        """Return (least, q) for the entries of one sign, whose magnitudes are `sizes`, shape (n,):
        not empty, all at least `level`.

        Entries smaller than `least` are not sent. The others are sent as q, which the caller
        truncates to bfloat16. For v - q to be exact, q <= 2 least, and the largest v is at most
        2^(24 - n) q, where n is the number of significant bits of q.
        """
        return mean_beyond(sizes, level)


def tensors_of(pieces: Pieces, dense: bool) -> list[TensorPlan]:
    """Return the pieces that are not small, or all if `dense`, with their shares of a message."""
    large = [piece for piece in pieces if not piece.small]
    sizes = np.array([piece.size for piece in large], np.int64)
    ratios = np.full(len(sizes), WHOLE_RATIO)
    whole = np.full(len(sizes), dense)
    if not dense:
        whole, ratios = plan(sizes)
    return [
        TensorPlan(piece, WHOLE_RATIO, piece.size, whole=True)
        if is_whole
        else TensorPlan(piece, ratio, max(1, int(piece.size / ratio * SHARE / ROOM)), whole=False)
        for piece, is_whole, ratio in zip(large, whole.tolist(), ratios.tolist(), strict=True)
    ]


class SparseCompressor(Compressor):
    """A compressor that sends the entries selected by a rule.

    A message has three parts: the head, which holds three uint32 per large tensor; the small
    tensors as int8, of fixed length; and the bytes of the large tensors' entries, tensor by tensor.
    The words of the head are: two bfloat16 numbers, for positive (lower half) and negative entries;
    the index of the entry from which distances count; the length of the tensor's bytes.
    """

    def __init__(
        self,
        pieces: Pieces,
        scratch: ChunkScratch,
        rule: LevelRule,
        seed: int = 0,
        dense: bool = False,
    ) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self._rule = rule
        self._seed, self._messages = seed, 0
        self.entries = pieces[-1].stop if pieces else 0
        self._small = SmallTensors(pieces, scratch)
        self._tensors = tensors_of(pieces, dense)
        self._small_at = 4 * HEAD * len(self._tensors)
        self._steps_at = self._small_at + self._small.max_bytes
        self.max_bytes = self._steps_at + sum(
            -(-tensor.piece.size // TRITS) if tensor.whole else tensor.room
            for tensor in self._tensors
        )

    def encode(self, values: F32, residual: F32, message: Bytes) -> int:
        head = message[: self._small_at].view(np.uint32).reshape(-1, HEAD)
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

    def add(self, message: Bytes, into: F32) -> None:
        if len(message) < self._steps_at:
            raise CommError(f"a message of {len(message)} bytes is damaged: its head is incomplete")
        head = message[: self._small_at].view(np.uint32).reshape(-1, HEAD)
        at = self._steps_at
        total = int(head[:, 2].sum(dtype=np.int64))
        if at + total > len(message):
            raise CommError(f"a message is damaged: it announces {total} bytes of entries")
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
                    f"a message is damaged: it has an entry beyond the end of {tensor.piece.name}"
                )
            q = np.where(negative, *(_from_bfloat16(each) for each in (bits >> 16, bits & 0xFFFF)))
            into[tensor.piece.start : tensor.piece.stop][_around(ahead, begin, size)] += q

    def state(self) -> npt.NDArray[np.int64]:
        steps = [self._rule.steps.get(number, NONE) for number in range(len(self._tensors))]
        begins = [tensor.begin for tensor in self._tensors]
        return np.array([self._messages, *begins, *steps], np.int64)

    def load_state(self, state: npt.NDArray[np.int64]) -> None:
        self._messages, *each = state.tolist()
        count = len(self._tensors)
        for tensor, begin in zip(self._tensors, each[:count], strict=True):
            tensor.begin = begin
        self._rule.steps = {k: step for k, step in enumerate(each[count:]) if step != NONE}

    def _level(self, number: int, v: F32, values: F32) -> float:
        """Return the smallest magnitude to send; infinity if all entries are zero."""
        if len(v) > SAMPLE:
            one = np.array([number], np.int64)
            drawn = keyed_uniforms(self._seed, self._messages, one, SAMPLE)[0]
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
            # The power of two below the largest: `threshold` derives the sent value from the level.
            level = math.ldexp(0.5, math.frexp(largest)[1]) if largest else math.inf
        return level

    def _candidates(
        self,
        tensor: TensorPlan,
        v: F32,
        values: F32,
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
    v: F32,
    places: npt.NDArray[np.int64],
    level: float,
    cut: Callable[[F32, float], tuple[float, float]],
) -> tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Subtract from v the values sent for the entries at `places`.

    Returns:
        Both signs' values as bfloat16 bits, the lower half for positive entries; a mask over
        `places` of the entries that are sent; a mask over those of negative ones.
    """
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
    """Divide a message among tensors of these sizes.

    Returns:
        A mask of the dense tensors, which take at most half of the bytes, and the number of entries
        per entry to send of the others, such that the message has a byte per `SHARE` entries.
    """
    order = np.argsort(sizes, kind="stable")
    bytes_whole = -(-sizes // TRITS)
    whole = ratios_of(sizes, sizes.sum() / SHARE) <= _WHOLE
    # The smallest first, and at most half of the bytes: the others would otherwise send nothing.
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
    # The same share of each tensor starves the classifier and 1x1 convolutions, whose gradients
    # are far larger. Loss after an epoch for the same bytes: alike 3.316, third roots 3.270,
    # square roots 3.266, these with the smallest tensors dense 3.256 (exact 3.250).
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
    """Convert distances from `begin` to indices into a tensor, wrapping around at its end."""
    places = ahead + begin
    places[places >= size] -= size
    return places


def _escapes(ahead: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of escape bytes before each entry's own byte."""
    escapes: npt.NDArray[np.int64] = (np.diff(ahead, prepend=-1) - 1) // LONGEST
    return escapes


def _steps(ahead: npt.NDArray[np.int64], negative: npt.NDArray[np.bool_]) -> Bytes:
    """Encode distances and signs: escape bytes, then a byte with the number of skipped entries and
    the sign in its highest bit, for each entry."""
    escapes = _escapes(ahead)
    steps = np.full(len(ahead) + int(escapes.sum()), ESCAPE, np.uint8)
    over = (np.diff(ahead, prepend=-1) - 1) - LONGEST * escapes
    steps[np.cumsum(escapes + 1) - 1] = over + SIGN * negative
    return steps


def _entries(
    steps: Bytes,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Decode `_steps`: (distances, signs)."""
    over = steps & np.uint8(SIGN - 1)
    ahead = np.cumsum(np.minimum(over + np.uint8(1), np.uint8(LONGEST)), dtype=np.int64) - 1
    is_entry = over != ESCAPE
    return ahead[is_entry], steps[is_entry] >= SIGN


def _trits(places: npt.NDArray[np.int64], negative: npt.NDArray[np.bool_], size: int) -> Bytes:
    """Encode all entries of a tensor as ternary digits, five per byte: 0 for entries that are not
    sent, 1 for positive and 2 for negative ones."""
    digits = np.zeros(-(-size // TRITS) * TRITS, np.uint8)
    digits[places] = 1 + negative
    return digits.reshape(-1, TRITS) @ POWERS


def _entries_of_trits(
    trits: Bytes, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Decode `_trits`: (places, signs)."""
    if len(trits) != -(-size // TRITS) or (size and int(trits.max()) >= len(_READ)):
        raise CommError(
            f"a message is damaged: it has {len(trits)} bytes for {counted(size, 'entry')}"
        )
    digits = _READ[trits].reshape(-1)
    places = np.flatnonzero(digits)
    return places, digits[places] == 2


def _from_bfloat16(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)


def adaptive(pieces: Pieces, scratch: ChunkScratch) -> SparseCompressor:
    """The largest entries."""
    return SparseCompressor(pieces, scratch, LevelRule())


def ternary(pieces: Pieces, scratch: ChunkScratch) -> SparseCompressor:
    """Signs of the largest two fifths."""
    return SparseCompressor(pieces, scratch, LevelRule(), dense=True)
