"""The schedule: who consumes which sample at each step, and who sends it there. Pure.

Only the *set* of samples in a global batch matters to synchronous training, not which rank
computes which. So in `batch` mode a sample is consumed on the node that holds it, and only what
exceeds a node's share of the batch moves: for nodes that consume b samples a step about
1/sqrt(2·pi·b) of the bytes. In `global` mode each rank gets a uniformly random share, and all but
1/nodes of the bytes move. Both modes have the same global batches.

Every rank computes the assignment of the whole global batch, so plans agree without a message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dlio.order import Order

Mode = Literal["batch", "global"]
_I64 = npt.NDArray[np.int64]
_I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job and the nodes they are on."""

    node_of: _I32
    """Node number of each rank; shape (ranks,)."""

    @property
    def size(self) -> int:
        return len(self.node_of)

    @property
    def nodes(self) -> int:
        return int(self.node_of.max()) + 1

    def local(self, node: int) -> npt.NDArray[np.intp]:
        """The ranks on a node, ascending."""
        return np.flatnonzero(self.node_of == node)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What all ranks do in a run of steps. Flat arrays of one entry a sample, shape (n,), sorted
    by step and consumer."""

    steps: range
    samples: _I64
    step: _I64
    """Step of each sample."""
    consumer: _I32
    """Rank that consumes it."""
    sender: _I32
    """Rank that pushes it to its consumer, -1 where the consumer's node reads it itself."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one rank does in a run of steps, known before the run starts."""

    steps: range
    """Steps of the epoch that this window feeds."""
    samples: _I64
    """Samples to consume, in order; shape (n,)."""
    starts: _I64
    """Samples of the k-th step are samples[starts[k]:starts[k + 1]]; shape (len(steps) + 1,)."""
    senders: _I32
    """Rank that pushes each sample, -1 where this rank reads it itself; shape (n,)."""
    sends: dict[int, _I64]
    """Per destination rank, the samples this rank pushes, in the receiver's order."""


def steps_in_epoch(n: int, position: int, global_batch: int, drop_last: bool = False) -> int:
    """Steps that positions `position` to `n` - 1 make; the last may be smaller."""
    left = max(0, n - position)
    return left // global_batch if drop_last else -(-left // global_batch)


def window_steps(mean_bytes: float, batch_size: int, budget_bytes: int) -> int:
    """Steps whose payloads, at `mean_bytes` a sample, fit a rank's budget; at least 1."""
    return max(1, int(budget_bytes / max(1.0, mean_bytes * batch_size)))


def assign(
    order: Order,
    position: int,
    batch_size: int,
    steps: range,
    home_of: Callable[[_I64], _I32],
    ranks: Ranks,
    mode: Mode,
) -> Assignment:
    """Deal the global batches of `steps` to the ranks.

    The global batch of step s is the order's positions from position + s·B, B = batch_size x
    ranks. Each rank gets `share` of it, in `batch` mode from its own node's samples first.

    Args:
        position: of the epoch's order, where step 0 begins.
        batch_size: per rank.
        home_of: home node of each sample, -1 for the source.

    Cost O(len(steps) x global batch), independent of the data set's size.
    Source: exact-batch locality, design "train a sample where it lives".
    """
    global_batch = batch_size * ranks.size
    first = position + steps.start * global_batch
    last = min(position + steps.stop * global_batch, len(order))
    samples = order.samples(np.arange(first, max(first, last), dtype=np.int64))
    homes = np.asarray(home_of(samples), np.int32)
    offset = np.arange(len(samples), dtype=np.int64)
    step = offset // global_batch
    in_step = offset - step * global_batch
    counts = np.bincount(step, minlength=len(steps)).astype(np.int64)
    if mode == "global":
        consumer = _deal(in_step, counts[step], ranks.size)
    else:
        consumer = _deal_at_home(homes, step, counts, ranks)
    sender = _senders(homes, consumer, ranks)
    by_consumer = np.lexsort((offset, consumer, step))
    return Assignment(
        steps,
        samples[by_consumer],
        step[by_consumer] + steps.start,
        consumer[by_consumer],
        sender[by_consumer],
    )


