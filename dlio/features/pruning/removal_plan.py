"""Choose the neurons to remove, and compensate for them: a pure function of arrays.

A neuron is removed for one of four reasons:

- `dead`, `constant`: its output hardly varies. Its mean moves into the bias of each consumer, or
  into the running mean of the batch norm behind that consumer.
- `twin`: its (w, b) is about c times that of another neuron, with c > 0 for activations with
  f(cx) = c f(x), and c = 1 otherwise. Consumers add c times its weights to the other neuron's.
- `unneeded`: the loss hardly changes without it, to first order. Its mean is compensated as above.

Each removal carries an upper bound of the change in the consumers' outputs.

- For twins the bound is relative: per unit of |(x, 1)|, the norm of the producer's input at one
  position (a patch for a convolution), extended by 1 for the bias. It is

      |out_i| |(w_i, b_i) - c (w_j, b_j)| L |(x, 1)|

  with L the Lipschitz constant of the activation and |out_i| the norm of the weights that read
  neuron i, summed over the taps of a kernel. With a batch norm, (w, b) includes its scale and shift
  in evaluation mode.
- For all others it is absolute: the Euclidean norm over an output's channels, valid while the
  neuron stays within the range observed by the statistics.

Bounds are cumulative: each one assumes that the removals before it have been done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.pruning.input_statistics import Statistics
from dlio.features.pruning.neuron_groups import GroupMember, Indices, JsonRecord, NeuronGroup

# Pairs of neurons with proportional weights, by blocks of cosine similarities
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Twin:
    """A pair of neurons: `scale` times neuron `twin` approximates neuron `of`."""

    of: int
    twin: int
    scale: float
    distance: float
    """Euclidean norm of (w_of, b_of) - scale (w_twin, b_twin)."""


def find_twins(
    vectors: Array,
    order: npt.NDArray[np.int64],
    scales: bool,
    tolerance: float,
    block: int = 256,
) -> list[Twin]:
    """Return a twin for each neuron that another one can replace.

    Greedy and deterministic: each neuron, in `order`, the most important first, is compared with
    the earlier ones that stay. If the nearest is within `tolerance`, relative to the norm of the
    neuron's own vector, the pair becomes a Twin; otherwise the neuron stays. A neuron that replaces
    another therefore always stays itself.

    `vectors` are (w, b) of each neuron, shape (neurons, k). With `scales`, any positive factor is
    allowed between two neurons; otherwise it is 1.

    Memory: a float32 copy of `vectors`, and `block` x neurons similarities.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    order = order[lengths[order] > 0]
    if len(order) < 2:
        return []
    units = (vectors / np.maximum(lengths, 1e-300)[:, None]).astype(np.float32)
    stays: list[int] = []
    kept = np.zeros((0, vectors.shape[1]), np.float32)
    twins: list[Twin] = []
    for start in range(0, len(order), block):
        some = order[start : start + block]
        cosines = units[some] @ np.concatenate([kept, units[some]]).T
        older = len(stays)
        ids = np.concatenate([np.array(stays, np.int64), some])
        allowed = np.zeros(len(ids), bool)
        allowed[:older] = True
        for at, neuron in enumerate(some):
            twin = None
            if allowed.any():
                distances = _distances(cosines[at], lengths[neuron], lengths[ids], scales)
                distances[~allowed] = np.inf
                twin = _exact(vectors, int(neuron), int(ids[int(distances.argmin())]), scales)
            if twin is not None and twin.distance <= tolerance * lengths[neuron]:
                twins.append(twin)
            else:
                allowed[older + at] = True
        fresh = ids[older:][allowed[older:]]
        stays += fresh.tolist()
        kept = np.concatenate([kept, units[fresh]])
    return twins


def _distances(cosines: npt.NDArray[np.float32], own: float, others: Array, scales: bool) -> Array:
    """Approximate distances, good enough to choose the nearest neuron."""
    wide = cosines.astype(np.float64)
    if scales:
        sines: Array = np.sqrt(np.maximum(0.0, 1.0 - wide**2))
        return np.where(wide > 0, sines, np.inf)
    squares: Array = own**2 + others**2 - 2 * own * others * wide
    return squares


def _exact(vectors: Array, neuron: int, twin: int, scales: bool) -> Twin | None:
    """Compute scale and distance in double precision; None if the scale is not positive."""
    mine, other = vectors[neuron], vectors[twin]
    scale = float(mine @ other / (other @ other)) if scales else 1.0
    if scale <= 0:
        return None
    return Twin(neuron, twin, scale, float(np.linalg.norm(mine - scale * other)))


