"""Try removal plans on a copy of the model, and accept only those that keep the loss low.

Until a plan is accepted, the model, its optimizers, the residuals of exchanges and the window of
statistics stay bitwise the same. A rejected plan needs no undoing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.features.pruning.input_statistics import Statistics
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.features.pruning.removal_plan import Limits, RemovalPlan, plan_removals, weights_of
from dlio.train.model_copies import bare_copy

_GENTLER: Final = 1 / 2, 1 / 4
"""Factors on (share, loss) of the limits for the second try."""
_PARTS: Final = 4
"""Parts of the plan that are tried separately if the second try fails."""

Probe = Callable[[nn.Module], float | torch.Tensor | tuple[float, float]]
"""Return the mean loss of a model on this rank, which counts as one sample, or the pair (sum of
losses, number of samples); (0, 0) without samples."""


def reduced(statistics: Statistics, comm: Communicator) -> Statistics:
    """Merge the statistics of all ranks. Collective."""
    if comm.size == 1:
        return statistics
    sums, peaks = statistics.sums(), statistics.peaks()
    comm.wait([comm.iallreduce(sums)], "statistics of neurons")
    comm.wait([comm.iallreduce(peaks, "max")], "peaks of neurons")
    return statistics.reduced(sums, peaks)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The outcome of one round's trials."""

    plan: RemovalPlan
    """The accepted plan; may be empty."""
    hurt: tuple[str, ...]
    """Groups whose removals were tried and rejected."""
    before: float | None
    """Mean loss of the probe before the round; None without a probe."""
    after: float | None
    """Mean loss with `plan` carried out."""
    gently: bool = False
    """True if the plan removes less of each group than the first one, which failed."""


class PlanTrials:
    """Trials of one round's plans. All ranks take part and reach the same decisions.

    Each gives its own statistics. Without a probe, plans are accepted by their bounds alone.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[NeuronGroup],
        statistics: Statistics,
        probe: Probe | None,
        comm: Communicator,
    ) -> None:
        self._model, self._groups, self._probe, self._comm = model, groups, probe, comm
        self._statistics = reduced(statistics, comm)
        self._weights = weights_of(model, groups) if comm.rank == 0 else {}
        self.before = None if probe is None else self._loss(None)
        """Mean loss of the model as it is; infinite if no rank has samples, or if it is NaN."""

    def round(self, limits: Limits, allowed: float) -> TrialResult:
        """Choose a plan within `limits` that raises the probe's loss by at most `allowed`.

        Tries the whole plan first, then a smaller one for each group, then the groups that do not
        raise the loss much, and finally gives up with an empty plan. Collective.
        """
        whole = self._planned(limits)
        if not whole.keep or self.before is None:
            return TrialResult(whole, (), self.before, self.before)
        after = self._loss(whole)
        if after - self.before <= allowed:
            return TrialResult(whole, (), self.before, after)
        share, loss = _GENTLER
        limits = replace(limits, share=limits.share * share, loss=limits.loss * loss)
        less = self._planned(limits)
        if less.keep:
            after = self._loss(less)
            if after - self.before <= allowed:
                return TrialResult(less, (), self.before, after, gently=True)
        names = list(less.keep) or list(whole.keep)
        fits = self._parts_that_fit(names, limits, allowed) if len(less.keep) > 1 else []
        rest = [name for name in names if name not in fits]
        if fits:
            part = self._planned(self._only(fits, limits))
            after = self._loss(part)
            if after - self.before <= allowed:
                return TrialResult(part, tuple(rest), self.before, after, gently=True)
        return TrialResult(RemovalPlan(), tuple(names), self.before, self.before)

    def _parts_that_fit(self, names: list[str], limits: Limits, allowed: float) -> list[str]:
        """Names of groups whose separately measured rises sum to at most `allowed`."""
        assert self.before is not None
        size = math.ceil(len(names) / _PARTS)
        parts = [names[at : at + size] for at in range(0, len(names), size)]
        rises = []
        for part in parts:
            loss = self._loss(self._planned(self._only(part, limits)))
            rises.append((loss - self.before, part))
        spent, fits = 0.0, []
        for rise, part in sorted(rises, key=lambda each: each[0]):
            spent += max(0.0, rise)
            if spent > allowed:
                break
            fits += part
        return fits

    def _only(self, names: list[str], limits: Limits) -> Limits:
        others = {group.name for group in self._groups} - set(names)
        return replace(limits, frozen=limits.frozen | others)

    def _planned(self, limits: Limits) -> RemovalPlan:
        """Plan on rank 0 and broadcast the result."""
        mine = RemovalPlan().to_json()
        if self._comm.rank == 0:
            mine = plan_removals(self._groups, self._weights, self._statistics, limits).to_json()
        return RemovalPlan.from_json(self._comm.tell(mine))

    @torch.no_grad()
    def _loss(self, plan: RemovalPlan | None) -> float:
        """Mean loss over all ranks' probes with `plan` carried out on a copy.

        Infinite if no rank has samples, or if the loss is NaN.
        """
        assert self._probe is not None
        copy = bare_copy(self._model)
        for module in copy.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                # Use the probe's own batch statistics: running ones lag behind a cut.
                module.training = True
                module.track_running_stats = False
        if plan is not None:
            apply(copy, self._groups, plan)
        loss = self._probe(copy)
        sums = np.array(loss if isinstance(loss, tuple) else (float(loss), 1.0), np.float64)
        self._comm.wait([self._comm.iallreduce(sums)], "the loss of a trial")
        # An allreduce may add in a different order on each rank.
        self._comm.bcast(sums)
        losses, count = sums.tolist()
        mean = losses / count if count else math.inf
        return mean if math.isfinite(mean) else math.inf
