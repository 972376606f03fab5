"""Groups of coupled channels: neurons that can only be removed together from several layers.

A neuron is the unit of removal: a feature of a linear layer, a channel of a convolution, or a
whole attention head. Statistics, removal plans and cuts work on these values and on tensors; they
do not depend on the library that found the groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

# Tensors and attributes of layers that hold the neurons of one side
Side = Literal["out", "through", "in"]
"""`out`: the layer produces the neurons; `in`: it reads them; `through`: it acts on each one
separately."""


@dataclass(frozen=True, slots=True)
class LayerSide:
    """The tensors and attributes to cut on one side of a layer."""

    tensors: tuple[tuple[str, int], ...]
    """(name of a parameter or buffer, dimension along which the neurons lie)."""
    attributes: tuple[str, ...]
    """Names of the attributes that count the neurons."""
    size: int
    """Number of neurons."""


def layer_side(module: nn.Module, side: Side) -> LayerSide | None:
    """Return the tensors on one side; None if it cannot be cut channel by channel."""
    match module:
        case nn.Linear():
            if side == "out":
                return _side(module, {"weight": 0, "bias": 0}, ("out_features",))
            if side == "in":
                return _side(module, {"weight": 1}, ("in_features",))
        case nn.modules.conv._ConvNd():
            return _convolution(module, side)
        case nn.modules.batchnorm._BatchNorm() | nn.modules.instancenorm._InstanceNorm():
            tensors = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
            return _side(module, tensors, ("num_features",)) if side == "through" else None
        case nn.PReLU() if side == "through" and module.num_parameters > 1:
            return _side(module, {"weight": 0}, ("num_parameters",))
        case nn.Embedding() if side == "out":
            return _side(module, {"weight": 1}, ("embedding_dim",))
    return None


def is_depthwise(module: nn.Module) -> bool:
    """True for a convolution that treats each channel separately."""
    return (
        isinstance(module, nn.modules.conv._ConvNd)
        and module.groups == module.in_channels == module.out_channels
        and module.groups > 1
    )


def reads_zeros(module: nn.Module) -> bool:
    """True if a layer reads zeros instead of neurons at an image's border."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    if module.transposed or isinstance(module.padding, str):
        return module.transposed or module.padding != "valid"
    return any(module.padding)


def _convolution(module: nn.modules.conv._ConvNd, side: Side) -> LayerSide | None:
    if is_depthwise(module):
        names = ("in_channels", "out_channels", "groups")
        return _side(module, {"weight": 0, "bias": 0}, names) if side == "through" else None
    if module.groups > 1 or side == "through":
        return None
    if side == "out":
        weight = 1 if module.transposed else 0
        return _side(module, {"weight": weight, "bias": 0}, ("out_channels",))
    return _side(module, {"weight": 0 if module.transposed else 1}, ("in_channels",))


def _side(module: nn.Module, tensors: dict[str, int], attributes: tuple[str, ...]) -> LayerSide:
    there = tuple(
        (name, dim) for name, dim in tensors.items() if getattr(module, name, None) is not None
    )
    return LayerSide(there, attributes, int(getattr(module, attributes[0])))


# Groups
Indices = npt.NDArray[np.int64]
JsonRecord: TypeAlias = dict[str, Any]
"""The fields of a value as JSON types, as its `to_json` returns them."""
ModelInput = torch.Tensor | Sequence[object] | Mapping[str, object]
"""Input of a model: a tensor, a sequence of positional arguments, or a mapping of keyword ones."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupMember:
    """The part of a group that lies on one side of one layer."""

    module: str
    """Name of the layer in the model."""
    side: Side
    channels: Indices
    """Shape (width, k): the k channels of this side that belong to each neuron."""
    dim: int
    """Dimension of the layer's weight along which the channels lie."""
    padded: bool = False
    """True if this consumer reads zeros instead of neurons at an image's border."""
    constant: str = ""
    """Name, in the state dict, of the tensor of a consumer that can absorb a constant: its bias, or
    the running mean of the batch norm behind it. Empty if it has neither."""

    @property
    def key(self) -> str:
        """Unique name of this side: `module:side`."""
        return f"{self.module}:{self.side}"

    @property
    def weight(self) -> str:
        """Name of the weight in the state dict."""
        return f"{self.module}.weight"


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between a neuron's weighted sum and the layers that read it."""

    kind: str
    """`identity`, `relu`, `leaky_relu`, `sigmoid`, `tanh`, `gelu`, ..., or `other`."""
    lipschitz: float
    """Lipschitz constant; infinite if unknown."""
    scales: bool
    """True if f(cx) = c f(x) for c > 0."""


