"""What every rank of a job would read, send and receive, from the code that plans real runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader
from dlio.data.schema import IMAGE_LABEL
from dlio.plan.epoch import WINDOW_BYTES, EpochPlan, is_exact, plan_epoch
from dlio.plan.layout import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, MIN_BLOCKS, Layout
from dlio.plan.order import Order
from dlio.plan.placement import Node, Placement, place
from dlio.plan.schedule import Assignment, Ranks, assign, steps_in_epoch
from dlio.shuffle.shuffle import windows_of
from dlio.shuffle.wire import ENTRY_BYTES
from dlio.storage.block import aligned, block_sizes
from dlio.storage.mount import block_bytes_of

__all__ = ["SOURCE", "Job", "Messages", "Traffic", "job_of", "job_over", "messages_of", "traffic"]

_I64 = npt.NDArray[np.int64]
SOURCE: Final = -1


@dataclass(frozen=True)
class Job:
    """A job that is planned and not run.

    Args:
        sizes: payload bytes of each sample; shape (samples,), or a single number for all.
        block_bytes: of each block in a tier; shape (blocks,).
        nodes: with the capacities of their tiers, fastest first; names decide homes, as hosts' do.
        ranks_per_node: of each node alike.
        batch_size: per rank.
        key: of the data set: its fingerprint.
        window_bytes: payload bytes of a rank's window, about.
    """

    layout: Layout
    sizes: Any
    block_bytes: _I64
    nodes: tuple[Node, ...]
    ranks_per_node: int
    batch_size: int
    mode: str = "batch"
    seed: int = 0
    key: str = "planned"
    window_bytes: int = WINDOW_BYTES
    position: int = 0
    gone: tuple[int, ...] = field(default=())
    """Ranks that have died, by number."""

    @property
    def samples(self) -> int:
        return int(self.layout.starts[-1])

    @cached_property
    def ranks(self) -> Ranks:
        node_of = np.repeat(np.arange(len(self.nodes), dtype=np.int32), self.ranks_per_node)
        return Ranks(np.delete(node_of, list(self.gone)))

    @cached_property
    def placement(self) -> Placement:
        return place(self.block_bytes, self.nodes, self.key)

    @property
    def steps(self) -> int:
        batch = self.batch_size * self.ranks.size
        return steps_in_epoch(self.samples, self.position, batch)

    @cached_property
    def mean_bytes(self) -> float:
        return float(np.mean(self.sizes))

    @cached_property
    def data_bytes(self) -> int:
        return int(self.mean_bytes * self.samples)

    def bytes_of(self, samples: _I64) -> _I64:
        """Payload bytes; same shape."""
        if np.ndim(self.sizes) == 0:
            return np.full(len(samples), int(self.sizes), np.int64)
        return np.asarray(self.sizes, np.int64)[samples]

    def plan(self, epoch: int, rank: int) -> EpochPlan:
        """What rank `rank` would plan with."""
        return EpochPlan(
            Order(self.samples, self.seed, epoch),
            self.position,
            self.batch_size,
            self.steps,
            self.mode,
            self.ranks,
            rank,
            self.placement.home,
            self.layout,
            self.window_bytes,
        )

    def windows(self) -> list[range]:
        """As every rank of a real run cuts the epoch."""
        return windows_of(self.plan(0, 0), self.mean_bytes)

    def dealt(self, epoch: int) -> Iterator[Assignment]:
        """What all ranks do, window by window."""
        home = self.placement.home
        if is_exact(self.mode):
            plan = self.plan(epoch, 0)
            for steps in self.windows():
                yield assign(
                    plan.order,
                    self.position,
                    self.batch_size,
                    steps,
                    lambda samples: home[self.layout.block_of(samples)],
                    self.ranks,
                    "batch" if self.mode == "batch" else "global",
                )
            return
        plans = [plan_epoch(self.plan(epoch, rank)) for rank in range(self.ranks.size)]
        for steps in self.windows():
            parts = [plan.window(steps) for plan in plans]
            counts = np.array([np.diff(part.starts) for part in parts])
            step = np.concatenate([np.repeat(np.arange(len(steps)), c) for c in counts])
            consumer = np.repeat(np.arange(self.ranks.size, dtype=np.int32), counts.sum(1))
            yield Assignment(
                steps,
                np.concatenate([part.samples for part in parts]),
                step.astype(np.int64) + steps.start,
                consumer,
                np.concatenate([part.senders for part in parts]),
            )


def job_over(
    reader: Reader,
    nodes: tuple[Node, ...],
    ranks_per_node: int,
    batch_size: int,
    mode: str = "batch",
    seed: int = 0,
) -> Job:
    """Over a data set that is there; nothing of it is read but its index."""
    return Job(
        reader.layout,
        np.asarray(reader.sizes, np.int64),
        block_bytes_of(reader),
        nodes,
        ranks_per_node,
        batch_size,
        mode,
        seed,
        reader.fingerprint,
    )


def job_of(
    samples: int,
    size: int,
    nodes: tuple[Node, ...],
    ranks_per_node: int,
    batch_size: int,
    mode: str = "batch",
    seed: int = 0,
) -> Job:
    """Over an imagined data set of files of one size, in blocks as a folder of files has them."""
    a_block = max(
        1, min(MAX_BLOCK_BYTES, max(samples * size // MIN_BLOCKS, MIN_BLOCK_BYTES)) // size
    )
    starts = np.append(np.arange(0, samples, a_block), samples).astype(np.int64)
    layout = Layout(starts, Order(samples, seed + 1))
    counts = np.diff(starts)
    bytes_ = block_sizes(counts, counts * aligned(np.array([size], np.int64))[0], IMAGE_LABEL)
    return Job(layout, size, bytes_, nodes, ranks_per_node, batch_size, mode, seed)


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a window, one for each pair of ranks; shape (messages,) each."""

    sender: _I64
    receiver: _I64
    payload: _I64
    """Bytes of samples."""
    samples: _I64

    @property
    def wire(self) -> _I64:
        """Bytes with their tables."""
        return self.payload + ENTRY_BYTES * self.samples


