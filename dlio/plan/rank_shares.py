"""Shares of a global batch for ranks of different speed. Pure.

The cost model of a rank's step is a fixed time plus a time per sample.

Shares are whole samples of a full step. A smaller step is dealt in proportion, by the same formula
as even shares: with edges e and global batch B, rank r gets the places from count·e[r] // B to
count·e[r + 1] // B of a step of `count` samples.
"""

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.plan.order import share
from dlio.util.units import counted

_I64 = npt.NDArray[np.int64]
_HALVINGS = 60
"""Bisections of the interval in which the slowest rank's time lies."""
_DAMPING: Final = 0.5
"""Weight of an epoch's measurement against the earlier estimate."""
_WORTH: Final = 0.01
"""Least gain, relative to the slowest rank's step, for which shares change."""
_MOST_FIXED: Final = 0.9
"""Largest fraction of a step that the cost model accepts as fixed."""
LEAST_S: Final = 1e-9
"""Shortest time of a step or a sample: none is 0."""


@dataclass(frozen=True)
class RankShares:
    """The samples that each rank gets of a step's global batch."""

    counts: tuple[int, ...]
    """Samples of a whole step, by rank; at least 1 each."""
    fewest: int = 0
    """If above 0, a smaller step gives a rank this many samples at least, or none: batch
    normalisation cannot train on a single one. The first ranks share a step of fewer than that for
    all ranks evenly."""

    def __post_init__(self) -> None:
        if not self.counts or any(int(count) != count or count < 1 for count in self.counts):
            raise UsageError(
                f"shares {list(self.counts)}: give each rank a whole number of samples from 1"
            )

    @cached_property
    def edges(self) -> _I64:
        """Samples of the ranks before each rank, then of all; shape (ranks + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @classmethod
    def even(cls, batch_size: int, ranks: int) -> "RankShares":
        return cls((batch_size,) * ranks)

    @classmethod
    def of(cls, global_batch: int, ranks: int) -> "RankShares":
        """Return shares of a global batch that differ by at most one sample."""
        return cls(tuple(len(share(global_batch, ranks, rank)) for rank in range(ranks)))

    @property
    def global_batch(self) -> int:
        return int(self.edges[-1])

    def part(self, count: int, rank: int) -> range:
        """Return the places of `rank` in a step of `count` samples.

        The parts of all ranks make up `range(count)`, and each is within one sample of the rank's
        proportion, unless the step has few samples (see `fewest`).
        """
        if self._is_small(count):
            used = self._used(count)
            return range(count * min(rank, used) // used, count * min(rank + 1, used) // used)
        first, last = int(self.edges[rank]), int(self.edges[rank + 1])
        return range(count * first // self.global_batch, count * last // self.global_batch)

    def quotas(self, counts: _I64) -> _I64:
        """Return the samples of each rank in steps of `counts` samples; shape (steps, ranks)."""
        edges = counts[:, None] * self.edges // self.global_batch
        small = np.flatnonzero(counts < self.fewest * len(self.counts))
        if len(small):
            few = counts[small, None]
            used = np.maximum(1, few // self.fewest)
            edges[small] = few * np.minimum(np.arange(len(self.counts) + 1), used) // used
        return np.diff(edges, axis=1)

    def deal(self, in_step: _I64, counts: _I64) -> npt.NDArray[np.int32]:
        """Return the rank whose `part` contains each place in its step, by the samples of that
        step; shapes (n,).
        """
        dealt = self._deal_in_proportion(in_step, counts)
        small = np.flatnonzero(counts < self.fewest * len(self.counts))
        if len(small):
            used = np.maximum(1, counts[small] // self.fewest)
            dealt[small] = ((in_step[small] + 1) * used - 1) // np.maximum(counts[small], 1)
        return dealt

    def _is_small(self, count: int) -> bool:
        """True if the first ranks alone share a step of so many samples."""
        return count < self.fewest * len(self.counts)

    def _used(self, count: int) -> int:
        """Number of ranks that share a small step."""
        return max(1, count // self.fewest)

    def _deal_in_proportion(self, in_step: _I64, counts: _I64) -> npt.NDArray[np.int32]:
        if self._is_even:  # At half the cost of a search.
            ranks = len(self.counts)
            return (((in_step + 1) * ranks - 1) // np.maximum(counts, 1)).astype(np.int32)
        # Largest rank r with count·edge[r] // B <= place, that is edge[r] <= the bound.
        bound = ((in_step + 1) * self.global_batch - 1) // np.maximum(counts, 1)
        return (np.searchsorted(self.edges, bound, side="right") - 1).astype(np.int32)

    @cached_property
    def _is_even(self) -> bool:
        return len(set(self.counts)) == 1


def checked_shares(counts: Sequence[int], global_batch: int, ranks: int) -> RankShares:
    """Return the shares. Raises UsageError when they do not sum to the global batch."""
    shares = RankShares(tuple(counts))
    if len(shares.counts) != ranks or shares.global_batch != global_batch:
        raise UsageError(
            f"shares {list(shares.counts)}: with global batches of {global_batch}, {ranks} ranks "
            f"want {ranks} numbers that sum to {global_batch}"
        )
    return shares


def fastest_shares(
    global_batch: int, fixed_s: Sequence[float], per_sample_s: Sequence[float]
) -> RankShares:
    """Return the shares that minimise the largest fixed_s[r] + per_sample_s[r] · counts[r].

    Ties go to the lower rank. Costs are by rank; those of a sample are above 0.

    Cost O(ranks): 1 ms for a thousand ranks.
    """
    fixed, per_sample = np.asarray(fixed_s, np.float64), np.asarray(per_sample_s, np.float64)
    ranks = len(fixed)
    if global_batch < ranks:
        raise UsageError(
            f"a global batch of {global_batch} samples for {counted(ranks, 'rank')}: give more"
        )
    # Find the longest time in which the ranks do not do more than the global batch; then give the
    # remaining samples one by one to the rank that would finish its next one first.
    low, high = 0.0, float((fixed + per_sample * global_batch).max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _within(middle, fixed, per_sample).sum() <= global_batch:
            low = middle
        else:
            high = middle
    counts = _within(low, fixed, per_sample)
    ends = [(fixed[r] + per_sample[r] * (counts[r] + 1), r) for r in range(ranks)]
    heapq.heapify(ends)
    for _ in range(global_batch - int(counts.sum())):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (fixed[rank] + per_sample[rank] * (counts[rank] + 1), rank))
    return RankShares(tuple(counts.tolist()))


def _within(
    seconds: float, fixed: npt.NDArray[np.float64], per_sample: npt.NDArray[np.float64]
) -> _I64:
    """Samples that each rank can process in a time, at least 1."""
    return np.maximum(1, np.floor((seconds - fixed) / per_sample)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost model of one rank's step."""

    fixed_s: float
    """Seconds per step."""
    per_sample_s: float
    """Seconds per sample."""

    def of(self, samples: int) -> float:
        """Seconds that a step of so many samples takes."""
        return self.fixed_s + self.per_sample_s * samples

    @classmethod
    def fitted(cls, small: tuple[int, float], large: tuple[int, float]) -> "Cost":
        """Fit the model to two measurements (samples, seconds) of different size.

        Noise cannot make a cost negative or the fixed part exceed 0.9 of the larger step.
        """
        (few, few_s), (many, many_s) = small, large
        fixed = many_s - many * (many_s - few_s) / (many - few)
        fixed = min(max(fixed, 0.0), _MOST_FIXED * many_s)
        return cls(fixed, max((many_s - fixed) / many, LEAST_S))

    def corrected(self, steps: Sequence[tuple[int, float]]) -> "Cost":
        """Scale both costs towards the median of measured steps (samples, seconds)."""
        ratios = [seconds / self.of(samples) for samples, seconds in steps if samples]
        if not ratios:
            return self
        level = max(1 + _DAMPING * (statistics.median(ratios) - 1), LEAST_S)
        return Cost(self.fixed_s * level, max(self.per_sample_s * level, LEAST_S))


def balanced_shares(shares: RankShares, costs: Sequence[Cost]) -> RankShares:
    """Return the fastest shares of the same global batch; `shares` if the gain is negligible."""
    fixed = [cost.fixed_s for cost in costs]
    fastest = fastest_shares(shares.global_batch, fixed, [cost.per_sample_s for cost in costs])
    if _slowest(fastest, costs) * (1 + _WORTH) < _slowest(shares, costs):
        return fastest
    return shares


def _slowest(shares: RankShares, costs: Sequence[Cost]) -> float:
    """Seconds that the slowest rank takes for a step."""
    return max(cost.of(count) for cost, count in zip(costs, shares.counts, strict=True))