def plan_window(
    order: Order,
    position: int,
    batch_size: int,
    steps: range,
    home_of: Callable[[_I64], _I32],
    ranks: Ranks,
    rank: int,
    mode: Mode,
) -> Window:
    """Plan `steps` for `rank` without communication; arguments as for `assign`.

    Every rank that calls this alike gets plans that agree: `a.sends[b]` are, in order, the
    samples that `b` expects from `a`.
    """
    dealt = assign(order, position, batch_size, steps, home_of, ranks, mode)
    mine = dealt.consumer == rank
    per_step = np.bincount(dealt.step[mine] - steps.start, minlength=len(steps))
    pushed = dealt.sender == rank
    destinations, samples = dealt.consumer[pushed], dealt.samples[pushed]
    return Window(
        steps,
        dealt.samples[mine],
        np.concatenate([[0], np.cumsum(per_step)]).astype(np.int64),
        dealt.sender[mine],
        {int(dest): samples[destinations == dest] for dest in np.unique(destinations)},
    )


def _deal(in_step: _I64, counts: _I64, parts: int) -> _I32:
    """The part of `share(count, parts, ·)` that each place in a step falls to."""
    # Largest part p with count·p // parts <= place, that is p = ((place + 1)·parts - 1) // count.
    return (((in_step + 1) * parts - 1) // np.maximum(counts, 1)).astype(np.int32)


def _deal_at_home(homes: _I32, step: _I64, counts: _I64, ranks: Ranks) -> _I32:
    """Consumers of a run of steps in `batch` mode."""
    steps, nodes = len(counts), ranks.nodes
    # What each rank, and so each node, consumes at each step.
    edges = counts[:, None] * np.arange(ranks.size + 1) // ranks.size
    rank_share = np.diff(edges, axis=1)
    quota = np.zeros((steps, nodes), np.int64)
    np.add.at(quota.T, ranks.node_of, rank_share.T)
    # A sample stays at home if it is among the first `quota` there.
    at_home = _count_before(step * (nodes + 1) + homes + 1)
    stays = (homes >= 0) & (at_home < quota[step, np.maximum(homes, 0)])
    node = np.where(stays, homes, -1).astype(np.int64)
    kept = np.zeros((steps, nodes), np.int64)
    np.add.at(kept, (step[stays], homes[stays]), 1)
    # The others fill what is missing elsewhere, step by step, node by node.
    missing = quota - kept
    node[~stays] = np.repeat(np.tile(np.arange(nodes), steps), missing.reshape(-1))
    # Within a node samples go, in order, to its ranks by their shares.
    place = _count_before(step * nodes + node)
    consumer = np.empty(len(homes), np.int32)
    for number in range(nodes):
        local = ranks.local(number)
        here = np.flatnonzero(node == number)
        ends = np.cumsum(rank_share[:, local], axis=1)
        index = (place[here, None] >= ends[step[here]]).sum(axis=1)
        consumer[here] = local[index]
    return consumer


def _count_before(groups: _I64) -> _I64:
    """For each entry, how many earlier entries are of the same group; same shape."""
    by_group = np.argsort(groups, kind="stable")
    ordered = groups[by_group]
    fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(groups) else ordered > 0
    starts = np.flatnonzero(fresh)
    before = np.empty(len(groups), np.int64)
    lengths = np.diff(np.append(starts, len(groups)))
    before[by_group] = np.arange(len(groups)) - np.repeat(starts, lengths)
    return before


def _senders(homes: _I32, consumer: _I32, ranks: Ranks) -> _I32:
    """Who pushes each sample: one rank per receiver and peer node, so one message per pair."""
    local_index = np.zeros(ranks.size, np.int64)
    local_count = np.zeros(ranks.nodes, np.int64)
    table = np.zeros((ranks.nodes, ranks.size), np.int32)
    for number in range(ranks.nodes):
        local = ranks.local(number)
        local_index[local] = np.arange(len(local))
        local_count[number] = len(local)
        table[number, : len(local)] = local
    moves = (homes >= 0) & (homes != ranks.node_of[consumer])
    sender = np.full(len(homes), -1, np.int32)
    home, receiver = homes[moves], consumer[moves]
    sender[moves] = table[home, local_index[receiver] % local_count[home]]
    return sender
