"""An epoch that leaves samples out: which are kept, as a bitmap, and orders of those alone. Pure.

A bitmap of one bit a sample, with a count of the bits before every 512th, answers two questions in
constant time: how many samples before this one are kept, and which is the k-th that is. So a keyed
order of the kept samples' numbers, followed by the second answer, is a formula in both directions
as `dlio.plan.order.Order` is: plans need no message, and what is left out is nowhere in them.

Memory: n / 8 bytes for the bitmap, n / 64 for the counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.plan.layout import Layout
from dlio.plan.order import Order

_I64 = npt.NDArray[np.int64]
_WORDS: Final = 8
"""Words of 64 bits between two counts."""
_SPAN: Final = 64 * _WORDS
_CHUNK: Final = 1 << 14
STRETCH: Final = 1 << 18
"""Samples that are looked at together where all are; a multiple of 8."""


class Kept:
    """The samples of an epoch. Immutable.

    Cost 0.3 µs for each sample that is looked up.

    Args:
        bits: of sample i, bit i % 8 of byte i // 8; shape (ceil(n / 8),).
        samples: n, of the whole data set.

    Raises UsageError for a bitmap of another size, and for one without a sample.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], samples: int) -> None:
        if bits.dtype != np.uint8 or bits.shape != (-(-samples // 8),):
            raise UsageError(
                f"a bitmap of {bits.dtype} and shape {bits.shape}: {samples} samples want uint8 of "
                f"shape ({-(-samples // 8)},)"
            )
        padded = np.zeros(-(-samples // _SPAN) * _SPAN // 8, np.uint8)
        padded[: len(bits)] = bits
        if samples % 8:
            padded[len(bits) - 1] &= (1 << samples % 8) - 1
        self.bits = padded[: len(bits)]
        self.samples = samples
        """Of the whole data set."""
        self._words = padded.view("<u8").reshape(-1, _WORDS)
        counts = np.bitwise_count(self._words).sum(1, dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.count = int(self._before[-1])
        if not self.count:
            raise UsageError("keep= keeps no sample: an epoch wants one at least")

    @classmethod
    def of(cls, given: Any, samples: int) -> "Kept":
        """From a Kept, a mask of bool (samples,), or a bitmap as above. Raises UsageError."""
        if isinstance(given, cls):
            if given.samples != samples:
                raise UsageError(
                    f"keep= is of {given.samples} samples, the data set has {samples}: make it for "
                    "this data set"
                )
            return given
        array = np.asarray(given)
        if array.dtype == np.bool_ and array.shape == (samples,):
            return cls(np.packbits(array, bitorder="little"), samples)
        return cls(array, samples)

    @cached_property
    def digest(self) -> str:
        """32 hex digits that tell it from others."""
        return xxhash.xxh3_128_hexdigest(self.bits.tobytes())

    def holds(self, samples: _I64) -> npt.NDArray[np.bool_]:
        """Whether each of `samples` is kept; same shape."""
        bits: npt.NDArray[np.uint8] = self.bits[samples >> 3] >> (samples & 7).astype(np.uint8)
        held: npt.NDArray[np.bool_] = (bits & 1).astype(np.bool_)
        return held

    def number(self, samples: _I64) -> _I64:
        """How many kept samples are before each of `samples`; same shape."""
        return _in_chunks(self._number, samples)

    def sample(self, numbers: _I64) -> _I64:
        """The kept sample of each number, 0 to `count` - 1; same shape."""
        return _in_chunks(self._sample, numbers)

    def _number(self, samples: _I64) -> _I64:
        span, inside = samples // _SPAN, samples % _SPAN
        words = self._words[np.minimum(span, len(self._words) - 1)]
        first = np.arange(_WORDS) * 64
        # Of each word the bits below the sample's: all, none, or some.
        bits = np.clip(inside[:, None] - first, 0, 64).astype(np.uint64)
        below = np.where(bits < 64, (np.uint64(1) << (bits & np.uint64(63))) - np.uint64(1), _ALL)
        inner: _I64 = np.bitwise_count(words & below).sum(1, dtype=np.int64)
        return self._before[span] + inner

    def _sample(self, numbers: _I64) -> _I64:
        span = np.searchsorted(self._before, numbers, side="right") - 1
        left = numbers - self._before[span]
        words = self._words[span]
        rows = np.arange(len(numbers))
        word, left = _turn(np.bitwise_count(words), left)
        octets = words[rows, word].astype("<u8").view(np.uint8).reshape(-1, 8)
        octet, left = _turn(np.bitwise_count(octets), left)
        found: _I64 = span * _SPAN + word * 64 + octet * 8 + _NTH[octets[rows, octet], left]
        return found


@dataclass(frozen=True)
class KeptOrder(Order):
    """The order of an epoch's kept samples: `n` is their number, positions are 0 to n - 1."""

    kept: Kept | None = None
    storage: Order | None = None
    """Given, `kept` is of storage positions and the order is that of storage."""

    def _map(self, values: _I64, inverse: bool) -> _I64:
        assert self.kept is not None
        given = np.asarray(values, np.int64)
        if not inverse:
            self._check(given)
            found = self.kept.sample(super()._map(given, False))
            return found if self.storage is None else self.storage.samples(found)
        inner = given if self.storage is None else self.storage.positions(given)
        if inner.size and (int(inner.min()) < 0 or int(inner.max()) >= self.kept.samples):
            raise IndexError(f"not within {self.kept.samples} samples")
        if not self.kept.holds(inner).all():
            out = given[~self.kept.holds(inner)].flat[0]
            raise IndexError(f"sample {out} is left out of this epoch")
        return super()._map(self.kept.number(inner), True)


def kept_layout(layout: Layout, kept: Kept) -> Layout:
    """A data set's blocks with the kept samples alone, for plans; a block may have none.

    Cost 0.07 µs a sample of the data set where storage is shuffled, and else next to nothing.
    """
    stored = kept
    if layout.order.shuffled:
        bits = np.zeros(len(kept.bits), np.uint8)
        for first in range(0, kept.samples, STRETCH):
            last = min(first + STRETCH, kept.samples)
            held = kept.holds(layout.order.samples(np.arange(first, last, dtype=np.int64)))
            bits[first // 8 : -(-last // 8)] = np.packbits(held, bitorder="little")
        stored = Kept(bits, kept.samples)
    order = KeptOrder(stored.count, 0, 0, False, stored, layout.order)
    return Layout(stored.number(layout.starts), order)


def _in_chunks(look: Callable[[_I64], _I64], values: _I64) -> _I64:
    flat = np.asarray(values, np.int64).reshape(-1)
    found = np.empty(flat.shape, np.int64)
    for start in range(0, len(flat), _CHUNK):
        found[start : start + _CHUNK] = look(flat[start : start + _CHUNK])
    return found.reshape(np.shape(values))


def _turn(counts: npt.NDArray[np.integer], left: _I64) -> tuple[_I64, _I64]:
    """(the first of each row's things that has more than `left` before its end, what is left in it)

    Args:
        counts: of each thing, shape (n, things); a row has more than `left`.
    """
    ends = np.cumsum(counts, axis=1, dtype=np.int64)
    turn = (ends <= left[:, None]).sum(1)
    rows = np.arange(len(left))
    return turn, left - ends[rows, turn] + counts[rows, turn]


_ALL: Final = np.uint64(2**64 - 1)
_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_NTH: Final = np.argsort(1 - _BITS.astype(np.int8), axis=1, kind="stable").astype(np.int64)
"""The place of each octet's k-th bit that is set; shape (256, 8)."""
