"""Neurons that can only go together: groups of coupled channels, as values.

A neuron here is whatever is removed as one: a feature of a linear layer, a channel of a
convolution, or a whole head of attention. All that is done with neurons, be it statistics, plans
or cuts, needs these values, tensors and nothing of the library that found them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlio.train.pruning.layers import Side

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One side of one layer, of which a group's neurons are a part or the whole."""

    module: str
    """The layer's name in the model."""
    side: Side
    channels: Indices
    """Shape (width, k): the channels of that side that are each neuron's."""
    dim: int
    """Of the layer's weight, that the channels lie along."""
    padded: bool = False
    """Of a layer that reads: whether it sees zeros for neurons at an image's border."""
    constant: str = ""
    """Of a layer that reads: what takes up a constant, by its name in the state dict. Its bias, or
    the running mean of the batch norm behind it; empty where there is neither."""

    @property
    def key(self) -> str:
        return f"{self.module}:{self.side}"

    @property
    def weight(self) -> str:
        """The weight's name in the state dict."""
        return f"{self.module}.weight"


@dataclass(frozen=True, slots=True)
class Activation:
    """What lies between a neuron's weighted sum and the layers that read it."""

    kind: str
    """`identity`, `relu`, `leaky_relu`, `sigmoid`, `tanh`, `gelu`, ..., or `other`."""
    lipschitz: float
    """How much faster than its argument it changes at most; infinite where that is unknown."""
    scales: bool
    """Whether f(cx) = c f(x) for c > 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Neurons that are cut together from all layers that make, normalise or read them."""

    name: str
    """The first producer's."""
    width: int
    """How many neurons."""
    producers: tuple[Member, ...]
    through: tuple[Member, ...]
    """Norms over a channel, depth-wise convolutions."""
    consumers: tuple[Member, ...]
    activation: Activation | None = None
    """None where the way from a producer to a consumer is not a plain one: several producers (a
    residual connection, a gate), a depth-wise convolution, different ways to several consumers."""
    norm: str = ""
    """A batch norm between the producer and the activation; only beside an activation."""
    attributes: tuple[tuple[str, str, int], ...] = ()
    """(module, attribute, per neuron) of counts outside of the layers: `num_heads`."""

    @property
    def unit(self) -> int:
        """Channels a neuron has where it is made: 1, or the size of a head."""
        return int(self.producers[0].channels.shape[1])

    @property
    def members(self) -> tuple[Member, ...]:
        return self.producers + self.through + self.consumers


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A layer whose outputs are not pruned."""

    module: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PrunableGroups:
    """What can be pruned of a model, and what cannot."""

    groups: tuple[Group, ...]
    left_alone: tuple[LeftAlone, ...]


def removed(width: int, keep: Indices) -> Indices:
    """The neurons that are not in `keep`, ascending."""
    gone = np.ones(width, bool)
    gone[keep] = False
    return np.flatnonzero(gone).astype(np.int64)


def channels_gone(groups: Sequence[Group], keep: Mapping[str, Indices]) -> dict[str, Indices]:
    """Per side of a layer, by Member.key, the channels that go; ascending.

    Args:
        keep: per group the neurons that stay; groups that are not in it stay whole.
    """
    gone: dict[str, list[Indices]] = {}
    for group in groups:
        if group.name not in keep:
            continue
        away = removed(group.width, keep[group.name])
        if len(away):
            for member in group.members:
                gone.setdefault(member.key, []).append(member.channels[away].ravel())
    return {key: np.unique(np.concatenate(parts)) for key, parts in gone.items()}


def shrunk(groups: Sequence[Group], keep: Mapping[str, Indices]) -> tuple[Group, ...]:
    """The groups of the model after the cut, their channels counted anew."""
    gone = channels_gone(groups, keep)

    def member_after(member: Member, stay: Indices) -> Member:
        channels = member.channels[stay]
        if member.key in gone:
            channels = channels - np.searchsorted(gone[member.key], channels)
        return replace(member, channels=channels)

    after = []
    for group in groups:
        stay = keep.get(group.name, np.arange(group.width, dtype=np.int64))
        after.append(
            replace(
                group,
                width=len(stay),
                producers=tuple(member_after(m, stay) for m in group.producers),
                through=tuple(member_after(m, stay) for m in group.through),
                consumers=tuple(member_after(m, stay) for m in group.consumers),
            )
        )
    return tuple(after)
