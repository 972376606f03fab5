"""The inexact modes: each rank trains on the samples of its node. Pure.

In `local` mode only surplus samples move. In `partial(q)` a fraction q of each node's samples is
exchanged with other nodes, another one in each epoch. In `ring`, the mode of GossipGraD, the
samples that one rank consumed in an epoch go to its neighbour in the next, along a ring that is
redrawn each epoch: a rank sees every sample in turn, and has one partner at a time. Every sample is
consumed exactly once an epoch, but a step's samples are not a uniformly random draw of the whole
data set.

A node consumes, step for step, as many samples as in the exact modes: these are its slots. Most are
filled by its own samples, in an order of their own. Where its share of the slots exceeds what it
holds, slots spread evenly over the epoch are filled from a pool: the samples of other nodes beyond
their share, and the samples that only the source holds. Everything is a formula in both directions,
so that a rank computes the samples it consumes and sends without computing those of others:

    slot of a node  <->  its k-th own sample, or its f-th sample of the pool      (evenly mixed)
    own sample k    <->  k-th in a keyed order of the node's samples              (Order)
    own sample k    <->  exchange g of all nodes' together                        (every 1/q-th)
    exchange g      <->  exchange that it changes places with                     (Order)
    pool            <->  surplus of nodes, samples of the source                  (Order)

In `ring` a rank stands in for another one: it consumes the samples of the other in `local` mode.
They are sent by the node that holds them, ahead of their use, and not by the rank that used them
last, so that no second copy is needed; the bytes and messages are the same.

Source: design, modes `local`, `partial(q)` and `ring`; GossipGraD (arXiv 1803.05880).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.plan.rank_shares import RankShares
from dlio.plan.schedule import RankNodes, RankWindow, cut_window, senders_of, with_ranks

_I64 = npt.NDArray[np.int64]
_I32 = npt.NDArray[np.int32]
_UNIT: Final = 1 << 20
"""Fractions are multiples of 1 / _UNIT."""
_MOST: Final = 1 << 31
"""Most samples of one node: products of two such numbers stay below 2^63."""


@dataclass(frozen=True, slots=True)
class _EvenSpread:
    """`count` own items spread evenly over `total` places; the other places are for other items."""

    count: int
    total: int

    def split(self, places: _I64) -> tuple[npt.NDArray[np.bool_], _I64]:
        """Return, for each place, (True if its item is an own one, its number among its kind)."""
        before = places * self.count // max(1, self.total)
        ours = (places + 1) * self.count // max(1, self.total) > before
        return ours, np.where(ours, before, places - before)

    def place(self, numbers: _I64) -> _I64:
        return -(-(numbers + 1) * self.total // max(1, self.count)) - 1

    def other_place(self, numbers: _I64) -> _I64:
        return numbers * self.total // max(1, self.total - self.count)


def carried(ranks: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the rank whose samples each rank consumes in an epoch of `ring`; shape (ranks,).

    Cost 10 us for each epoch before, for a thousand ranks.
    """
    held = np.arange(ranks, dtype=np.int64)
    for number in range(epoch):
        ring = Order(ranks, xxhash.xxh3_64_intdigest(f"{seed}/ring".encode()), number)
        places = ring.samples(np.arange(ranks, dtype=np.int64))
        moved = np.empty_like(held)
        moved[np.roll(places, -1)] = held[places]
        held = moved
    return held


