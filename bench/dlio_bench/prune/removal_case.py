"""Removing neurons by other rules, to compare with: by magnitude, and by chance."""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.exchange.cut import TensorCut
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import ModelInput, NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan, weights_of
from dlio.train.callbacks.callback_base import Callback, Run


def by_magnitude(
    model: nn.Module, groups: Sequence[NeuronGroup], widths: Mapping[str, int]
) -> RemovalPlan:
    """Keep, of each group, the neurons with the largest sums of their weights' magnitudes (Li et
    al., "Pruning filters for efficient convnets", ICLR 2017).

    Args:
        widths: by group, how many stay; of groups that are not in it, all.
    """
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


class ByChance:
    """Removes as many neurons as somebody else's rounds did, after the same steps, any of them.

    Args:
        widths: by step, the widths of groups after it.
        told: called with the cuts.
    """

    def __init__(
        self,
        model: nn.Module,
        example: ModelInput,
        widths: Mapping[int, Mapping[str, int]],
        seed: int,
        told: Callable[[Sequence[TensorCut]], None] = lambda _: None,
    ) -> None:
        self._model, self._widths, self._told = model, widths, told
        self._groups = find_groups(model, example).groups
        self._generator = np.random.default_rng(seed)

    def step(self, done: int, optimizer: torch.optim.Optimizer) -> bool:
        """After step number `done`; whether it was time."""
        if done not in self._widths:
            return False
        plan = by_chance(self._groups, self._widths[done], self._generator)
        applied = apply(self._model, self._groups, plan, [optimizer], aligned=(self._told,))
        self._groups = applied.groups
        return True


class Chance(Callback):
    """A callback of `dlio train` that removes neurons by chance, as `ByChance` does.

    Args:
        rounds: file of a list in JSON, with `step` and `widths` of each round.
    """

    def __init__(self, rounds: str, seed: int) -> None:
        with open(rounds, encoding="utf-8") as file:
            self._widths = {
                each["step"]: each["widths"] for each in json.load(file) if each["widths"]
            }
        self._seed = seed
        self._removal: ByChance | None = None

    def begins(self, run: Run) -> None:
        size = run.config.model.image_size
        self._removal = ByChance(
            run.model, torch.zeros(2, 3, size, size), self._widths, self._seed, run.exchange.reshape
        )

    def after_step(self, run: Run) -> None:
        assert self._removal is not None
        if self._removal.step(run.updates, run.optimizer):
            run.reshaped()
