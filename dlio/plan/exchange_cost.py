"""Messages, bytes and seconds of an exchange on p ranks: the alpha-beta model. Pure.

A message of n bytes takes a + n b seconds (alpha and beta); adding n received bytes to local ones
takes n g (gamma). A rank sends and receives at the same time, one message each way at a time
(Hockney, 1994). The formulae of the allreduce are those of Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), section 3. Gradients travel
in buckets whose messages follow each other, so the busiest rank determines the time. No
communication is hidden behind computation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from dlio.plan.sum_grid import most_messages


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of messages between two ranks or nodes."""

    alpha_s: float
    """Latency in seconds per message."""
    beta_s: float
    """Seconds per byte: the inverse of the bandwidth."""
    gamma_s: float = 0.0
    """Seconds to add one received byte to a local one."""

    def message(self, size: float) -> float:
        """Seconds of a message of `size` bytes."""
        return self.alpha_s + size * self.beta_s

    def added(self, size: float) -> float:
        """Seconds of a message of `size` bytes, and of adding it to local values."""
        return self.message(size) + size * self.gamma_s


@dataclass(frozen=True, slots=True)
class ExchangeLoad:
    """The parameters to exchange."""

    size: float
    """Size of all parameters in bytes."""
    buckets: int = 1
    per_node: int = 1
    """Ranks per node."""


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """Messages and bytes that a rank sends per exchange, as means over ranks."""

    messages: float
    size: float
    most_size: float
    """Bytes of the rank that sends most."""