class HomePlan:
    """An epoch in `local`, `partial(q)` or `ring`, as one rank sees it.

    The order gives the seed, the epoch and the number of samples, and `shares` the samples of each
    rank in a step, of `steps` in the whole epoch. `fraction` is q of `partial(q)`, 0 for `local`
    and `ring`; with `ring`, ranks stand in for each other. Step 0 of `window` is `first_step` of
    the epoch.

    Raises UsageError beyond 2^31 samples a node.

    Cost: 0.3 µs for each sample that is consumed or sent; memory, 24 bytes for each that is sent.
    """

    def __init__(
        self,
        order: Order,
        layout: Layout,
        home: _I32,
        ranks: RankNodes,
        rank: int,
        shares: RankShares,
        steps: int,
        fraction: float,
        first_step: int = 0,
        ring: bool = False,
    ) -> None:
        self._layout, self._ranks, self._rank = layout, ranks, rank
        self._first_step = first_step
        nodes = ranks.nodes
        self._node = int(ranks.node_of[rank])
        self._locals = [ranks.local(node) for node in range(nodes)]
        counts_of = np.diff(shares.edges)
        self._step_starts = [_starts(counts_of[local].tolist()) for local in self._locals]
        """Samples of each rank in a whole step, as starts among its node's."""
        global_batch = shares.global_batch
        self._full_steps = min(steps, order.n // global_batch)
        last = order.n - self._full_steps * global_batch if steps > self._full_steps else 0
        last_shares = np.array([len(shares.part(last, r)) for r in range(ranks.size)])
        # Samples of each rank in the last, smaller step, as starts among its node's.
        self._last_starts = [_starts(last_shares[local].tolist()) for local in self._locals]
        quota = [
            int(self._full_steps * self._step_starts[v][-1] + self._last_starts[v][-1])
            for v in range(nodes)
        ]
        sending = with_ranks(home, ranks)
        self._blocks = [np.flatnonzero(sending == node) for node in range(-1, nodes)]
        """Blocks that only the source holds, then those of each node."""
        counts = np.diff(layout.starts)
        self._starts = [np.concatenate([[0], np.cumsum(counts[own])]) for own in self._blocks]
        held = [int(starts[-1]) for starts in self._starts]
        if max(held) >= _MOST:
            raise UsageError(f"modes local and partial are for up to {_MOST} samples a node")
        own = [min(held[v + 1], quota[v]) for v in range(nodes)]
        self._mixes = [_EvenSpread(own[v], quota[v]) for v in range(nodes)]
        self._orders = [_order(held[v + 1], order, f"node/{v}") for v in range(nodes)]
        part = round(fraction * _UNIT)
        self._part = part
        self._exchange_starts = _starts([count * part // _UNIT for count in own])
        self._swaps = _order(int(self._exchange_starts[-1]), order, "exchange")
        self._wanted_starts = _starts([quota[v] - own[v] for v in range(nodes)])
        self._surplus_starts = _starts([held[0], *(held[v + 1] - own[v] for v in range(nodes))])
        self._pool = _order(int(self._surplus_starts[-1]), order, "pool")
        stands = np.arange(ranks.size)
        self._stands_for = carried(ranks.size, order.seed, order.epoch) if ring else stands
        self._stood_for = np.argsort(self._stands_for)
        """The rank that consumes the samples of each rank in `local` mode."""
        self._ring = ring

    def consumed(self, rank: int, steps: range) -> tuple[_I64, _I64]:
        """Return the samples that any of the ranks consumes, and the start of each step's."""
        samples, _, starts = self._consumed(rank, steps)
        return samples, starts

    def window(self, steps: range) -> RankWindow:
        """Plan a run of steps; the plans of all ranks agree."""
        first, last = steps.start + self._first_step, steps.stop + self._first_step
        samples, homes, starts = self._consumed(self._rank, steps)
        senders = senders_of(homes, np.full(len(samples), self._rank), self._ranks)
        sent_step, consumer, sample = self._sent
        here = slice(*np.searchsorted(sent_step, [first, last]))
        return RankWindow(
            steps,
            samples,
            starts,
            senders,
            cut_window(sample[here], consumer[here], self._ranks.size),
        )

    def _consumed(self, rank: int, steps: range) -> tuple[_I64, _I32, _I64]:
        """Return (sample, home node or -1) for the samples of a rank, and each step's start."""
        first, last = steps.start + self._first_step, steps.stop + self._first_step
        other = int(self._stands_for[rank])
        node = int(self._ranks.node_of[other])
        step, slots = self._slots(node, other, first, last)
        samples, homes = self._filled(node, slots)
        starts = np.searchsorted(step, np.arange(first, last + 1))
        return samples, homes, starts.astype(np.int64)

    def _slots(self, node: int, rank: int, first: int, last: int) -> tuple[_I64, _I64]:
        """Return (step, slot within the node) of a rank's samples in steps `first` to `last`."""
        place = int(np.flatnonzero(self._locals[node] == rank)[0])
        edges = self._step_starts[node]
        a_step, inside = int(edges[-1]), np.arange(edges[place], edges[place + 1])
        full = np.arange(first, min(last, self._full_steps), dtype=np.int64)
        slots = full[:, None] * a_step + inside
        steps = np.repeat(full, len(inside))
        flat = slots.reshape(-1)
        if last > self._full_steps >= first:
            begin, end = self._last_starts[node][place : place + 2]
            rest = self._full_steps * a_step + np.arange(begin, end)
            flat = np.concatenate([flat, rest])
            steps = np.concatenate([steps, np.full(len(rest), self._full_steps)])
        return steps, flat

    def _filled(self, node: int, slots: _I64) -> tuple[_I64, _I32]:
        """Return (sample, home node or -1) for the slots of a node."""
        is_own, number = self._mixes[node].split(slots)
        homes = np.full(len(slots), -1, np.int32)
        places = np.empty(len(slots), np.int64)
        # Its own samples, except those that were exchanged with another node.
        own = np.flatnonzero(is_own)
        owner, place = np.full(len(own), node), number[own]
        swapped = np.flatnonzero((place + 1) * self._part // _UNIT > place * self._part // _UNIT)
        if len(swapped):
            here = place[swapped] * self._part // _UNIT + self._exchange_starts[node]
            owner[swapped], place[swapped] = self._exchange(self._swaps.samples(here))
        homes[own], places[own] = owner, place
        pooled = np.flatnonzero(~is_own)
        if len(pooled):
            item = self._pool.samples(number[pooled] + self._wanted_starts[node])
            begin = np.searchsorted(self._surplus_starts, item, side="right") - 1
            homes[pooled] = begin - 1
            count = np.array([0, *(mix.count for mix in self._mixes)])
            places[pooled] = item - self._surplus_starts[begin] + count[begin]
        return self._samples(homes, places), homes

    def _exchange(self, numbers: _I64) -> tuple[npt.NDArray[np.intp], _I64]:
        """(node, number among its own samples) of exchanges, counted over all nodes."""
        node = np.searchsorted(self._exchange_starts, numbers, side="right") - 1
        inside = numbers - self._exchange_starts[node]
        return node, -(-(inside + 1) * _UNIT // max(1, self._part)) - 1

    def _samples(self, homes: _I32, places: _I64) -> _I64:
        """Samples at places in their node's own order, or in the source's storage order."""
        samples = np.empty(len(homes), np.int64)
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            inner = places[here] if home < 0 else self._orders[home].samples(places[here])
            starts = self._starts[home + 1]
            block = np.searchsorted(starts, inner, side="right") - 1
            position = self._layout.starts[self._blocks[home + 1][block]] + inner - starts[block]
            samples[here] = self._layout.order.samples(position)
        return samples

    @cached_property
    def _sent(self) -> tuple[_I64, npt.NDArray[np.intp], _I64]:
        """(step, consumer, sample) of all samples that this rank sends, by step and slot."""
        node = self._node
        mix = self._mixes[node]
        begin, end = self._exchange_starts[node : node + 2]
        mine = np.arange(begin, end, dtype=np.int64)
        _, place = self._exchange(mine)
        to, number = self._exchange(self._swaps.positions(mine))
        slot = np.empty(len(mine), np.int64)
        for other in np.unique(to).tolist():
            slot[to == other] = self._mixes[other].place(number[to == other])
        surplus = np.arange(*self._surplus_starts[node + 1 : node + 3], dtype=np.int64)
        wanted = self._pool.positions(surplus)
        taken = np.flatnonzero(wanted < self._wanted_starts[-1])
        wanted, surplus = wanted[taken], surplus[taken]
        to_pool = np.searchsorted(self._wanted_starts, wanted, side="right") - 1
        pool_slot = np.empty(len(wanted), np.int64)
        for other in np.unique(to_pool).tolist():
            here = to_pool == other
            pool_slot[here] = self._mixes[other].other_place(
                wanted[here] - self._wanted_starts[other]
            )
        places = np.concatenate([place, surplus - self._surplus_starts[node + 1] + mix.count])
        to, slot = np.concatenate([to, to_pool]), np.concatenate([slot, pool_slot])
        if self._ring:
            own = np.arange(mix.count, dtype=np.int64)
            places, slot = np.concatenate([places, own]), np.concatenate([slot, mix.place(own)])
            to = np.concatenate([to, np.full(mix.count, node)])
        step, consumer = self._consumers(to, slot)
        sender = senders_of(np.full(len(to), node), consumer, self._ranks)
        ours = np.flatnonzero(sender == self._rank)
        ours = ours[np.lexsort((slot[ours], step[ours]))]
        homes = np.full(len(ours), node, np.int32)
        return step[ours], consumer[ours], self._samples(homes, places[ours])

    def _consumers(
        self, nodes: npt.NDArray[np.intp], slots: _I64
    ) -> tuple[_I64, npt.NDArray[np.intp]]:
        """(step, rank) that consume the slots of nodes."""
        steps = np.empty(len(slots), np.int64)
        consumers = np.empty(len(slots), np.intp)
        for node in np.unique(nodes).tolist():
            here = np.flatnonzero(nodes == node)
            edges = self._step_starts[node]
            a_step = int(edges[-1])
            step = np.minimum(slots[here] // a_step, self._full_steps)
            inside = slots[here] - step * a_step
            last = np.searchsorted(self._last_starts[node], inside, side="right") - 1
            full = np.searchsorted(edges, inside, side="right") - 1
            place = np.where(step < self._full_steps, full, last)
            steps[here], consumers[here] = step, self._locals[node][place]
        return steps, self._stood_for[consumers]


def _starts(counts: list[int]) -> _I64:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _order(count: int, epoch: Order, purpose: str) -> Order:
    seed = xxhash.xxh3_64_intdigest(f"{epoch.seed}/{purpose}".encode())
    return Order(max(1, count), seed, epoch.epoch, epoch.shuffled)
