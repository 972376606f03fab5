"""torch-pruning's pruners (Fang et al., "DepGraph", arXiv 2301.12900), in a run of `dlio train`.

torch-pruning chooses the neurons, on a copy of the model. dlio cuts them, so that the optimizer
keeps its state, which torch-pruning's own cuts discard.
"""

import gc
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dlio.features.pruning.neuron_groups import Indices, NeuronGroup
from dlio.train.callbacks.callback_base import Run
from dlio.train.model_copies import bare_copy
from dlio_bench.prune.rivals.network_cutter import NetworkCutter

_LITTLE: Final = 1e-6
"""Widths are rounded down; this much less is removed, so that whole numbers stay as they are."""
_RATIO: Final = 0.5


class GroupMagnitude(NetworkCutter):
    """torch-pruning's BasePruner with GroupMagnitudeImportance: cut in rounds of equal size.

    Args:
        sizes: see `NetworkCutter`.
        steps: optimizer steps of the training.
        ratio: fraction of each layer's channels to remove in all.
        rounds: number of rounds.
        begin, end: fractions of the training at the first and the last round.
    """

    def __init__(
        self,
        sizes: str,
        steps: int,
        ratio: float = _RATIO,
        rounds: int = 2,
        begin: float = 0.02,
        end: float = 0.3,
    ) -> None:
        super().__init__(sizes)
        times = np.linspace(begin, end, rounds)
        self._left = {
            max(1, int(at * steps)): 1 - ratio * (number + 1) / rounds
            for number, at in enumerate(times)
        }
        """Fraction of the channels that is left, by step."""
        self._whole: dict[str, int] = {}

    def begins(self, run: Run) -> None:
        super().begins(run)
        self._whole = {group.name: group.width for group in self.groups}

    def after_step(self, run: Run) -> None:
        left = self._left.get(run.updates)
        if left is not None:
            gone = {
                group.name: 1 - left * self._whole[group.name] / group.width
                for group in self.groups
            }
            self.cut(run, chosen(run.model, self.groups, self.example, max(gone.values())))


class GroupNorm(NetworkCutter):
    """torch-pruning's GroupNormPruner: regularise groups of weights from the start, then cut once.

    Args:
        sizes: see `NetworkCutter`.
        steps: optimizer steps of the training.
        ratio: fraction of each layer's channels to remove.
        at: fraction of the training at the cut.
    """

    def __init__(self, sizes: str, steps: int, ratio: float = _RATIO, at: float = 0.3) -> None:
        super().__init__(sizes)
        self._ratio, self._at = ratio, int(at * steps)
        self._pruner: Any = None

    def begins(self, run: Run) -> None:
        super().begins(run)
        training = run.model.training
        self._pruner = _pruner("GroupNormPruner", run.model, self.example, self._ratio)
        run.model.train(training)

    def before_step(self, run: Run) -> bool:
        if self._pruner is not None:
            self._pruner.regularize(run.model)
        return True

    def after_step(self, run: Run) -> None:
        if run.updates == self._at:
            self._pruner = None
            gc.collect()  # It is part of cycles that hold on to the parameters.
            self.cut(run, chosen(run.model, self.groups, self.example, self._ratio))


def chosen(
    model: nn.Module, groups: Sequence[NeuronGroup], example: torch.Tensor, ratio: float
) -> dict[str, Indices]:
    """Return the neurons of each group that torch-pruning keeps, by the norm of their weights.

    Args:
        ratio: fraction of each layer's channels to remove.
    """
    copy = bare_copy(model)
    for parameter in copy.parameters():
        parameter.requires_grad_(True)
    names = {id(module): name for name, module in copy.named_modules()}
    by_producer = {member.module: (group, member) for group in groups for member in group.producers}
    keep: dict[str, Indices] = {}
    for coupled in _pruner("BasePruner", copy, example, ratio).step(interactive=True):
        dependency, channels = coupled[0]
        name = names[id(dependency.target.module)]
        if name not in by_producer:
            continue
        group, member = by_producer[name]
        gone = np.isin(member.channels, np.asarray(channels)).any(1)
        if not gone.all():
            keep[group.name] = np.flatnonzero(~gone).astype(np.int64)
    return keep


def _pruner(kind: str, model: nn.Module, example: torch.Tensor, ratio: float) -> Any:
    """A pruner of torch-pruning that leaves the classifier alone."""
    import torch_pruning

    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.enable_grad():  # Callbacks run without gradients, which it traces.
        return getattr(torch_pruning.pruner, kind)(
            model,
            example,
            importance=torch_pruning.importance.GroupMagnitudeImportance(),
            pruning_ratio=ratio - _LITTLE,
            ignored_layers=[last],
        )
