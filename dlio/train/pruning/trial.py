"""A plan tried out on a copy before it is carried out: what hurts is undone by never being done.

The model, its optimizers, what exchanges owe and the window of statistics stay as they are, byte
by byte, until a plan has been accepted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.train.pruning.agreement import reduced, total
from dlio.train.pruning.apply import apply
from dlio.train.pruning.copies import bare_copy
from dlio.train.pruning.groups import Group
from dlio.train.pruning.removal import Limits, RemovalPlan, plan_removals, weights_of
from dlio.train.pruning.statistics import Statistics

_GENTLER: Final = 1 / 2, 1 / 4
"""A plan that hurts is tried again at such parts of its limits: of the share, and of the loss."""
_PARTS: Final = 4
"""Of a plan that hurts even then, that are tried one by one."""

Probe = Callable[[nn.Module], tuple[float, float]]
"""Gives (sum of losses, samples) of a model on this rank's probe; (0, 0) where it has none."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What came of a plan."""

    plan: RemovalPlan
    """To be carried out; it may remove nothing."""
    hurt: tuple[str, ...]
    """Groups whose removals were tried, and are not to be done."""
    before: float | None
    """The probe's loss; None without one."""
    after: float | None
    """With `plan` carried out."""
    tries: int
    """Plans whose loss was looked at."""
    gently: bool = False
    """Whether less was taken of each group than was planned first, as that hurt."""


class PlanTrials:
    """Tries plans of one round, on all ranks together: each takes the same decisions.

    Args:
        statistics: this rank's.
        probe: None where plans are taken at their bounds.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        statistics: Statistics,
        probe: Probe | None,
        comm: Communicator,
    ) -> None:
        self._model, self._groups, self._probe, self._comm = model, groups, probe, comm
        self._statistics = reduced(statistics, comm)
        self._weights = weights_of(model, groups) if comm.rank == 0 else {}
        self._tries = 0
        self.before = None if probe is None else self._loss(None)
        """The probe's loss as the model is; infinite where no rank has a sample to probe with, or
        it is no number."""

    def round(self, limits: Limits, allowed: float) -> TrialResult:
        """Collective. A plan within `limits` that raises the probe's loss by at most `allowed`:
        all of what was planned, or less of each group, or of those groups that do not hurt, or
        nothing."""
        whole = self._planned(limits)
        if not whole.keep or self.before is None:
            return TrialResult(whole, (), self.before, self.before, 0)
        after = self._loss(whole)
        if after - self.before <= allowed:
            return TrialResult(whole, (), self.before, after, self._tries)
        share, loss = _GENTLER
        limits = replace(limits, share=limits.share * share, loss=limits.loss * loss)
        less = self._planned(limits)
        if less.keep:
            after = self._loss(less)
            if after - self.before <= allowed:
                return TrialResult(less, (), self.before, after, self._tries, gently=True)
        names = list(less.keep) or list(whole.keep)
        fits = self._parts_that_fit(names, limits, allowed) if len(less.keep) > 1 else []
        rest = [name for name in names if name not in fits]
        if fits:
            some = self._planned(self._only(fits, limits))
            after = self._loss(some)
            if after - self.before <= allowed:
                return TrialResult(some, tuple(rest), self.before, after, self._tries, gently=True)
        return TrialResult(RemovalPlan(), tuple(names), self.before, self.before, self._tries)

    def _parts_that_fit(self, names: list[str], limits: Limits, allowed: float) -> list[str]:
        """Groups whose removals, taken part by part, are within what is allowed together."""
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
        """Made by rank 0."""
        mine: dict[str, Any] = {}
        if self._comm.rank == 0:
            mine = plan_removals(self._groups, self._weights, self._statistics, limits).to_json()
        return RemovalPlan.from_json(self._comm.tell(mine))

    @torch.no_grad()
    def _loss(self, what: RemovalPlan | None) -> float:
        """The mean loss over all ranks' probes, with a plan carried out; infinite where there is
        none, or it is no number."""
        assert self._probe is not None
        copy = bare_copy(self._model)
        for module in copy.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                # By the probe's own statistics, as in training: running ones lag behind a cut.
                module.training = True
                module.track_running_stats = False
        if what is not None:
            self._tries += 1
            apply(copy, self._groups, what)
        losses, count = total(list(self._probe(copy)), self._comm)
        loss = losses / count if count else math.inf
        return loss if math.isfinite(loss) else math.inf