def messages_of(job: Job, dealt: Assignment) -> Messages:
    """What ranks send each other in a window."""
    moved = np.flatnonzero(dealt.sender >= 0)
    size = job.ranks.size
    pair = dealt.sender[moved].astype(np.int64) * size + dealt.consumer[moved]
    pairs, which = np.unique(pair, return_inverse=True)
    payload = np.bincount(which, job.bytes_of(dealt.samples[moved]), len(pairs))
    counts = np.bincount(which, minlength=len(pairs))
    return Messages(pairs // size, pairs % size, payload.astype(np.int64), counts)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of an epoch after the first."""

    steps: int
    windows: int
    samples: int
    payload: int
    """Bytes of all samples consumed."""
    moved: int
    """Of them, sent between nodes."""
    messages: int
    wire: int
    """Bytes of those messages."""
    source: int
    """Read from the source."""
    tiers: tuple[int, ...]
    """Read from each tier, for oneself or to be sent."""
    link_out: _I64
    """Wire bytes that each node sends; shape (nodes,)."""
    link_in: _I64
    peers: int
    """Ranks that the busiest rank gets messages from."""
    window_bytes: int
    """The most that a rank holds of one window's messages."""


def traffic(job: Job, epoch: int = 1) -> Traffic:
    """Count an epoch, as every rank of a real run would plan it."""
    nodes = len(job.nodes)
    out, into = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    count, payload, moved, wire, messages, source = 0, 0, 0, 0, 0, 0
    tiers = np.zeros(max(1, max(len(node.capacities) for node in job.nodes)), np.int64)
    largest = 0
    windows = 0
    pairs: list[_I64] = []
    for dealt in job.dealt(epoch):
        windows += 1
        sizes = job.bytes_of(dealt.samples)
        block = job.layout.block_of(dealt.samples)
        home, tier = job.placement.home[block], job.placement.tier[block]
        held = np.where((home == job.ranks.node_of[dealt.consumer]) | (dealt.sender >= 0), tier, -1)
        tiers += np.bincount(held[held >= 0], sizes[held >= 0], len(tiers)).astype(np.int64)
        source += int(sizes[held < 0].sum())
        found = messages_of(job, dealt)
        count, payload = count + len(sizes), payload + int(sizes.sum())
        moved, wire = moved + int(found.payload.sum()), wire + int(found.wire.sum())
        messages += len(found.sender)
        out += np.bincount(job.ranks.node_of[found.sender], found.wire, nodes).astype(np.int64)
        into += np.bincount(job.ranks.node_of[found.receiver], found.wire, nodes).astype(np.int64)
        if len(found.sender):
            each = np.bincount(found.receiver, found.wire, job.ranks.size)
            largest = max(largest, int(each.max()))
            pairs.append(found.sender * job.ranks.size + found.receiver)
    met = np.unique(np.concatenate(pairs)) if pairs else np.empty(0, np.int64)
    peers = int(np.bincount(met % job.ranks.size, minlength=1).max())
    return Traffic(
        job.steps,
        windows,
        count,
        payload,
        moved,
        messages,
        wire,
        source,
        tuple(int(read) for read in tiers),
        out,
        into,
        peers,
        largest,
    )