@dataclass(frozen=True, slots=True, eq=False)
class NeuronGroup:
    """Neurons that are cut together from all layers that produce, normalise or read them."""

    name: str
    """Name of the first producer."""
    width: int
    """Number of neurons."""
    producers: tuple[GroupMember, ...]
    through: tuple[GroupMember, ...]
    """Layers that act on each channel separately: batch norms, depth-wise convolutions."""
    consumers: tuple[GroupMember, ...]
    activation: Activation | None = None
    """None unless all consumers read one producer by the same path; excludes residual connections,
    gates, and depth-wise convolutions."""
    norm: str = ""
    """Batch norm between the producer and the activation; empty if `activation` is None."""
    attributes: tuple[tuple[str, str, int], ...] = ()
    """(module, attribute, count per neuron) of counts kept outside the layers, as `num_heads`."""

    @property
    def unit(self) -> int:
        """Channels per neuron in the producer: 1, or the size of a head."""
        return int(self.producers[0].channels.shape[1])

    @property
    def members(self) -> tuple[GroupMember, ...]:
        """All members, producers first."""
        return self.producers + self.through + self.consumers

    def with_members(self, change: Callable[[GroupMember], GroupMember]) -> "NeuronGroup":
        """Return the group with each member changed."""
        return replace(
            self,
            producers=tuple(map(change, self.producers)),
            through=tuple(map(change, self.through)),
            consumers=tuple(map(change, self.consumers)),
        )


@dataclass(frozen=True, slots=True)
class UnprunableLayer:
    """A layer whose outputs are not pruned."""

    module: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PrunableGroups:
    """The groups that can be pruned, and the layers that cannot."""

    groups: tuple[NeuronGroup, ...]
    left_alone: tuple[UnprunableLayer, ...]


def channels_gone(groups: Sequence[NeuronGroup], keep: Mapping[str, Indices]) -> dict[str, Indices]:
    """Return the channels to remove, ascending, by Member.key; groups not in `keep` stay whole."""
    gone: dict[str, list[Indices]] = {}
    for group in groups:
        if group.name not in keep:
            continue
        away = np.delete(np.arange(group.width, dtype=np.int64), keep[group.name])
        if len(away):
            for member in group.members:
                gone.setdefault(member.key, []).append(member.channels[away].ravel())
    return {key: np.unique(np.concatenate(parts)) for key, parts in gone.items()}


def shrunk(groups: Sequence[NeuronGroup], keep: Mapping[str, Indices]) -> tuple[NeuronGroup, ...]:
    """Return the groups of the model after the cut, with renumbered channels."""
    gone = channels_gone(groups, keep)

    def group_after(group: NeuronGroup) -> NeuronGroup:
        stay = keep.get(group.name, np.arange(group.width, dtype=np.int64))

        def member_after(member: GroupMember) -> GroupMember:
            channels = member.channels[stay]
            if member.key in gone:
                channels = channels - np.searchsorted(gone[member.key], channels)
            return replace(member, channels=channels)

        return replace(group.with_members(member_after), width=len(stay))

    return tuple(map(group_after, groups))


# Inputs


def forward_on(example: ModelInput) -> Callable[[nn.Module], object]:
    """Return a function that calls a model on an example, on the CPU and in float32."""
    arguments = _on_cpu(example)

    def forward(model: nn.Module) -> object:
        if isinstance(arguments, dict):
            return model(**arguments)
        return model(*arguments) if isinstance(arguments, tuple) else model(arguments)

    return forward


def _on_cpu(example: object) -> object:
    """Move tensors to the CPU as float32; lists become tuples, mappings dictionaries."""
    match example:
        case torch.Tensor():
            return example.detach().cpu().float() if example.is_floating_point() else example.cpu()
        case Mapping():
            return {key: _on_cpu(value) for key, value in example.items()}
        case tuple() | list():
            return tuple(_on_cpu(value) for value in example)
    return example
