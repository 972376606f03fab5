"""Shares by measured speed: ranks that compute faster take more of each global batch.

What a rank needs for a step is taken to be a fixed part and a part for each sample. A calibration
before the first epoch, on all ranks at once, measures both; every epoch then corrects their level
by what its steps took, waiting for data and for other ranks left out. Where measured times are
equal on all ranks nothing changes any more, whatever the split of fixed and varying parts was.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from dlio.comm import Communicator
from dlio.plan.shares import Shares, fastest_shares

_DAMPING: Final = 0.5
"""Of what an epoch measured is believed, where there was an estimate before."""
_WORTH: Final = 0.01
"""Of the slowest rank's step: what another split must gain to be taken."""
_MOST_FIXED: Final = 0.9
"""Of a step, that is believed to be there whatever the number of samples."""
_ROUNDS: Final = 3
_LEAST_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a rank computes for a step."""

    fixed_s: float
    per_sample_s: float

    def of(self, samples: int) -> float:
        return self.fixed_s + self.per_sample_s * samples

    @classmethod
    def fitted(cls, small: tuple[int, float], large: tuple[int, float]) -> "Cost":
        """Through two measurements (samples, seconds) of different size; within what can be."""
        (few, few_s), (many, many_s) = small, large
        fixed = many_s - many * (many_s - few_s) / (many - few)
        fixed = min(max(fixed, 0.0), _MOST_FIXED * many_s)
        return cls(fixed, max((many_s - fixed) / many, _LEAST_S))

    def corrected(self, steps: Sequence[tuple[int, float]], damping: float = _DAMPING) -> "Cost":
        """After steps of (samples, seconds), of which the median counts."""
        ratios = [seconds / self.of(samples) for samples, seconds in steps if samples]
        if not ratios:
            return self
        level = max(1 + damping * (statistics.median(ratios) - 1), _LEAST_S)
        return Cost(self.fixed_s * level, max(self.per_sample_s * level, _LEAST_S))


def reshared(shares: Shares, costs: Sequence[Cost]) -> Shares:
    """The fastest shares of the same global batch; `shares` where these are about as fast."""
    fixed = [cost.fixed_s for cost in costs]
    found = fastest_shares(shares.global_batch, fixed, [cost.per_sample_s for cost in costs])
    if _slowest(found, costs) * (1 + _WORTH) < _slowest(shares, costs):
        return found
    return shares


def _slowest(shares: Shares, costs: Sequence[Cost]) -> float:
    return max(cost.of(count) for cost, count in zip(costs, shares.counts, strict=True))


class Clock:
    """Seconds of one rank's own computing, step by step.

    Args:
        waited: seconds spent waiting for other ranks so far.
        device: where steps are computed.
    """

    def __init__(self, waited: Callable[[], float], device: torch.device | None = None) -> None:
        self._waited = waited
        self.device = device if device is not None and device.type == "cuda" else None
        """That is waited for at a step's end: what is asked of it is done later."""
        self.steps: list[tuple[int, float]] = []
        """(samples, seconds) of each."""

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Time what is within a `with`."""
        began, waited = time.perf_counter(), self._waited()
        yield
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began - (self._waited() - waited)
        self.steps.append((samples, max(seconds, _LEAST_S)))

    def rate(self) -> float | None:
        """Samples a second that this rank computes; None before it has done any."""
        rates = [samples / seconds for samples, seconds in self.steps if samples]
        return statistics.median(rates) if rates else None


class Sharing(Protocol):
    """A loader, as far as its shares go."""

    shares: Sequence[int] | None


class Balancer:
    """One run's shares, and what they are made of. Every rank has one; they always agree.

    Args:
        loaders: whose shares are set, between passes.
        batch_size: per rank, where shares are even.
        clock: of this rank's steps.
        chosen: whether shares are to change; otherwise ranks are only measured.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[Sharing],
        batch_size: int,
        clock: Clock,
        chosen: bool,
    ) -> None:
        self._comm, self._loaders = comm, loaders
        self._shares = Shares.even(batch_size, comm.size)
        self._clock = clock
        self._chosen = chosen and comm.size > 1
        # To wait for a GPU at each step costs: only where shares are made of it.
        self._timed = self._chosen or clock.device is None
        self._cost: Cost | None = None

    @property
    def shares(self) -> list[int]:
        """Samples that each rank gets of a step now."""
        return list(self._shares.counts)

    def step(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """Around each step's computation on this rank's `samples`, exchange included."""
        return self._clock.step(samples) if self._timed else contextlib.nullcontext()

    def calibrate(self, compute: Callable[[int], object]) -> None:
        """Share by what `compute` takes, given a number of samples: forward and backward, on a
        copy of the model that nobody uses otherwise. Collective; draws no random numbers of
        torch's that training would have drawn. Nothing where shares are not to change."""
        if not self._chosen:
            return
        many = max(2, self._shares.global_batch // self._comm.size)
        few = many // 2
        clock = Clock(lambda: 0.0, self._clock.device)
        device = self._clock.device
        with torch.random.fork_rng([] if device is None else [device]):
            compute(many)
            for _ in range(_ROUNDS):
                self._comm.barrier()  # Ranks that share cores disturb each other as they will.
                for samples in (few, many):
                    with clock.step(samples):
                        compute(samples)
        taken = [
            (size, statistics.median(s for samples, s in clock.steps if samples == size))
            for size in (few, many)
        ]
        self._cost = Cost.fitted(*taken)
        self._agree(self._comm.allgather([self._cost.fixed_s, self._cost.per_sample_s]))

    def told(self) -> dict[str, Any]:
        """What this rank has measured in the epoch that is over, for `agree`."""
        steps = self._clock.steps
        if self._cost is not None:
            self._cost = self._cost.corrected(steps)
        cost = self._cost or Cost(0.0, _LEAST_S)
        found = {
            "share": self._shares.counts[self._comm.rank],
            "computed_per_s": self._clock.rate(),
            "cost": [cost.fixed_s, cost.per_sample_s],
        }
        self._clock.steps = []
        return found

    def agree(self, everyone: Sequence[dict[str, Any]]) -> None:
        """Set the next epoch's shares from what all ranks have `told`."""
        if self._chosen:
            self._agree([rank["cost"] for rank in everyone])

    def _agree(self, costs: Sequence[Sequence[float]]) -> None:
        self._shares = reshared(self._shares, [Cost(*cost) for cost in costs])
        for loader in self._loaders:
            loader.shares = self.shares