# Removal plans
Weights = Mapping[str, npt.NDArray[np.floating]]
"""Arrays by their names in the state dict, and the `eps` of each batch norm."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one round may remove. Raises UsageError for values out of range."""

    constant: float = 0.01
    """Largest change by a dead or constant neuron, relative to the root mean square of the
    consumer's weighted sums."""
    twin: float = 0.05
    """Largest |(w_i, b_i) - c (w_j, b_j)| of twins, relative to |(w_i, b_i)|."""
    loss: float = 1e-3
    """Largest change of the loss, to first order, by all unneeded neurons of a group together."""
    share: float = 0.5
    """Largest share of a group's neurons to remove; groups too narrow for it may lose as many
    neurons as `multiple` requires."""
    multiple: int = 8
    """Round the remaining width, in channels, up to a multiple of this."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Fewest neurons to keep when removing unneeded ones, by group name."""
    frozen: frozenset[str] = frozenset()
    """Names of groups to leave alone."""

    def __post_init__(self) -> None:
        check_least(self, 0, "constant", "twin", "loss")
        if not 0 <= self.share <= 1:
            raise UsageError(f"Limits(share={self.share}): choose a fraction from 0 to 1")
        check_least(self, 1, "multiple")


def check_least(settings: object, least: int, *names: str) -> None:
    """Raise UsageError if one of these settings is less than `least`, or NaN."""
    for name in names:
        value = getattr(settings, name)
        if not value >= least:
            kind = type(settings).__name__
            raise UsageError(f"{kind}({name}={value}): choose {least} or more")


@dataclass(frozen=True, slots=True)
class Removal:
    """One neuron to remove."""

    group: str
    neuron: int
    kind: str
    """`dead`, `constant`, `twin` or `unneeded`."""
    bound: float
    """Upper bound of the change of a consumer's output; the module's docstring gives the unit."""
    cost: float
    """Share of its limit that this removal uses, 0 to 1; the cheapest are removed first."""
    twin: int = -1
    """Neuron that replaces it; -1 for other kinds than `twin`."""
    scale: float = 0.0
    """Factor c of a twin."""


@dataclass(frozen=True, slots=True, eq=False)
class RemovalPlan:
    """The instructions for `apply`. Neurons are numbered as in the groups before the cut."""

    keep: dict[str, Indices] = field(default_factory=dict)
    """The neurons that stay, ascending, for each group that shrinks."""
    removals: tuple[Removal, ...] = ()
    shifts: dict[str, Array] = field(default_factory=dict)
    """Amounts to add to biases and running means, by name in the state dict; shape (width before
    the cut,)."""

    def to_json(self) -> JsonRecord:
        """Convert to JSON types, for messages and reports."""
        return {
            "keep": {name: keep.tolist() for name, keep in self.keep.items()},
            "removals": [asdict(removal) for removal in self.removals],
            "shifts": {name: shift.tolist() for name, shift in self.shifts.items()},
        }

    @staticmethod
    def from_json(record: JsonRecord) -> "RemovalPlan":
        """Rebuild the plan that `to_json` converted."""
        return RemovalPlan(
            {name: np.array(keep, np.int64) for name, keep in record["keep"].items()},
            tuple(Removal(**removal) for removal in record["removals"]),
            {name: np.array(shift, np.float64) for name, shift in record["shifts"].items()},
        )


def weights_of(
    model: nn.Module, groups: Sequence[NeuronGroup]
) -> dict[str, npt.NDArray[np.floating]]:
    """Copy the arrays that `plan_removals` reads from a model."""
    arrays: dict[str, npt.NDArray[np.floating]] = {}

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
    groups: Sequence[NeuronGroup], weights: Weights, statistics: Statistics, limits: Limits
) -> RemovalPlan:
    """Plan the removals of one round. Equal arguments give equal plans on all ranks."""
    now = {name: array.astype(np.float64) for name, array in weights.items()}
    keep: dict[str, Indices] = {}
    removals: list[Removal] = []
    shifts: dict[str, Array] = {}
    for group in groups:
        if group.name in limits.frozen:
            continue
        consumers = [_Consumer(member, now, statistics) for member in group.consumers]
        chosen = _chosen(group, _candidates(group, now, consumers, limits), limits)
        if not chosen:
            continue
        gone = {removal.neuron for removal in chosen}
        keep[group.name] = np.array([n for n in range(group.width) if n not in gone], np.int64)
        removals += chosen
        for consumer in consumers:
            name = consumer.member.constant
            shift = consumer.compensate(chosen, now)
            if name and shift.any():
                sign = -1.0 if name.endswith(".running_mean") else 1.0
                shifts[name] = shifts.get(name, 0.0) + sign * shift
                now[name] = now[name] + sign * shift
    return RemovalPlan(keep, tuple(removals), shifts)


