"""Count the data that ranks of a job would read and send, using the planning code of real runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader
from dlio.data.schema import IMAGE_LABEL
from dlio.loader.shuffle.sample_message import ENTRY_BYTES
from dlio.loader.shuffle.sample_shuffle import windows_of
from dlio.plan.epoch import EpochPlan, is_exact, plan_epoch
from dlio.plan.layout import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES, MIN_BLOCKS, Layout
from dlio.plan.order import Order
from dlio.plan.placement import HomeNode, Placement, place
from dlio.plan.rank_shares import RankShares
from dlio.plan.schedule import RankNodes, StepAssignment, steps_in_epoch
from dlio.storage.block import aligned, block_sizes
from dlio.storage.mount import block_bytes_of

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ForecastJob:
    """A job to plan without running it.

    Args:
        layout: blocks of the data set.
        sizes: payload bytes of each sample; shape (samples,), or a single number for all.
        block_bytes: bytes of each block in a tier; shape (blocks,).
        nodes: names of the nodes and capacities of their tiers, fastest first. As in a real run,
            names determine which node is a block's home.
        ranks_per_node: number of ranks on each node.
        batch_size: samples per rank and step.
        mode: shuffle mode: batch, global, ring, local or partial(q).
        seed: seed of the sample order.
        key: fingerprint of the data set.
        position: number of the epoch's samples that are consumed already.
    """

    layout: Layout
    sizes: Any
    block_bytes: _I64
    nodes: tuple[HomeNode, ...]
    ranks_per_node: int
    batch_size: int
    mode: str = "batch"
    seed: int = 0
    key: str = "planned"
    position: int = 0
    gone: tuple[int, ...] = field(default=())
    """Numbers of the ranks that have died."""

    @property
    def samples(self) -> int:
        return int(self.layout.starts[-1])

    @cached_property
    def ranks(self) -> RankNodes:
        node_of = np.repeat(np.arange(len(self.nodes), dtype=np.int32), self.ranks_per_node)
        return RankNodes(np.delete(node_of, list(self.gone)))

    @cached_property
    def placement(self) -> Placement:
        return place(self.block_bytes, self.nodes, self.key)

    @property
    def steps(self) -> int:
        return steps_in_epoch(self.samples, self.position, self.shares.global_batch)

    @cached_property
    def shares(self) -> RankShares:
        return RankShares.even(self.batch_size, self.ranks.size)

    @cached_property
    def mean_bytes(self) -> float:
        return float(np.mean(self.sizes))

    @cached_property
    def data_bytes(self) -> int:
        return int(self.mean_bytes * self.samples)

    def bytes_of(self, samples: _I64) -> _I64:
        """Return the payload bytes of each of these samples; same shape."""
        if np.ndim(self.sizes) == 0:
            return np.full(len(samples), int(self.sizes), np.int64)
        return np.asarray(self.sizes, np.int64)[samples]

    def plan(self, epoch: int, rank: int) -> EpochPlan:
        """Return the inputs from which a rank would plan an epoch."""
        return EpochPlan(
            Order(self.samples, self.seed, epoch),
            self.position,
            self.shares,
            self.steps,
            self.mode,
            self.ranks,
            rank,
            self.placement.home,
            self.layout,
        )

    def windows(self) -> list[range]:
        """Cut an epoch into windows as the ranks of a real run do."""
        return windows_of(self.plan(0, 0), self.mean_bytes)

    def dealt(self, epoch: int) -> Iterator[StepAssignment]:
        """Yield, for each window, who consumes each sample and who sends it, over all ranks."""
        if is_exact(self.mode):
            yield from map(self.plan(epoch, 0).dealt, self.windows())
            return
        plans = [plan_epoch(self.plan(epoch, rank)) for rank in range(self.ranks.size)]
        for steps in self.windows():
            parts = [plan.window(steps) for plan in plans]
            counts = np.array([np.diff(part.starts) for part in parts])
            step = np.concatenate([np.repeat(np.arange(len(steps)), c) for c in counts])
            consumer = np.repeat(np.arange(self.ranks.size, dtype=np.int32), counts.sum(1))
            yield StepAssignment(
                steps,
                np.concatenate([part.samples for part in parts]),
                step.astype(np.int64) + steps.start,
                consumer,
                np.concatenate([part.senders for part in parts]),
            )


def job_over(reader: Reader, *rest: Any, **more: Any) -> ForecastJob:
    """Return a job over an existing data set, of which only the index is read; the other arguments
    are those of `ForecastJob`, from `nodes` on."""
    sizes = np.asarray(reader.sizes, np.int64)
    more["key"] = reader.fingerprint
    return ForecastJob(reader.layout, sizes, block_bytes_of(reader), *rest, **more)


def job_of(samples: int, size: int, *rest: Any, seed: int = 0) -> ForecastJob:
    """Return a job over an imagined data set, a folder of files of the same size; the other
    arguments are those of `ForecastJob`, from `nodes` on."""
    a_block = max(
        1, min(MAX_BLOCK_BYTES, max(samples * size // MIN_BLOCKS, MIN_BLOCK_BYTES)) // size
    )
    starts = np.append(np.arange(0, samples, a_block), samples).astype(np.int64)
    layout = Layout(starts, Order(samples, seed + 1))
    counts = np.diff(starts)
    bytes_ = block_sizes(counts, counts * aligned(np.array([size], np.int64))[0], IMAGE_LABEL)
    return replace(ForecastJob(layout, size, bytes_, *rest), seed=seed)


@dataclass(frozen=True, slots=True)
class WindowMessages:
    """Messages of one window, at most one per pair of ranks; arrays of shape (messages,)."""

    sender: _I64
    receiver: _I64
    payload: _I64
    """Bytes of the samples in each message."""
    samples: _I64
    """Number of samples in each message."""

    @property
    def wire(self) -> _I64:
        """Bytes of each message: its samples, and the table that lists them."""
        return self.payload + ENTRY_BYTES * self.samples


def messages_of(job: ForecastJob, dealt: StepAssignment) -> WindowMessages:
    """Return the messages that ranks send each other in a window."""
    moved = np.flatnonzero(dealt.sender >= 0)
    size = job.ranks.size
    pair = dealt.sender[moved].astype(np.int64) * size + dealt.consumer[moved]
    pairs, which = np.unique(pair, return_inverse=True)
    payload = np.bincount(which, job.bytes_of(dealt.samples[moved]), len(pairs))
    counts = np.bincount(which, minlength=len(pairs))
    return WindowMessages(pairs // size, pairs % size, payload.astype(np.int64), counts)


@dataclass(slots=True)
class EpochTraffic:
    """Totals of an epoch after the first, over all ranks."""

    steps: int
    link_out: _I64
    """Message bytes that each node sends; shape (nodes,)."""
    link_in: _I64
    """Message bytes that each node receives; shape (nodes,)."""
    windows: int = 0
    samples: int = 0
    payload: int = 0
    """Payload bytes of all samples consumed."""
    moved: int = 0
    """Payload bytes sent between nodes."""
    messages: int = 0
    wire: int = 0
    """Bytes of all messages, including their tables."""
    source: int = 0
    """Payload bytes read from the source."""
    tiers: tuple[int, ...] = ()
    """Payload bytes read from each tier, fastest first, for local use or for sending."""
    peers: int = 0
    """Number of ranks that send to the rank with the most senders."""
    window_bytes: int = 0
    """Largest number of message bytes that a rank receives in one window."""


def traffic(job: ForecastJob, epoch: int = 1) -> EpochTraffic:
    """Count the traffic of an epoch, planned as in a real run."""
    nodes, node_of = len(job.nodes), job.ranks.node_of
    tiers = np.zeros(max(1, max(len(node.capacities) for node in job.nodes)), np.int64)
    made = EpochTraffic(job.steps, np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))
    pairs: list[_I64] = []
    for dealt in job.dealt(epoch):
        sizes = job.bytes_of(dealt.samples)
        block = job.layout.block_of(dealt.samples)
        home, tier = job.placement.home[block], job.placement.tier[block]
        held = np.where((home == node_of[dealt.consumer]) | (dealt.sender >= 0), tier, -1)
        tiers += np.bincount(held[held >= 0], sizes[held >= 0], len(tiers)).astype(np.int64)
        made.source += int(sizes[held < 0].sum())
        sent = messages_of(job, dealt)
        made.windows += 1
        made.samples += len(sizes)
        made.payload += int(sizes.sum())
        made.moved += int(sent.payload.sum())
        made.wire += int(sent.wire.sum())
        made.messages += len(sent.sender)
        made.link_out += np.bincount(node_of[sent.sender], sent.wire, nodes).astype(np.int64)
        made.link_in += np.bincount(node_of[sent.receiver], sent.wire, nodes).astype(np.int64)
        if len(sent.sender):
            each = np.bincount(sent.receiver, sent.wire, job.ranks.size)
            made.window_bytes = max(made.window_bytes, int(each.max()))
            pairs.append(sent.sender * job.ranks.size + sent.receiver)
    met = np.unique(np.concatenate(pairs)) if pairs else np.empty(0, np.int64)
    made.tiers = tuple(tiers.tolist())
    made.peers = int(np.bincount(met % job.ranks.size, minlength=1).max())
    return made
