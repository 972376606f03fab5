"""An epoch's order as a list: the samples of one rank, batch by batch, where a sampler gives them;
and a permutation that torch has drawn, which all ranks share."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.plan.order import Order
from dlio.plan.schedule import RankWindow

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ListedOrder(Order):
    """Listed samples, which may occur several times; `n` is their number.

    Memory: 8 bytes a sample.
    """

    listed: _I64 = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    """Sample at each position; shape (n,)."""
    starts: _I64 = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    """First position of each batch, then n; shape (batches + 1,)."""

    @classmethod
    def of(cls, batches: list[_I64]) -> "ListedOrder":
        """Make the order of batches, of which one has a sample."""
        listed = np.concatenate(batches)
        starts = np.concatenate([[0], np.cumsum([len(each) for each in batches])])
        return cls(len(listed), 0, 0, False, listed, starts.astype(np.int64))

    def _map(self, given: _I64, inverse: bool) -> _I64:
        if inverse:
            raise UsageError("a listed sample may have several positions: ask for samples")
        self._check(given)
        samples: _I64 = self.listed[given]
        return samples

    def window(self, steps: range) -> RankWindow:
        """Plan a run of steps of the rank, which reads its samples itself and exchanges none."""
        starts = self.starts[steps.start : steps.stop + 1]
        if not len(starts):
            starts = np.zeros(1, np.int64)
        samples = self.listed[starts[0] : starts[-1]]
        none = np.full(len(samples), -1, np.int32)
        return RankWindow(steps, samples, starts - starts[0], none, {})


@dataclass(frozen=True)
class PermutedOrder(Order):
    """A permutation of all samples that was drawn elsewhere. Memory: 8 bytes a sample, 16 once
    positions are asked for."""

    listed: _I64 = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    """Sample at each position; shape (n,)."""

    @cached_property
    def _inverse(self) -> _I64:
        inverse = np.empty_like(self.listed)
        inverse[self.listed] = np.arange(self.n)
        return inverse

    def _map(self, given: _I64, inverse: bool) -> _I64:
        self._check(given)
        mapped: _I64 = (self._inverse if inverse else self.listed)[given]
        return mapped
