"""A record of everything cut from a model, to save and to apply again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from torch import nn

from dlio.errors import DlioError
from dlio.exchange.cut import TensorCut
from dlio.features.pruning.layer_cuts import cut_layers, split_key
from dlio.features.pruning.layer_sides import layer_side
from dlio.features.pruning.neuron_groups import Indices, NeuronGroup, channels_gone


class LayoutRecord(TypedDict):
    """A PrunedLayout as JSON types."""

    version: int
    groups: dict[str, list[int]]
    layers: dict[str, tuple[int, list[int]]]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class PrunedLayout:
    """The original neurons that remain. `PrunedLayout()` belongs to an unpruned model."""

    version: int = 0
    """Number of cuts. Messages of another version have other shapes."""
    groups: Mapping[str, Indices] = field(default_factory=dict)
    """Remaining neurons of each group that was cut, as numbered in the original model."""
    layers: Mapping[str, tuple[int, Indices]] = field(default_factory=dict)
    """Original width and remaining channels, by Member.key."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Values of counts kept outside the layers, by `module:attribute`."""

    def after(
        self, model: nn.Module, groups: Sequence[NeuronGroup], keep: Mapping[str, Indices]
    ) -> "PrunedLayout":
        """Return the layout after a cut of `model`, which has this layout now. Pure."""
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
            shape = layer_side(model.get_submodule(name), side)
            assert shape is not None
            size, left = layers.get(key, (shape.size, np.arange(shape.size, dtype=np.int64)))
            layers[key] = size, np.delete(left, channels)
        return PrunedLayout(self.version + 1, cut, layers, counts)

    def to_json(self) -> LayoutRecord:
        """Convert to JSON types, for a checkpoint."""
        return {
            "version": self.version,
            "groups": {name: left.tolist() for name, left in self.groups.items()},
            "layers": {key: (size, left.tolist()) for key, (size, left) in self.layers.items()},
            "counts": dict(self.counts),
        }

    @staticmethod
    def from_json(record: LayoutRecord) -> "PrunedLayout":
        """Rebuild the layout that `to_json` converted. Raises DlioError for any other record."""
        try:
            return PrunedLayout(
                int(record["version"]),
                {name: np.array(left, np.int64) for name, left in record["groups"].items()},
                {
                    key: (int(size), np.array(left, np.int64))
                    for key, (size, left) in record["layers"].items()
                },
                {key: int(count) for key, count in record["counts"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DlioError(f"not a layout of a pruned model: {error}") from error


def shrink_to(
    model: nn.Module, layout: PrunedLayout, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> list[TensorCut]:
    """Cut an unpruned model in place to a pruned layout; it can then load the pruned state dict.

    Needs no example input and no tracing.

    Raises DlioError, before any change, if the model's widths differ from the original ones.
    """
    gone: dict[str, Indices] = {}
    for key, (size, left) in layout.layers.items():
        name, side = split_key(key)
        try:
            shape = layer_side(model.get_submodule(name), side)
        except AttributeError as error:
            raise DlioError(f"the pruned model has a layer '{name}', this one has none") from error
        valid = left.ndim == 1 and len(left) > 0 and left.min() >= 0 and left.max() < size
        if shape is None or shape.size != size or not valid:
            there = "none" if shape is None else str(shape.size)
            raise DlioError(
                f"{key}: the pruned model was cut from a width of {size}, this one has {there}: "
                "make the model with the options of the one that was trained"
            )
        gone[key] = np.delete(np.arange(size, dtype=np.int64), left)
    modules = dict(model.named_modules())
    counts = [(*key.partition(":")[::2], count) for key, count in layout.counts.items()]
    for name, attribute, count in counts:
        # Only an integer, made smaller: a layout may be another user's.
        whole = getattr(modules.get(name), attribute, None)
        if type(whole) is not int or not 0 < count <= whole:
            there = f"has {whole}" if type(whole) is int else "has none"
            raise DlioError(
                f"the pruned model has a count '{name}.{attribute}' of {count}, this one {there}"
            )
    cuts = cut_layers(model, gone, optimizers)
    for name, attribute, count in counts:
        setattr(modules[name], attribute, count)
    return cuts
