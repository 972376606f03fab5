"""Which neurons go, and what makes up for them: a pure function of arrays.

Four kinds of neurons go:

- `dead`, `constant`: what the next layers read of them hardly moves. Their mean goes into the next
  layers' bias, or into the running mean of the batch norm behind those.
- `twin`: (w, b) is c times another neuron's, c > 0 for activations with f(cx) = c f(x), else c = 1.
  The next layers read c times more of the other one.
- `unneeded`: the loss hardly changes without them, to first order. Their mean is kept as above.

Each removal carries a bound of what it changes in the outputs of the next layers. For all but
twins it is an absolute one, of the euclidean norm over an output's channels, for neurons that stay
within what was seen of them. For twins it is per unit of |(x, 1)|, the norm of the producer's input
at one place (a convolution's patch) with a 1 for the bias:

    |out_i| |(w_i, b_i) - c (w_j, b_j)| L |(x, 1)|

with L the activation's Lipschitz constant and |out_i| the norm of the weights that read neuron i,
summed over a kernel's taps. Behind a batch norm (w, b) is what it makes of them in evaluation.
Bounds hold one after another: each is computed with the removals before it done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.pruning.groups import Group, Indices, Member
from dlio.train.pruning.similar import find_twins
from dlio.train.pruning.statistics import Statistics

Array = npt.NDArray[np.float64]
Weights = Mapping[str, npt.NDArray[Any]]
"""By name in the state dict; for a batch norm its `eps`, too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may go in one round. Raises UsageError for what is none."""

    constant: float = 0.01
    """What a dead or constant neuron may change at most, as a part of the root of the mean square
    of what the next layer sums up."""
    twin: float = 0.05
    """|(w_i, b_i) - c (w_j, b_j)| as a part of |(w_i, b_i)|."""
    loss: float = 1e-3
    """By how much the loss may change, to first order, by all unneeded neurons of a group."""
    share: float = 0.5
    """Of a group's neurons; a multiple of them, where that is more."""
    multiple: int = 8
    """That widths, in channels, are rounded up to."""
    least: Mapping[str, int] = field(default_factory=dict)
    """By group, neurons that stay, however little the loss seems to need them."""
    frozen: frozenset[str] = frozenset()
    """Names of groups that stay as they are."""

    def __post_init__(self) -> None:
        for name in ("constant", "twin", "loss"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"Limits({name}={getattr(self, name)}): choose 0 or more")
        if not 0 <= self.share <= 1:
            raise UsageError(f"Limits(share={self.share}): choose a part, 0 to 1")
        if self.multiple < 1:
            raise UsageError(f"Limits(multiple={self.multiple}): choose 1 or more")


