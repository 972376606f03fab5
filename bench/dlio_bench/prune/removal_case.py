"""Removing neurons by other rules, to compare with: by magnitude, and by chance."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import nn

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import ModelInput, NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan, weights_of


def by_magnitude(
    model: nn.Module, groups: Sequence[NeuronGroup], widths: Mapping[str, int]
) -> RemovalPlan:
    """Keep so many of each group's neurons, those with the largest sums of their weights'
    magnitudes (Li et al., "Pruning filters for efficient convnets", ICLR 2017); of groups that are
    not in `widths`, all."""
    weights = weights_of(model, groups)

    def largest(group: NeuronGroup, width: int) -> npt.NDArray[np.int64]:
        sums = np.zeros(group.width)
        for member in group.producers:
            weight = np.moveaxis(np.abs(weights[member.weight]), member.dim, 0)
            sums += weight.reshape(len(weight), -1).sum(1)[member.channels].sum(1)
        return np.argsort(-sums, kind="stable")[:width]

    return _kept(groups, widths, largest)


def by_chance(
    groups: Sequence[NeuronGroup], widths: Mapping[str, int], generator: np.random.Generator
) -> RemovalPlan:
    """Keep so many of each group's neurons, any; of groups that are not in `widths`, all."""
    return _kept(
        groups, widths, lambda group, width: generator.choice(group.width, width, replace=False)
    )


def _kept(
    groups: Sequence[NeuronGroup],
    widths: Mapping[str, int],
    choose: Callable[[NeuronGroup, int], npt.NDArray[np.int64]],
) -> RemovalPlan:
    """Return a plan that keeps the neurons that are chosen of each group that gets narrower."""
    keep = {}
    for group in groups:
        if widths.get(group.name, group.width) < group.width:
            keep[group.name] = np.sort(choose(group, widths[group.name])).astype(np.int64)
    return RemovalPlan(keep)


def cut_by_magnitude(model: nn.Module, example: ModelInput, widths: Mapping[str, int]) -> None:
    """Cut a model, in place, to widths that are given by group."""
    groups = find_groups(model, example).groups
    apply(model, groups, by_magnitude(model, groups, widths))
