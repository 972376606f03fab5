"""Samples of each source of a mixture in each batch: whole numbers close to the weights.

Two promises hold for weights w and whole batches of B samples. Each batch has w·B samples of a
source, rounded down or up, and after any number of batches the total of a source differs from
w · consumed by less than 1. Rounding each batch alone would drift, and rounding the totals alone
would give batches that are off by up to 2; both together are the proportionate progress of Baruah
et al.: the fractions of w·B are the weights of periodic tasks, a batch is a slot of time, and the
sum of the fractions is the number of processors. In each slot the urgent tasks are served, by the
algorithm PD2, which has an answer wherever one exists; and with full use one always does.

Only integers are used, so that all machines agree. Two sources follow a formula. With weights whose
common denominator is small the numbers repeat after that many batches; otherwise they are computed
from the beginning on, about 2 µs for a batch and a source, and every 512th is remembered.

Source: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", Algorithmica 1996; Srinivasan
and Anderson, "Optimal rate-based scheduling on multiprocessors" (PD2), STOC 2002.
"""

import math
import threading
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError

_I64 = npt.NDArray[np.int64]
_STRIDE: Final = 512
_MOST_BATCHES: Final = 1 << 24
"""Most batches whose numbers are computed one after another."""
_TABLES: Final = 8
"""Stretches of 512 batches whose numbers are kept."""


class FairCounts:
    """Running totals of each source over batches of one size, by weights of sum 1. Thread-safe."""

    def __init__(self, weights: tuple[Fraction, ...], batch: int) -> None:
        exact = [weight * batch for weight in weights]
        self.weights, self.batch = weights, batch
        self._whole = np.array([math.floor(each) for each in exact], np.int64)
        rests = [each - math.floor(each) for each in exact]
        self._period = math.lcm(*(rest.denominator for rest in rests))
        """Batches after which the numbers repeat, and common denominator of the fractions."""
        self._rests = [int(rest * self._period) for rest in rests]
        self._extra = sum(self._rests) // self._period
        """Samples of a batch beyond the parts that are rounded down."""
        self._lock = threading.Lock()
        self._marks = [[0] * len(weights)]
        """Extra samples of each source before every 512th batch."""
        self._tables: dict[int, _I64] = {}

    def totals(self, batches: _I64) -> _I64:
        """Return the samples of each source in the first `batches`; shape (n, sources)."""
        different, where = np.unique(batches, return_inverse=True)
        extras = np.array([self._extras(each) for each in different.tolist()], np.int64)
        rows = different[:, None] * self._whole + extras.reshape(len(different), -1)
        result: _I64 = rows[where]
        return result

    def after(self, batches: int, more: int = 0) -> tuple[int, ...]:
        """Return the samples of each source in whole batches, and `more` of a smaller one."""
        had = tuple(self.totals(np.array([batches]))[0].tolist())
        if not more:
            return had
        last = largest_remainder(self.weights, had, batches * self.batch, more)
        return tuple(a + b for a, b in zip(had, last, strict=True))

    def _extras(self, batches: int) -> _I64:
        between = [source for source, rest in enumerate(self._rests) if rest]
        if len(between) <= 2:
            # One of two sources is rounded down in total, and the other has the rest.
            extras = np.zeros(len(self._rests), np.int64)
            if between:
                first, second = between
                extras[first] = self._rests[first] * batches // self._period
                extras[second] = batches * self._extra - extras[first]
            return extras
        rounds, rest = divmod(batches, self._period)
        with self._lock:
            row: _I64 = self._table(rest // _STRIDE)[rest % _STRIDE]
        if not rounds:
            return row
        whole: _I64 = row + rounds * np.array(self._rests, np.int64)
        return whole

    def _table(self, number: int) -> _I64:
        """Totals before each of 512 batches from a mark on; shape (512, sources)."""
        if number * _STRIDE > _MOST_BATCHES:
            raise UsageError(
                f"a mixture of {len(self._rests)} sources whose weights have no small common "
                f"denominator goes on for {_MOST_BATCHES:,} batches at most: round the weights, or "
                "have larger batches"
            )
        known = self._tables.get(number)
        if known is not None:
            return known
        for each in range(min(number, len(self._marks) - 1), number + 1):
            table = self._stretch(each)
        if len(self._tables) >= _TABLES:
            self._tables.pop(next(iter(self._tables)))
        self._tables[number] = table
        return table

    def _stretch(self, number: int) -> _I64:
        done = list(self._marks[number])
        table = np.empty((_STRIDE, len(done)), np.int64)
        for k in range(_STRIDE):
            table[k] = done
            for source in self._served(done, number * _STRIDE + k):
                done[source] += 1
        if len(self._marks) == number + 1:
            self._marks.append(done)
        return table

    def _served(self, done: list[int], batch: int) -> list[int]:
        """Return the sources that get one more sample in a batch."""
        if not self._extra:
            return []
        urgent = []
        for source, rest in enumerate(self._rests):
            # The source's next extra sample may not come before this batch.
            if rest and done[source] * self._period // rest <= batch:
                urgent.append((*self._urgency(rest, done[source]), source))
        urgent.sort()
        return [each[-1] for each in urgent[: self._extra]]

    def _urgency(self, rest: int, number: int) -> tuple[int, int, int]:
        """Return (deadline, overlap, group deadline) of an extra sample, the most urgent first."""
        period = self._period
        deadline = -(-(number + 1) * period // rest)
        overlaps = (number + 1) * period % rest != 0
        group = 0
        if 2 * rest >= period and rest < period:
            # ceil(ceil(ceil(i / w)(1 - w)) / (1 - w)) for the weight w = rest / period.
            light = period - rest
            free = -(-deadline * light // period)
            group = -(-free * period // light)
        return deadline, -int(overlaps), -group


@lru_cache(maxsize=64)
def fair_counts(weights: tuple[Fraction, ...], batch: int) -> FairCounts:
    """Return the counts of these weights and batches; the same object for the same ones."""
    return FairCounts(weights, batch)


def largest_remainder(
    weights: tuple[Fraction, ...], before: tuple[int, ...], consumed: int, count: int
) -> tuple[int, ...]:
    """Return how many of `count` more samples each source gives, for the smaller batch at an end,
    after `before` of each in the first `consumed`.
    """
    lacking = [
        weight * (consumed + count) - had for weight, had in zip(weights, before, strict=True)
    ]
    given = [max(0, math.floor(each) - 1) for each in lacking]
    for _ in range(count - sum(given)):
        most = max(range(len(given)), key=lambda k: (lacking[k] - given[k], -k))
        given[most] += 1
    while sum(given) > count:
        least = min(
            (k for k in range(len(given)) if given[k]), key=lambda k: (lacking[k] - given[k], k)
        )
        given[least] -= 1
    return tuple(given)
