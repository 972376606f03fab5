"""The time of a training step on p ranks, from measured steps of one and two ranks. Pure.

A step computes, then exchanges: T(p) = C(p) + X(p).

Computing: ranks that share cores compute in turn, so C(p) = C(1) times `busy` times p / cores,
where `busy` is the measured slow-down of two ranks that keep two cores busy. Cores are not equally
fast, and ranks that share them move from one to another: their slow-down is the mean of both ranks.
They also evict each other's data from a core's caches, by which C(p) grows once more: as measured
with two ranks on one core. Where each rank has a core of its own, all wait for the slowest one.

Exchange: the measured rest of a step of two ranks, X(2), has two components. Messages cost what
`dlio.plan.exchange_cost` says of the measured link, M(2). What X(2) has beyond that is work of each
rank on its own (copies into and out of buckets, an outer optimizer), which does not depend on p.
What it has less is hidden behind backward, by the same share for all p. A rank that shares its core
also waits until those that it hears from have had their turn: for these X(2) is measured with both
ranks on one core. Asynchronous SGD waits for nobody, so it is forecast from ranks with a core each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlio.exchange.exchange_spec import parse_exchange
from dlio.plan.exchange_cost import FORMULAE, ExchangeLoad, LinkCost, counts, seconds

_NEVER_WAITS = frozenset({"asgd"})
"""Presets whose ranks take what has arrived and wait for nobody."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cores and links of the ranks."""

    link: LinkCost
    """Link between nodes; of one node, between its ranks."""
    inside: LinkCost | None = None
    """Link within a node; None for `link`."""
    per_node: int = 1
    """Ranks of a node."""
    cores: int | None = None
    """Cores that all ranks share; None if each rank has its own."""

    def sharing(self, ranks: int) -> float:
        """Ranks per core, at least 1."""
        return 1.0 if self.cores is None else max(1.0, ranks / self.cores)


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Measured steps of one and two ranks, in seconds."""

    alone: Mapping[int, float]
    """A step of one rank by batch size, without exchange."""
    busy: float
    """Slow-down of a step without exchange when two ranks compute on two cores, at least 1: of the
    slowest rank."""
    exchanged: Mapping[str, float]
    """By exchange, what it adds to a step of two ranks: X(2), per step."""
    shared: float | None = None
    """The same slow-down as the mean of both ranks; None for that of the slowest."""
    crowding: Mapping[int, float] = field(default_factory=dict)
    """By batch size, how many times as long as in turns the steps of two ranks take that share a
    core, at least 1; empty if that was not measured."""
    crowded: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """By exchange and batch size, seconds that it adds to a step of two ranks that share a core;
    empty if that was not measured."""


def compute_seconds(steps: StepTimings, batch_size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds to compute a step of `batch_size` samples a rank.

    Between measured batch sizes the time is interpolated linearly; beyond them it is that of the
    line through the two nearest.
    """
    sizes = sorted(steps.alone)
    alone = steps.alone[sizes[0]] * batch_size / sizes[0]
    if len(sizes) > 1:
        above = next((k for k, size in enumerate(sizes) if size >= batch_size), len(sizes) - 1)
        high = max(1, above)
        a, b = sizes[high - 1], sizes[high]
        slope = (steps.alone[b] - steps.alone[a]) / (b - a)
        alone = max(0.0, steps.alone[a] + slope * (batch_size - a))
    sharing = cluster.sharing(ranks)
    if ranks == 1:
        return alone
    if sharing == 1:
        return alone * steps.busy
    busy = steps.busy if steps.shared is None else steps.shared
    nearest = min(steps.crowding, key=lambda size: abs(size - batch_size), default=None)
    return alone * busy * sharing * (1.0 if nearest is None else steps.crowding[nearest])


def message_seconds(
    preset: str, period: int, ranks: int, work: ExchangeLoad, cluster: Cluster
) -> float:
    """Seconds per step that the messages of an exchange take, none hidden.

    The larger of two bounds: the busiest rank's messages, one after another, and the work of all
    messages over the cores that move them. A period has the steps from one exchange to the next.
    """
    if ranks == 1:
        return 0.0
    inside = cluster.inside or cluster.link
    one_node = ranks <= cluster.per_node
    link = inside if one_node else cluster.link
    each_time = {"local-sgd": "allreduce", "diloco": "allreduce", "noloco": "gossip"}
    preset = each_time.get(preset, preset)
    busiest = seconds(preset, ranks, work, link, inside) / period
    if cluster.cores is None:
        return busiest
    sent = counts(preset, ranks, work)
    # Weights are merged wherever they arrive; of sums, half of what arrives is only stored.
    added = 1.0 if preset in ("gossip", "asgd") else 0.5
    each = sent.messages * link.alpha_s + sent.size * (link.beta_s + added * link.gamma_s)
    return max(busiest, ranks * each / period / min(ranks, cluster.cores))


def exchange_seconds(
    steps: StepTimings,
    exchange: str,
    ranks: int,
    batch_size: int,
    works: tuple[ExchangeLoad, ExchangeLoad],
    cluster: Cluster,
) -> float:
    """Seconds that an exchange of `steps.exchanged` adds to a step on `ranks` ranks: X(p).

    `works` are of two ranks, and of the ranks to forecast; the cluster is that of the latter. Two
    ranks were measured with a core each, on one node; where ranks share cores and wait for each
    other, also with one core for both.
    """
    if ranks == 1:
        return 0.0
    inside, sharing = cluster.inside or cluster.link, cluster.sharing(ranks)
    spec = parse_exchange(exchange)
    waits = sharing > 1 and spec.preset not in _NEVER_WAITS
    crowded = steps.crowded.get((exchange, batch_size)) if waits else None
    measured = max(0.0, steps.exchanged[exchange] if crowded is None else crowded)
    two = Cluster(inside, per_node=2, cores=2 if crowded is None else 1)
    name = exchange if exchange in FORMULAE else spec.preset
    there = message_seconds(name, spec.period, 2, works[0], two)
    then = message_seconds(name, spec.period, ranks, works[1], cluster)
    own = max(0.0, measured - there)
    visible = min(1.0, measured / there) if there > 0 else 1.0
    return own * sharing / two.sharing(2) + visible * then
