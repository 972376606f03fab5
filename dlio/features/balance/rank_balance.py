"""Balance the load by measured speed: faster ranks take more of each global batch.

The cost model of a step is a fixed time plus a time per sample. A calibration before the first
epoch, on all ranks at once, measures both. Every epoch then scales both by its measured step times,
without the time spent waiting for data and for other ranks. The shares settle when the measured
times are equal on all ranks, even if the split into fixed and variable cost is inaccurate.
"""

import copy
import statistics
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from dlio.features.balance.balance_feature import BalanceOptions
from dlio.plan.rank_shares import Cost, balanced_shares
from dlio.train.feature_hooks import FeatureHooks, FeatureRun
from dlio.train.report import RankEpoch
from dlio.train.step_clock import StepClock

_ROUNDS: Final = 3
_IMAGE_DIMENSIONS: Final = 4


class BalanceHooks(FeatureHooks):
    """Sets each rank's share of a step, between epochs. All ranks agree on the shares."""

    def __init__(self, options: BalanceOptions, run: FeatureRun) -> None:
        self._copy: nn.Module | None = copy.deepcopy(run.model)
        """The model to calibrate with, without the hooks of the exchange."""
        self._cost: Cost | None = None
        """None on a single rank."""

    def begin(self, run: FeatureRun) -> None:
        self._clock = run.clock
        if run.comm.size > 1:
            self._clock.is_on = True
            self._cost = self._calibrated(run)
            costs = run.comm.allgather([self._cost.fixed_s, self._cost.per_sample_s])
            self._share(run, costs)
        self._copy = None

    def _calibrated(self, run: FeatureRun) -> Cost:
        """Measure the costs of this rank's steps. Collective.

        Leaves torch's random number generators as they were.
        """
        many = max(2, run.global_batch // run.comm.size)
        few = many // 2
        clock = StepClock(lambda: 0.0, run.device)
        clock.is_on = True
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng([] if clock.device is None else [clock.device]):
            self._pass(run, many, generator)
            for _ in range(_ROUNDS):
                run.comm.barrier()  # Ranks that share cores compete as they will in training.
                for samples in (few, many):
                    with clock.step(samples):
                        self._pass(run, samples, generator)
        small, large = (
            (size, statistics.median(s for samples, s in clock.steps if samples == size))
            for size in (few, many)
        )
        return Cost.fitted(small, large)

    def _pass(self, run: FeatureRun, samples: int, generator: torch.Generator) -> None:
        assert self._copy is not None
        task = run.task
        inputs, targets = (each.to(run.device) for each in task.example(samples, generator))
        if inputs.ndim == _IMAGE_DIMENSIONS:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with run.precision.casting():
            loss = task.objective.losses(self._copy.train()(inputs), targets).mean()
        torch.autograd.backward(loss)

    def measure(self) -> list[float] | None:
        if self._cost is None:
            return None
        self._cost = self._cost.corrected(self._clock.steps)
        return [self._cost.fixed_s, self._cost.per_sample_s]

    def compared(
        self, run: FeatureRun, everyone: Sequence[RankEpoch], accuracy: float | None
    ) -> None:
        if self._cost is not None:
            self._share(run, [rank["features"]["balance"] for rank in everyone])

    def _share(self, run: FeatureRun, costs: Sequence[Sequence[float]]) -> None:
        """Set the shares by the costs of the surviving ranks, in rank order."""
        shares = balanced_shares(run.shares, [Cost(*cost) for cost in costs])
        for loader in (run.loader, run.held_out):
            if loader is not None:
                loader.shares = list(shares.counts)
