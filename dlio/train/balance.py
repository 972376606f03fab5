"""Balance the load by measured speed: faster ranks take more of each global batch.

The cost model of a step is a fixed time plus a time per sample. A calibration before the first
epoch, on all ranks at once, measures both. Every epoch then scales both by its measured step times,
without the time spent waiting for data and for other ranks. The shares settle when the measured
times are equal on all ranks, even if the split into fixed and variable cost is inaccurate.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.plan.rank_shares import RankShares, fastest_shares
from dlio.train.precision import Precision
from dlio.train.report import RankSpeed
from dlio.train.tasks.task_base import TrainingTask

_DAMPING: Final = 0.5
"""Weight of an epoch's measurement against the earlier estimate."""
_WORTH: Final = 0.01
"""Least gain, relative to the slowest rank's step, for which shares change."""
_MOST_FIXED: Final = 0.9
"""Largest fraction of a step that the cost model accepts as fixed."""
_ROUNDS: Final = 3
_LEAST_S: Final = 1e-9
_IMAGE_DIMENSIONS: Final = 4


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
        return cls(fixed, max((many_s - fixed) / many, _LEAST_S))

    def corrected(self, steps: Sequence[tuple[int, float]], damping: float = _DAMPING) -> "Cost":
        """Scale both costs towards the median of measured steps (samples, seconds)."""
        ratios = [seconds / self.of(samples) for samples, seconds in steps if samples]
        if not ratios:
            return self
        level = max(1 + damping * (statistics.median(ratios) - 1), _LEAST_S)
        return Cost(self.fixed_s * level, max(self.per_sample_s * level, _LEAST_S))


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


class StepClock:
    """Time that one rank computes in each step, without waiting for other ranks.

    Args:
        waited: return the seconds spent waiting for other ranks so far.
        device: device that computes the steps.
    """

    def __init__(self, waited: Callable[[], float], device: torch.device | None = None) -> None:
        self._waited = waited
        self.device = device if device is not None and device.type == "cuda" else None
        """A GPU to synchronise with at the end of a step, because it runs asynchronously."""
        self.steps: list[tuple[int, float]] = []
        """(samples, seconds) of each step."""

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Time the body of a `with` statement as one step."""
        began, waited = time.perf_counter(), self._waited()
        yield
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began - (self._waited() - waited)
        self.steps.append((samples, max(seconds, _LEAST_S)))

    def rate(self) -> float | None:
        """Samples per second that this rank computes; None before it has computed any."""
        rates = [samples / seconds for samples, seconds in self.steps if samples]
        return statistics.median(rates) if rates else None


class BalancedLoader(Protocol):
    """The part of a loader that the balancer sets."""

    shares: Sequence[int] | None
    """Samples of a step per rank; None for even shares."""


class Balancer:
    """Set each rank's share of a step. Every rank has a balancer, and all of them agree.

    Args:
        loaders: loaders whose shares are set, between passes.
        batch_size: samples per rank if shares are even.
        clock: times this rank's steps.
        chosen: adapt the shares; if False, ranks are only measured.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[BalancedLoader],
        batch_size: int,
        clock: StepClock,
        chosen: bool,
    ) -> None:
        self._comm, self._loaders = comm, loaders
        self._shares = RankShares.even(batch_size, comm.size)
        self._clock = clock
        self._chosen = chosen and comm.size > 1
        # Synchronising with a GPU at each step is slow, so time it only to adapt shares.
        self._timed = self._chosen or clock.device is None
        self._cost: Cost | None = None

    @property
    def shares(self) -> list[int]:
        """Samples of a step that each rank takes now."""
        return list(self._shares.counts)

    def step(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """Time a step on this rank's `samples`, including the exchange; a context manager."""
        return self._clock.step(samples) if self._timed else contextlib.nullcontext()

    def calibrate(self, compute: Callable[[int], object]) -> None:
        """Measure the costs and set the first shares; does nothing if shares are not adapted.

        Collective. Leaves torch's random number generators as they were.

        Args:
            compute: run forward and backward on a number of samples, on a private copy of the
                model.
        """
        if not self._chosen:
            return
        many = max(2, self._shares.global_batch // self._comm.size)
        few = many // 2
        clock = StepClock(lambda: 0.0, self._clock.device)
        device = self._clock.device
        with torch.random.fork_rng([] if device is None else [device]):
            compute(many)
            for _ in range(_ROUNDS):
                self._comm.barrier()  # Ranks that share cores compete as they will in training.
                for samples in (few, many):
                    with clock.step(samples):
                        compute(samples)
        taken = [
            (size, statistics.median(s for samples, s in clock.steps if samples == size))
            for size in (few, many)
        ]
        self._cost = Cost.fitted(*taken)
        costs = self._comm.allgather([self._cost.fixed_s, self._cost.per_sample_s])
        self._agree(costs, self._shares.global_batch)

    def measured(self) -> RankSpeed:
        """Return this rank's measurements of the finished epoch, for `agree`."""
        steps = self._clock.steps
        if self._cost is not None:
            self._cost = self._cost.corrected(steps)
        cost = self._cost or Cost(0.0, _LEAST_S)
        shares = self._among(self._comm.size, self._shares.global_batch)
        speed: RankSpeed = {
            "share": shares.counts[self._comm.rank],
            "computed_per_s": self._clock.rate(),
            "cost": [cost.fixed_s, cost.per_sample_s],
        }
        self._clock.steps = []
        return speed

    def agree(self, everyone: Sequence[RankSpeed], global_batch: int) -> None:
        """Set the next epoch's shares from the measurements of all ranks, in rank order.

        Args:
            everyone: the ranks that are left, if some were lost.
        """
        if self._chosen:
            self._agree([rank["cost"] for rank in everyone], global_batch)

    def _among(self, ranks: int, global_batch: int) -> RankShares:
        """Return the present shares; even ones if they are of other ranks."""
        shares = self._shares
        if (len(shares.counts), shares.global_batch) == (ranks, global_batch):
            return shares
        return RankShares.of(global_batch, ranks)

    def _agree(self, costs: Sequence[Sequence[float]], global_batch: int) -> None:
        shares = self._among(len(costs), global_batch)
        self._shares = balanced_shares(shares, [Cost(*cost) for cost in costs])
        for loader in self._loaders:
            loader.shares = self.shares


def timed_pass(
    model: nn.Module, precision: Precision, task: TrainingTask, device: torch.device
) -> Callable[[int], None]:
    """Return a function that runs forward and backward on a number of random samples.

    Args:
        model: a private copy, on the device.
    """
    generator = torch.Generator().manual_seed(0)

    def compute(samples: int) -> None:
        inputs, targets = (each.to(device) for each in task.example(samples, generator))
        if inputs.ndim == _IMAGE_DIMENSIONS:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with precision.casting():
            loss = task.losses(model.train()(inputs), targets).mean()
        torch.autograd.backward(loss)

    return compute
