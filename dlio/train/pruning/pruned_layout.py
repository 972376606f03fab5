"""What has been cut from a model so far, to be written down and done again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from dlio.errors import DlioError
from dlio.train.cut import Cut
from dlio.train.pruning.cutting import cut_layers, split_key
from dlio.train.pruning.groups import Group, Indices, channels_gone
from dlio.train.pruning.layers import shape_of


@dataclass(frozen=True, slots=True, eq=False)
class PrunedLayout:
    """Which of the original neurons there still are. An unpruned model's is `PrunedLayout()`."""

    version: int = 0
    """How many cuts; messages made under another one have other shapes."""
    groups: Mapping[str, Indices] = field(default_factory=dict)
    """Per group that was cut, the neurons that are left, as numbered in the original model."""
    layers: Mapping[str, tuple[int, Indices]] = field(default_factory=dict)
    """Per side of a layer (Member.key), its original width and the channels that are left."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """`module:attribute` of counts outside of the layers."""

    def after(
        self, model: nn.Module, groups: Sequence[Group], keep: Mapping[str, Indices]
    ) -> "PrunedLayout":
        """What it is when `model`, which has this one, has been cut so. Pure."""
        cut = dict(self.groups)
        layers = dict(self.layers)
        counts = dict(self.counts)
        for group in groups:
            if group.name in keep:
                cut[group.name] = cut.get(group.name, np.arange(group.width))[keep[group.name]]
                for module, attribute, each in group.attributes:
                    counts[f"{module}:{attribute}"] = each * len(keep[group.name])
        for key, channels in channels_gone(groups, keep).items():
            name, side = split_key(key)
            shape = shape_of(model.get_submodule(name), side)
            assert shape is not None
            size, left = layers.get(key, (shape.size, np.arange(shape.size, dtype=np.int64)))
            layers[key] = size, np.delete(left, channels)
        return PrunedLayout(self.version + 1, cut, layers, counts)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "groups": {name: left.tolist() for name, left in self.groups.items()},
            "layers": {key: [size, left.tolist()] for key, (size, left) in self.layers.items()},
            "counts": dict(self.counts),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "PrunedLayout":
        """Raises DlioError for what to_json did not write."""
        try:
            return PrunedLayout(
                int(data["version"]),
                {name: np.array(left, np.int64) for name, left in data["groups"].items()},
                {
                    key: (int(size), np.array(left, np.int64))
                    for key, (size, left) in data["layers"].items()
                },
                {key: int(count) for key, count in data["counts"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DlioError(f"not a layout of a pruned model: {error}") from error


def shrink_to(
    model: nn.Module, layout: PrunedLayout, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> list[Cut]:
    """Cut an unpruned model, in place, to the shapes of a pruned one, whose state dict it then
    takes. Needs no example and no tracing.

    Raises DlioError, before anything is changed, where the model is not of the original widths.
    """
    gone: dict[str, Indices] = {}
    for key, (size, left) in layout.layers.items():
        name, side = split_key(key)
        try:
            shape = shape_of(model.get_submodule(name), side)
        except AttributeError as error:
            raise DlioError(f"the pruned model has a layer '{name}', this one has none") from error
        valid = len(left) > 0 and left.min() >= 0 and left.max() < size
        if shape is None or shape.size != size or not valid:
            there = "none" if shape is None else str(shape.size)
            raise DlioError(
                f"{key}: the pruned model was cut from a width of {size}, this one has {there}: "
                "make the model with the options of the one that was trained"
            )
        gone[key] = np.delete(np.arange(size, dtype=np.int64), left)
    modules = dict(model.named_modules())
    counts = [(*key.partition(":")[::2], count) for key, count in layout.counts.items()]
    for name, attribute, _ in counts:
        if not hasattr(modules.get(name), attribute):
            raise DlioError(f"the pruned model has a count '{name}.{attribute}', this one has none")
    cuts = cut_layers(model, gone, optimizers)
    for name, attribute, count in counts:
        setattr(modules[name], attribute, count)
    return cuts