class _Consumer:
    """A layer that reads a group's neurons, with the statistics of its inputs."""

    def __init__(self, member: GroupMember, weights: Weights, statistics: Statistics) -> None:
        self.member = member
        weight = np.moveaxis(weights[member.weight], member.dim, 0)
        self._weight = weight.reshape(*weight.shape[:2], -1)  # (channels, outputs, taps)
        channels = member.channels
        moments = statistics.moments[member.module]
        peaks = (moments.high[channels], moments.low[channels])
        self.seen = moments.count > 0 and bool(np.isfinite(peaks).all())
        """True if there are finite statistics of the inputs."""
        self.scored = moments.steps > 0
        """True if there are statistics of the gradients."""
        norms = np.sqrt(np.einsum("cot,cot->ct", self._weight, self._weight)).sum(1)[channels]
        self.norm: Array = norms.sum(1)
        """Norm of the weights that read each neuron; shape (width,)."""
        self.rms: Array = (norms * moments.rms[channels]).sum(1)
        """Root mean square of each neuron's contribution to the outputs; shape (width,)."""
        self.loss: Array = moments.loss[channels].sum(1)
        """First-order change of the loss without each neuron; shape (width,)."""
        self.dead: Array = moments.dead[channels].min(1)
        """Share of exact zeros among each neuron's outputs; shape (width,)."""
        self.means = moments.mean if member.constant else np.zeros_like(moments.mean)
        means = self.means[channels]
        if self.seen:
            spread = np.maximum(moments.high[channels] - means, means - moments.low[channels])
            if member.padded:
                # At a border, the compensating constant is added although the neuron reads as 0.
                spread = np.maximum(spread, np.abs(means))
            self.change: Array = (norms * np.maximum(spread, 0.0)).sum(1)
            """Upper bound of the change of the output if a neuron becomes its mean."""
        else:
            self.change = np.full(len(channels), np.inf)
        signal = float(np.sqrt(((norms * moments.rms[channels]) ** 2).sum()))
        self.relative: Array = self.change / signal if signal > 0 else np.zeros(len(channels))
        """`change` relative to the root mean square of the outputs; shape (width,)."""

    def compensate(self, chosen: Sequence[Removal], now: dict[str, Array]) -> Array:
        """Move weights of removed twins in `now`; return the constant that replaces the others."""
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
    group: NeuronGroup, weights: Weights, consumers: Sequence[_Consumer], limits: Limits
) -> dict[int, Removal]:
    """Removals within the limits, by neuron; the first reason that applies to a neuron counts."""
    candidates: dict[int, Removal] = {}
    change = np.max([consumer.change for consumer in consumers], axis=0)
    if all(consumer.seen for consumer in consumers):
        relative = np.max([consumer.relative for consumer in consumers], axis=0)
        dead = np.min([consumer.dead for consumer in consumers], axis=0) >= 1.0
        for n in np.flatnonzero(relative <= limits.constant).tolist():
            kind = "dead" if dead[n] else "constant"
            cost = float(relative[n]) / limits.constant if limits.constant else 0.0
            candidates[n] = Removal(group.name, n, kind, float(change[n]), cost)
    taken = set(candidates)
    for twin in _twins(group, weights, consumers, limits, taken):
        candidates[twin.neuron] = twin
        taken |= {twin.neuron, twin.twin}
    if all(consumer.seen and consumer.scored for consumer in consumers):
        loss = np.sum([consumer.loss for consumer in consumers], axis=0)
        total, least = 0.0, limits.least.get(group.name, 1)
        for n in np.argsort(loss, kind="stable").tolist():
            if n in taken:
                continue
            total += float(loss[n])
            if total > limits.loss or group.width - len(candidates) <= least:
                break
            cost = total / limits.loss if limits.loss else 0.0
            candidates[n] = Removal(group.name, n, "unneeded", float(change[n]), cost)
    return candidates


def _twins(
    group: NeuronGroup,
    weights: Weights,
    consumers: Sequence[_Consumer],
    limits: Limits,
    taken: set[int],
) -> list[Removal]:
    vectors = _vectors(group, weights)
    if vectors is None or group.activation is None:
        return []
    norm = np.max([consumer.norm for consumer in consumers], axis=0)
    importance = norm
    if all(consumer.seen for consumer in consumers):
        importance = np.max([consumer.rms for consumer in consumers], axis=0)
    order = np.argsort(-importance, kind="stable")
    order = order[[n not in taken for n in order.tolist()]]
    slope = group.activation.lipschitz
    lengths = np.linalg.norm(vectors, axis=1)
    removals: list[Removal] = []
    for twin in find_twins(vectors, order, group.activation.scales, limits.twin):
        bound = float(norm[twin.of]) * twin.distance
        if bound > 0 and not np.isfinite(slope):
            continue
        bound = bound * slope if bound > 0 else 0.0
        allowed = limits.twin * float(lengths[twin.of])
        cost = twin.distance / allowed if allowed else 0.0
        removals.append(Removal(group.name, twin.of, "twin", bound, cost, twin.twin, twin.scale))
    return removals


def _vectors(group: NeuronGroup, weights: Weights) -> Array | None:
    """(w, b) of each neuron before its activation; None if that is not one plain sum."""
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


def _chosen(group: NeuronGroup, candidates: dict[int, Removal], limits: Limits) -> list[Removal]:
    """The cheapest candidates, as many as the share and the multiple allow, by neuron."""
    each = limits.multiple // gcd(limits.multiple, group.unit)
    share = int(limits.share * group.width)
    if limits.share > 0:
        # A narrow group shrinks to the next multiple, or never.
        share = max(share, (group.width - 1) % each + 1)
    many = min(len(candidates), share, group.width - 1)
    width = -(-(group.width - many) // each) * each
    many = max(0, group.width - width)
    order = sorted(candidates.values(), key=lambda removal: (removal.cost, removal.neuron))
    return sorted(order[:many], key=lambda removal: removal.neuron)