def ring(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """2 (p - 1) messages of a p-th: 2 (p - 1) a + 2 (p - 1)/p n b + (p - 1)/p n g."""
    share = (p - 1) / p * work.size
    hops = 2 * (p - 1) * work.buckets
    return hops * link.alpha_s + 2 * share * link.beta_s + share * link.gamma_s


def halving(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """Rabenseifner's algorithm: reduce-scatter by halving, then allgather by doubling.

    Latency 2 log2 p a; bytes as in a ring. Unless p is a power of two, each surplus rank first
    sends its values to another rank and finally receives the sum from it: 2 (a + n b) more.
    """
    whole = 1 << (p.bit_length() - 1)
    share = (whole - 1) / whole * work.size
    hops = 2 * round(math.log2(whole)) * work.buckets
    seconds = hops * link.alpha_s + 2 * share * link.beta_s + share * link.gamma_s
    if p > whole:
        seconds += 2 * work.buckets * link.alpha_s
        seconds += work.size * (2 * link.beta_s + link.gamma_s)
    return seconds


def allreduce(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """The faster of `ring` and `halving`, as libraries choose; zero on one rank."""
    return 0.0 if p == 1 else min(ring(p, work, link), halving(p, work, link))


def binomial(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """A binomial tree, up and down: 2 log2 p (a + n b) + log2 p n g.

    The root receives whole buckets from ceil(log2 p) ranks and sends to as many.
    """
    return _bucketwise(work, math.ceil(math.log2(p)), link)


def star(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """A parameter server receives from p - 1 ranks and sends to p - 1: 2 (p - 1) (a + n b)."""
    return _bucketwise(work, p - 1, link)


def _bucketwise(work: ExchangeLoad, peers: int, link: LinkCost) -> float:
    each = work.size / work.buckets
    return work.buckets * peers * (link.added(each) + link.message(each))


def hierarchical(
    p: int, work: ExchangeLoad, link: LinkCost, inside: LinkCost | None = None
) -> float:
    """Reduce to each node's first rank, recursive doubling among these, and back; `inside` a node
    the link may be another.
    """
    local = min(work.per_node, p)
    nodes = -(-p // local)
    each = work.size / work.buckets
    within = star(local, work, inside or link)
    return within + work.buckets * math.ceil(math.log2(nodes)) * link.added(each)


def gossip(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """Send weights to one rank while receiving from another: a + n b + n g."""
    return 0.0 if p == 1 else work.buckets * link.added(work.size / work.buckets)


def asgd(p: int, work: ExchangeLoad, link: LinkCost) -> float:
    """Send a notice and the weights to one rank, at most once per step: 2 a + n b + n g."""
    return 0.0 if p == 1 else link.alpha_s + link.added(work.size)


def compressed(bits: float) -> "Formula":
    """Return the formula for an allreduce of compressed float32, of `bits` an entry, along a grid
    of the ranks: O(log p) messages (`sum_grid`), bytes as in a ring. Without compressing.
    """

    def formula(p: int, work: ExchangeLoad, link: LinkCost) -> float:
        share = (p - 1) / p * work.size * bits / 32
        sent = _grid_messages(p) * work.buckets * link.alpha_s
        return sent + share * (2 * link.beta_s + link.gamma_s)

    return formula


def _grid_messages(p: int) -> int:
    # Two ranks exchange one message; all others send shares, and sums on the same ways.
    return 1 if p == 2 else most_messages(p)


def every(steps: int, exchange: "Formula") -> "Formula":
    """Return the formula for an exchange that runs once in `steps` steps, in seconds per step."""
    return lambda p, work, link: exchange(p, work, link) / steps


Formula = Callable[[int, ExchangeLoad, LinkCost], float]
_BITS: Final = {
    "bf16": 16.0,
    "fp16": 16.0,
    "int8": 8.03,
    "ternary": 1.6,
    "onebit": 1.02,
    "threshold": 0.27,
    "adaptive": 0.27,
}
"""Bits that compressors send for an entry; see `dlio.exchange.compress`."""
FORMULAE: Final[dict[str, Formula]] = {
    "allreduce": allreduce,
    "hierarchical": hierarchical,
    "tree": binomial,
    "parameter-server": star,
    "gossip": gossip,
    "asgd": asgd,
    "local-sgd": every(8, allreduce),
    "diloco": every(32, allreduce),
    "noloco": every(32, gossip),
    **{f"allreduce+{name}": compressed(bits) for name, bits in _BITS.items()},
}
"""Seconds of a step's exchange by name, with the presets' default periods."""


def seconds(
    preset: str, p: int, work: ExchangeLoad, link: LinkCost, inside: LinkCost | None = None
) -> float:
    """Seconds of a step's exchange on p ranks; zero on one rank."""
    if p == 1:
        return 0.0
    if preset == "hierarchical":
        return hierarchical(p, work, link, inside)
    return FORMULAE[preset](p, work, link)


def shared(link: LinkCost, ranks: int, cores: int) -> LinkCost:
    """Return the link as seen by ranks that share cores, which then move bytes in turn."""
    factor = max(1.0, ranks / cores)
    return replace(link, beta_s=link.beta_s * factor, gamma_s=link.gamma_s * factor)


def counts(preset: str, p: int, work: ExchangeLoad) -> MessageCounts:
    """Messages and bytes of a step's exchange.

    Bytes of an allreduce are those of a ring, which is the minimum (Patarasuk and Yuan, 2009); its
    messages are those of `halving`, 2 log2 p per bucket, or if compressed those of `sum_grid`.
    """
    if p == 1:
        return MessageCounts(0.0, 0.0, 0.0)
    size, buckets = work.size, work.buckets
    _, _, compressor = preset.partition("+")
    if compressor:
        messages = float(_grid_messages(p) * buckets)
        sent = 2 * (p - 1) / p * size * _BITS[compressor] / 32
        return MessageCounts(messages, sent, sent)
    if preset in ("allreduce", "local-sgd", "diloco"):
        steps = {"allreduce": 1, "local-sgd": 8, "diloco": 32}[preset]
        messages = 2 * math.log2(p) * buckets / steps
        sent = 2 * (p - 1) / p * size / steps
        return MessageCounts(messages, sent, sent)
    if preset in ("gossip", "noloco"):
        steps = {"gossip": 1, "noloco": 32}[preset]
        return MessageCounts(buckets / steps, size / steps, size / steps)
    if preset == "asgd":
        return MessageCounts(2, size, size)
    if preset in ("tree", "parameter-server"):
        # Every rank but the root sends its values up once; the root sends the sum to most ranks.
        most = math.ceil(math.log2(p)) if preset == "tree" else p - 1
        mean = 2 * (p - 1) / p
        return MessageCounts(mean * buckets, mean * size, most * size)
    local = min(work.per_node, p)
    nodes = p // local
    swaps = math.ceil(math.log2(nodes))
    most = swaps + local - 1
    mean = (2 * (local - 1) + swaps) / local
    return MessageCounts(mean * buckets, mean * size, most * size)
