"""What an exchange sends and takes on p ranks: the alpha-beta model. Pure.

A message of n bytes takes a + n b seconds (alpha and beta); adding n bytes of what came to what is
there takes n g. A rank sends and receives at once, and one message each at a time (Hockney, 1994;
Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in
MPICH", section 3, whose formulae for the allreduce these are). Gradients travel in buckets; their
messages follow each other, so what counts is the rank with most to do. Nothing of it is hidden
behind computing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Link:
    """What messages cost."""

    alpha_s: float
    """Seconds a message."""
    beta_s: float
    """Seconds a byte."""
    gamma_s: float = 0.0
    """Seconds to add a byte of what came."""

    def message(self, size: float) -> float:
        return self.alpha_s + size * self.beta_s

    def added(self, size: float) -> float:
        """A message, and its bytes added to those that are there."""
        return self.message(size) + size * self.gamma_s


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be exchanged."""

    size: float
    """Bytes of all parameters."""
    buckets: int = 1
    per_node: int = 1
    """Ranks of a node."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a rank sends in an exchange: the mean over ranks, and of the rank that sends most."""

    messages: float
    size: float
    most_messages: float
    most_size: float


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[Link, float]:
    """The link that fits measured messages best, and its root mean square relative error.

    Least squares of relative errors: sizes span five decades, and seconds as many.
    """
    weights = 1 / np.asarray(seconds)
    columns = np.stack([weights, np.asarray(sizes) * weights], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones(len(weights)), rcond=None)
    link = Link(max(0.0, float(alpha)), max(0.0, float(beta)))
    errors = [link.message(n) / s - 1 for n, s in zip(sizes, seconds, strict=True)]
    return link, math.sqrt(sum(error * error for error in errors) / len(errors))


def ring(p: int, work: Work, link: Link) -> float:
    """2 (p - 1) messages of a p-th: 2 (p - 1) a + 2 (p - 1)/p n b + (p - 1)/p n g."""
    share = (p - 1) / p * work.size
    hops = 2 * (p - 1) * work.buckets
    return hops * link.alpha_s + 2 * share * link.beta_s + share * link.gamma_s


def halving(p: int, work: Work, link: Link) -> float:
    """Rabenseifner's: reduce-scatter by halving, allgather by doubling: 2 log2 p a, bytes as in a
    ring. Where p is no power of two, those beyond hand theirs to another rank before, and get the
    sum from it: 2 (a + n b) more."""
    whole = 1 << (p.bit_length() - 1)
    share = (whole - 1) / whole * work.size
    hops = 2 * round(math.log2(whole)) * work.buckets
    seconds = hops * link.alpha_s + 2 * share * link.beta_s + share * link.gamma_s
    if p > whole:
        seconds += 2 * work.buckets * link.alpha_s
        seconds += work.size * (2 * link.beta_s + link.gamma_s)
    return seconds


def allreduce(p: int, work: Work, link: Link) -> float:
    """The better of `ring` and `halving`, as libraries choose; zero on one rank."""
    return 0.0 if p == 1 else min(ring(p, work, link), halving(p, work, link))


def binomial(p: int, work: Work, link: Link) -> float:
    """A tree up and down: its root hears from ceil(log2 p) ranks, whole buckets, and tells as
    many: 2 log2 p (a + n b) + log2 p n g."""
    return _bucketwise(work, math.ceil(math.log2(p)), link)


def star(p: int, work: Work, link: Link) -> float:
    """A parameter server hears from p - 1 ranks and tells p - 1: 2 (p - 1) (a + n b)."""
    return _bucketwise(work, p - 1, link)


def _bucketwise(work: Work, peers: int, link: Link) -> float:
    each = work.size / work.buckets
    return work.buckets * peers * (link.added(each) + link.message(each))


def hierarchical(p: int, work: Work, link: Link, inside: Link | None = None) -> float:
    """To a node's first rank, among these by recursive doubling, and back.

    Args:
        inside: of messages within a node; `link` without.
    """
    local = min(work.per_node, p)
    nodes = -(-p // local)
    each = work.size / work.buckets
    within = star(local, work, inside or link)
    return within + work.buckets * math.ceil(math.log2(nodes)) * link.added(each)


def gossip(p: int, work: Work, link: Link) -> float:
    """One message to one rank, while one comes from another, of weights: a + n b + n g."""
    return 0.0 if p == 1 else work.buckets * link.added(work.size / work.buckets)


def asgd(p: int, work: Work, link: Link) -> float:
    """A notice and the weights, to one rank, at most once a step: 2 a + n b + n g."""
    return 0.0 if p == 1 else link.alpha_s + link.added(work.size)


def every(steps: int, exchange: "Formula") -> "Formula":
    """An exchange that happens once in so many steps, by step."""
    return lambda p, work, link: exchange(p, work, link) / steps


Formula = Callable[[int, Work, Link], float]
FORMULAE: Final[dict[str, Formula]] = {
    "allreduce": allreduce,
    "hierarchical": hierarchical,
    "tree": binomial,
    "parameter-server": star,
    "gossip": gossip,
    "asgd": asgd,
    "local-sgd": every(8, allreduce),
    "diloco": every(32, allreduce),
}
"""Seconds of a step's exchange, by preset, with the periods that presets have."""


def seconds(preset: str, p: int, work: Work, link: Link, inside: Link | None = None) -> float:
    """Of a step's exchange on p ranks; zero on one."""
    if p == 1:
        return 0.0
    if preset == "hierarchical":
        return hierarchical(p, work, link, inside)
    return FORMULAE[preset](p, work, link)


def shared(link: Link, ranks: int, cores: int) -> Link:
    """The link of ranks that share cores: bytes are moved by processors, in turn."""
    factor = max(1.0, ranks / cores)
    return replace(link, beta_s=link.beta_s * factor, gamma_s=link.gamma_s * factor)


def counts(preset: str, p: int, work: Work) -> Counts:
    """What a step's exchange sends. Bytes of an allreduce are a ring's, and the least that there
    can be (Patarasuk and Yuan, 2009); its messages are `halving`'s, 2 log2 p a bucket."""
    if p == 1:
        return Counts(0.0, 0.0, 0.0, 0.0)
    size, buckets = work.size, work.buckets
    if preset in ("allreduce", "local-sgd", "diloco"):
        steps = {"allreduce": 1, "local-sgd": 8, "diloco": 32}[preset]
        told = (2 * math.log2(p) * buckets / steps, 2 * (p - 1) / p * size / steps)
        return Counts(*told, *told)
    if preset == "gossip":
        return Counts(buckets, size, buckets, size)
    if preset == "asgd":
        return Counts(2, size, 2, size)
    if preset in ("tree", "parameter-server"):
        # Each rank but the root sends up once, and is told once; the root tells most.
        most = math.ceil(math.log2(p)) if preset == "tree" else p - 1
        mean = 2 * (p - 1) / p
        return Counts(mean * buckets, mean * size, most * buckets, most * size)
    local = min(work.per_node, p)
    nodes = p // local
    swaps = math.ceil(math.log2(nodes))
    most = swaps + local - 1
    mean = (2 * (local - 1) + swaps) / local
    return Counts(mean * buckets, mean * size, most * buckets, most * size)