@dataclass(frozen=True, slots=True)
class Removal:
    """One neuron that goes."""

    group: str
    neuron: int
    kind: str
    bound: float
    """Of the change of any next layer's output; see the module's text for its unit."""
    cost: float
    """What it takes of its limit, 0 to 1: the cheapest go first."""
    twin: int = -1
    scale: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RemovalPlan:
    """What `apply` does. The neurons are numbered as the groups have them before it."""

    keep: dict[str, Indices] = field(default_factory=dict)
    """Per group that shrinks, the neurons that stay; ascending."""
    removals: tuple[Removal, ...] = ()
    shifts: dict[str, Array] = field(default_factory=dict)
    """What to add to biases and running means, by name in the state dict; of the width before."""

    def to_json(self) -> dict[str, Any]:
        """For a message or a report."""
        return {
            "keep": {name: keep.tolist() for name, keep in self.keep.items()},
            "removals": [asdict(removal) for removal in self.removals],
            "shifts": {name: shift.tolist() for name, shift in self.shifts.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "RemovalPlan":
        return RemovalPlan(
            {name: np.array(keep, np.int64) for name, keep in data["keep"].items()},
            tuple(Removal(**removal) for removal in data["removals"]),
            {name: np.array(shift, np.float64) for name, shift in data["shifts"].items()},
        )


def weights_of(model: nn.Module, groups: Sequence[Group]) -> dict[str, npt.NDArray[Any]]:
    """The arrays that plan() reads, copied from a model."""
    arrays: dict[str, npt.NDArray[Any]] = {}

    def take(name: str) -> None:
        layer, _, tensor = name.rpartition(".")
        value = getattr(model.get_submodule(layer), tensor, None)
        if isinstance(value, torch.Tensor) and name not in arrays:
            arrays[name] = value.detach().to("cpu", torch.float32, copy=True).numpy()

    for group in groups:
        for member in group.producers + group.consumers:
            take(f"{member.module}.weight")
            take(f"{member.module}.bias")
            if member.constant:
                take(member.constant)
        if group.norm:
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                take(f"{group.norm}.{tensor}")
            eps = model.get_submodule(group.norm).eps
            arrays[f"{group.norm}.eps"] = np.array(eps, np.float64)
    return arrays


def plan_removals(
    groups: Sequence[Group], weights: Weights, statistics: Statistics, limits: Limits
) -> RemovalPlan:
    """What goes in this round. The same arguments give the same plan, on any rank."""
    now = {name: array.astype(np.float64) for name, array in weights.items()}
    keep: dict[str, Indices] = {}
    removals: list[Removal] = []
    shifts: dict[str, Array] = {}
    for group in groups:
        if group.name in limits.frozen:
            continue
        readers = [_Reader(member, now, statistics) for member in group.consumers]
        chosen = _chosen(group, _candidates(group, now, readers, limits), limits)
        if not chosen:
            continue
        away = {removal.neuron for removal in chosen}
        keep[group.name] = np.array([n for n in range(group.width) if n not in away], np.int64)
        removals += chosen
        for reader in readers:
            name = reader.member.constant
            shift = reader.make_up(chosen, now)
            if name and shift.any():
                sign = -1.0 if name.endswith(".running_mean") else 1.0
                shifts[name] = shifts.get(name, 0.0) + sign * shift
                now[name] = now[name] + sign * shift
    return RemovalPlan(keep, tuple(removals), shifts)


class _Reader:
    """One layer that reads a group's neurons."""

    def __init__(self, member: Member, weights: Weights, statistics: Statistics) -> None:
        self.member = member
        weight = np.moveaxis(weights[member.weight], member.dim, 0)
        self._weight = weight.reshape(*weight.shape[:2], -1)  # (channels, outputs, taps)
        channels = member.channels
        moments = statistics.moments[member.module]
        peaks = (moments.high[channels], moments.low[channels])
        self.seen = moments.count > 0 and bool(np.isfinite(peaks).all())
        self.scored = moments.steps > 0
        norms = np.sqrt(np.einsum("cot,cot->ct", self._weight, self._weight)).sum(1)[channels]
        self.norm: Array = norms.sum(1)
        """Per neuron, of the weights that read it."""
        self.rms: Array = (norms * moments.rms[channels]).sum(1)
        self.loss: Array = moments.loss[channels].sum(1)
        self.dead: Array = moments.dead[channels].min(1)
        self.means = moments.mean if member.constant else np.zeros_like(moments.mean)
        means = self.means[channels]
        if self.seen:
            away = np.maximum(moments.high[channels] - means, means - moments.low[channels])
            if member.padded:
                # At a border the constant is added, and the neuron is not.
                away = np.maximum(away, np.abs(means))
            self.moves: Array = (norms * np.maximum(away, 0.0)).sum(1)
        else:
            self.moves = np.full(len(channels), np.inf)
        signal = float(np.sqrt(((norms * moments.rms[channels]) ** 2).sum()))
        self.relative: Array = self.moves / signal if signal > 0 else np.zeros(len(channels))

    def make_up(self, chosen: Sequence[Removal], now: dict[str, Array]) -> Array:
        """The constant that stands in for neurons that go; their weights go to their twins."""
        member, weight = self.member, self._weight
        constant = [removal.neuron for removal in chosen if removal.twin < 0]
        channels = member.channels[constant].ravel()
        shift: Array = np.einsum("cot,c->o", weight[channels], self.means[channels])
        after = np.moveaxis(now[member.weight].copy(), member.dim, 0)
        for removal in chosen:
            mine = member.channels[removal.neuron]
            if removal.twin >= 0:
                after[member.channels[removal.twin]] += removal.scale * after[mine]
            after[mine] = 0
        now[member.weight] = np.moveaxis(after, 0, member.dim)
        return shift


def _candidates(
    group: Group, weights: Weights, readers: Sequence[_Reader], limits: Limits
) -> dict[int, Removal]:
    """By neuron, what may go, each by the first of the ways that suits it."""
    found: dict[int, Removal] = {}
    seen = all(reader.seen for reader in readers)
    moves = np.max([reader.moves for reader in readers], axis=0)
    if seen:
        relative = np.max([reader.relative for reader in readers], axis=0)
        dead = np.min([reader.dead for reader in readers], axis=0) >= 1.0
        for n in np.flatnonzero(relative <= limits.constant).tolist():
            kind = "dead" if dead[n] else "constant"
            cost = float(relative[n]) / limits.constant if limits.constant else 0.0
            found[n] = Removal(group.name, n, kind, float(moves[n]), cost)
    taken = set(found)
    vectors = _vectors(group, weights)
    if vectors is not None and group.activation is not None:
        norm = np.max([reader.norm for reader in readers], axis=0)
        matter = np.max([reader.rms for reader in readers], axis=0) if seen else norm
        order = np.argsort(-matter, kind="stable")
        order = order[[n not in found for n in order.tolist()]]
        slope = group.activation.lipschitz
        lengths = np.linalg.norm(vectors, axis=1)
        for twin in find_twins(vectors, order, group.activation.scales, limits.twin):
            bound = float(norm[twin.of]) * twin.distance
            if bound > 0 and not np.isfinite(slope):
                continue
            bound = bound * slope if bound > 0 else 0.0
            allowed = limits.twin * float(lengths[twin.of])
            cost = twin.distance / allowed if allowed else 0.0
            found[twin.of] = Removal(
                group.name, twin.of, "twin", bound, cost, twin.twin, twin.scale
            )
            taken |= {twin.of, twin.twin}
    if seen and all(reader.scored for reader in readers):
        loss = np.sum([reader.loss for reader in readers], axis=0)
        total, least = 0.0, limits.least.get(group.name, 1)
        for n in np.argsort(loss, kind="stable").tolist():
            if n in taken:
                continue
            total += float(loss[n])
            if total > limits.loss or group.width - len(found) <= least:
                break
            cost = total / limits.loss if limits.loss else 0.0
            found[n] = Removal(group.name, n, "unneeded", float(moves[n]), cost)
    return found


def _vectors(group: Group, weights: Weights) -> Array | None:
    """(w, b) of each neuron as its activation sees it; None where that is not one plain sum."""
    if group.activation is None or group.unit != 1:
        return None
    member = group.producers[0]
    weight = np.moveaxis(weights[member.weight], member.dim, 0)
    weight = weight.reshape(len(weight), -1)
    bias = weights.get(f"{member.module}.bias")
    bias = np.zeros(len(weight)) if bias is None else bias
    if group.norm:
        if f"{group.norm}.running_var" not in weights:
            return None
        spread = np.sqrt(weights[f"{group.norm}.running_var"] + weights[f"{group.norm}.eps"])
        gain = weights.get(f"{group.norm}.weight", np.ones(len(weight))) / spread
        offset = weights.get(f"{group.norm}.bias", np.zeros(len(weight)))
        weight = weight * gain[:, None]
        bias = (bias - weights[f"{group.norm}.running_mean"]) * gain + offset
    vectors: Array = np.concatenate([weight, bias[:, None]], axis=1)
    return vectors[member.channels[:, 0]]


def _chosen(group: Group, found: dict[int, Removal], limits: Limits) -> list[Removal]:
    """The cheapest, as many as the limits and whole multiples allow, by neuron."""
    each = limits.multiple // gcd(limits.multiple, group.unit)
    share = int(limits.share * group.width)
    if limits.share > 0:
        # A narrow group shrinks by a multiple, or never.
        share = max(share, (group.width - 1) % each + 1)
    many = min(len(found), share, group.width - 1)
    width = -(-(group.width - many) // each) * each
    many = max(0, group.width - width)
    order = sorted(found.values(), key=lambda removal: (removal.cost, removal.neuron))
    return sorted(order[:many], key=lambda removal: removal.neuron)
