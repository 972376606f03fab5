"""Widths of a network that keeps a given fraction of its parameters."""

from collections.abc import Mapping, Sequence
from math import ceil, gcd
from typing import Final

import numpy as np
from torch import nn

from dlio.errors import UsageError
from dlio.features.pruning.model_size import count_parameters
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.train.model_copies import bare_copy

_LEVELS: Final = 256
"""Number of widths that are tried, as fractions of the original ones."""
_NEAR: Final = 1.5
"""Largest ratio of the parameters that are left to those that were asked for."""


def widths_for(
    model: nn.Module, groups: Sequence[NeuronGroup], fraction: float, multiple: int
) -> dict[str, int]:
    """Return the width of each group, by name, with which about `fraction` of the parameters stay.

    All groups shrink in the same proportion, up to the next multiple. Works on copies of the model,
    about eight of them, one at a time.

    Args:
        groups: groups of the model as it is.
        multiple: widths are multiples of this many channels; see `Limits`.

    Raises UsageError if the smallest widths leave over 1.5 times as many parameters.
    """
    whole = count_parameters(model)
    wanted = fraction * whole
    low, high = 1, _LEVELS
    while low < high:
        middle = (low + high) // 2
        if parameters_with(model, groups, _widths(groups, middle, multiple)) < wanted:
            low = middle + 1
        else:
            high = middle
    sizes = {
        level: parameters_with(model, groups, _widths(groups, level, multiple))
        for level in (max(1, low - 1), low)
    }
    level = min(sizes, key=lambda each: abs(sizes[each] - wanted))
    if sizes[level] > _NEAR * wanted:
        raise UsageError(
            f"{fraction:g} of the parameters cannot be reached by narrower layers: "
            f"{sizes[level] / whole:.3g} is the least; give that much, or make the model wider"
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
