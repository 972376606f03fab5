"""A bitmap of the samples that an epoch uses, and the orders of those samples alone. Pure.

The bitmap has one bit a sample and a count of the set bits before every 512th bit. It answers two
questions in constant time: `number`, how many samples of the mask come before a sample (rank), and
`sample`, which sample is the k-th of the mask (select). A keyed order of the numbers, mapped
through `sample`, is therefore a formula in both directions, like `dlio.plan.order.Order`: plans
need no message, and samples outside of the mask do not occur in them.

Memory: n / 8 bytes for the bitmap and n / 64 for the counts.

Source: Jacobson, "Space-efficient static trees and graphs", 1989 (rank and select).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.util.units import counted

_I64 = npt.NDArray[np.int64]
_WORDS: Final = 8
"""Words of 64 bits between two counts."""
_SPAN: Final = 64 * _WORDS
_CHUNK: Final = 1 << 14
STRETCH: Final = 1 << 18
"""Samples per step when all samples are visited; a multiple of 8."""


class SampleMask:
    """The set of samples that an epoch uses. Immutable.

    Lookups cost 0.3 µs a sample.

    Sample i of so many in the data set is bit i % 8 of byte i // 8 (little endian); shape
    (ceil(samples / 8),).

    Raises UsageError for a bitmap of another size or without any sample.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], samples: int) -> None:
        if bits.dtype != np.uint8 or bits.shape != (-(-samples // 8),):
            raise UsageError(
                f"a bitmap of {bits.dtype} and shape {bits.shape}: for "
                f"{counted(samples, 'sample')} give uint8 of shape ({-(-samples // 8)},)"
            )
        padded = np.zeros(-(-samples // _SPAN) * _SPAN // 8, np.uint8)
        padded[: len(bits)] = bits
        if samples % 8:
            padded[len(bits) - 1] &= (1 << samples % 8) - 1
        self.bits = padded[: len(bits)]
        self.samples = samples
        """Number of samples in the whole data set."""
        self._words = padded.view("<u8").reshape(-1, _WORDS)
        counts = np.bitwise_count(self._words).sum(1, dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.count = int(self._before[-1])
        """Number of samples in the mask."""
        if not self.count:
            raise UsageError("keep= keeps no sample: an epoch wants one at least")

    @classmethod
    def of(cls, given: "SampleMask | npt.ArrayLike", samples: int) -> "SampleMask":
        """Make a mask from a SampleMask, an array of bool (samples,), or a bitmap as above.

        Raises UsageError when it does not fit a data set of `samples` samples.
        """
        if isinstance(given, cls):
            if given.samples != samples:
                raise UsageError(
                    f"keep= is for {counted(given.samples, 'sample')}, the data set has {samples}: "
                    "make it for this data set"
                )
            return given
        array = np.asarray(given)
        if array.dtype == np.bool_ and array.shape == (samples,):
            return cls(np.packbits(array, bitorder="little"), samples)
        return cls(array, samples)

    @cached_property
    def digest(self) -> str:
        """Hash of the bitmap in 32 hex digits; equal for masks of the same samples."""
        return xxhash.xxh3_128_hexdigest(self.bits.tobytes())

    def holds(self, samples: _I64) -> npt.NDArray[np.bool_]:
        """True for each of `samples` that is in the mask; same shape."""
        bits: npt.NDArray[np.uint8] = self.bits[samples >> 3] >> (samples & 7).astype(np.uint8)
        held: npt.NDArray[np.bool_] = (bits & 1).astype(np.bool_)
        return held

    def number(self, samples: _I64) -> _I64:
        """Count the mask's samples before each of `samples`; same shape."""
        return _in_chunks(self._number, samples)

    def sample(self, numbers: _I64) -> _I64:
        """Return the mask's sample of each number, 0 to `count` - 1; same shape."""
        return _in_chunks(self._sample, numbers)

    def _number(self, samples: _I64) -> _I64:
        span, inside = samples // _SPAN, samples % _SPAN
        words = self._words[np.minimum(span, len(self._words) - 1)]
        first = np.arange(_WORDS) * 64
        # Bits of each word below the sample's own bit: all, none or some of them.
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
        samples: _I64 = span * _SPAN + word * 64 + octet * 8 + _NTH[octets[rows, octet], left]
        return samples


@dataclass(frozen=True)
class MaskedOrder(Order):
    """The order of a mask's samples: `n` is their number, positions are 0 to n - 1."""

    mask: SampleMask | None = None
    storage: Order | None = None
    """Storage order of the data set. If given, `mask` holds storage positions and positions of
    this order follow storage."""

    def _map(self, given: _I64, inverse: bool) -> _I64:
        assert self.mask is not None
        if not inverse:
            self._check(given)
            inner = self.mask.sample(super()._map(given, False))
            return inner if self.storage is None else self.storage.samples(inner)
        inner = given if self.storage is None else self.storage.positions(given)
        if inner.size and (int(inner.min()) < 0 or int(inner.max()) >= self.mask.samples):
            raise IndexError(f"not within {counted(self.mask.samples, 'sample')}")
        if not self.mask.holds(inner).all():
            out = given[~self.mask.holds(inner)].flat[0]
            raise IndexError(f"sample {out} is left out of this epoch")
        return super()._map(self.mask.number(inner), True)


def masked_layout(layout: Layout, mask: SampleMask) -> Layout:
    """Return a data set's blocks with the mask's samples alone, for plans; a block may be empty.

    Cost 0.07 µs a sample of the data set where storage is shuffled, and otherwise almost nothing.
    """
    stored = mask
    if layout.order.shuffled:
        bits = np.zeros(len(mask.bits), np.uint8)
        for first in range(0, mask.samples, STRETCH):
            last = min(first + STRETCH, mask.samples)
            held = mask.holds(layout.order.samples(np.arange(first, last, dtype=np.int64)))
            bits[first // 8 : -(-last // 8)] = np.packbits(held, bitorder="little")
        stored = SampleMask(bits, mask.samples)
    order = MaskedOrder(stored.count, 0, 0, False, stored, layout.order)
    return Layout(stored.number(layout.starts), order)


def _in_chunks(look_up: Callable[[_I64], _I64], values: _I64) -> _I64:
    flat = np.asarray(values, np.int64).reshape(-1)
    results = np.empty(flat.shape, np.int64)
    for start in range(0, len(flat), _CHUNK):
        results[start : start + _CHUNK] = look_up(flat[start : start + _CHUNK])
    return results.reshape(np.shape(values))


def _turn(counts: npt.NDArray[np.integer], left: _I64) -> tuple[_I64, _I64]:
    """Return the first entry of each row of `counts`, shape (n, entries), with which the running
    sum exceeds `left`, and `left` minus the sum of the entries before it. Each row's sum exceeds
    it.
    """
    ends = np.cumsum(counts, axis=1, dtype=np.int64)
    turn = (ends <= left[:, None]).sum(1)
    rows = np.arange(len(left))
    return turn, left - ends[rows, turn] + counts[rows, turn]


_ALL: Final = np.uint64(2**64 - 1)
_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_NTH: Final = np.argsort(1 - _BITS.astype(np.int8), axis=1, kind="stable").astype(np.int64)
"""Position of the k-th set bit of each octet; shape (256, 8)."""
