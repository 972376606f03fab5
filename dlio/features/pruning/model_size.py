"""Parameters and FLOPs of a model, and widths that keep a given fraction of the parameters."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import ceil, gcd
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from dlio.errors import UsageError
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import ModelInput, NeuronGroup, forward_on
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.train.model_copies import bare_copy

# Parameters and FLOPs


def count_parameters(model: nn.Module) -> int:
    """Number of entries in all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_layer(model: nn.Module) -> dict[str, int]:
    """Number of own parameters of each module, by name; shared ones count once, where first."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        counts[layer] = counts.get(layer, 0) + parameter.numel()
    return counts


def flops_per_sample(model: nn.Module, example: ModelInput) -> int:
    """Multiplications and additions of a forward pass per sample, as torch counts them.

    Runs the forward pass on a copy of the model, on the CPU. The samples of the example lie along
    the first dimension.
    """
    copy = bare_copy(model).cpu().float()
    leaves = [leaf for leaf in _pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    samples = max([len(leaf) for leaf in leaves if leaf.ndim], default=1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward_on(example)(copy)
    return int(counter.get_total_flops() // max(1, samples))


# Widths that keep a given fraction of the parameters
_LEVELS: Final = 256
"""Number of widths that are tried, as fractions of the original ones."""
_NEAR: Final = 1.5
"""Largest ratio of the parameters that are left to those that were asked for."""


def widths_for(
    model: nn.Module, groups: Sequence[NeuronGroup], fraction: float, multiple: int
) -> dict[str, int]:
    """Return the width of each group, by name, with which about `fraction` of the parameters stay.

    All groups shrink in the same proportion, up to the next multiple of channels; see `Limits`.
    Works on copies of the model, about eight of them, one at a time.

    Raises UsageError if the smallest widths leave over 1.5 times as many parameters, or the nearest
    ones all of them.
    """
    whole = count_parameters(model)
    wanted = fraction * whole

    def left(level: int) -> int:
        return parameters_with(model, groups, _widths(groups, level, multiple))

    enough = 1 + bisect_left(range(1, _LEVELS), wanted, key=left)
    sizes = {level: left(level) for level in (max(1, enough - 1), enough)}
    level = min(sizes, key=lambda each: abs(sizes[each] - wanted))
    if sizes[level] > _NEAR * wanted or sizes[level] == whole > wanted:
        raise UsageError(
            f"{fraction:g} of the parameters cannot be reached by narrower layers, of multiples of "
            f"{multiple}: {min(sizes.values()) / whole:.3g} is the next; give that much, or make "
            "the model wider"
        )
    return _widths(groups, level, multiple)


def parameters_with(
    model: nn.Module, groups: Sequence[NeuronGroup], widths: Mapping[str, int]
) -> int:
    """Count the parameters of a model whose groups have these widths, by name."""
    copy = bare_copy(model)
    keep = {
        group.name: np.arange(widths[group.name], dtype=np.int64)
        for group in groups
        if widths.get(group.name, group.width) < group.width
    }
    apply(copy, groups, RemovalPlan(keep))
    return count_parameters(copy)


def _widths(groups: Sequence[NeuronGroup], level: int, multiple: int) -> dict[str, int]:
    widths = {}
    for group in groups:
        each = multiple // gcd(multiple, group.unit)
        width = ceil(group.width * level / _LEVELS / each) * each
        widths[group.name] = min(group.width, max(1, width))
    return widths
