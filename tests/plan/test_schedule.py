"""Plans deal each global batch exactly once, agree between ranks, and move little."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.plan.order import Order, share
from dlio.plan.rank_shares import RankShares
from dlio.plan.schedule import (
    Mode,
    RankNodes,
    RankWindow,
    StepAssignment,
    assign,
    keepers_of,
    plan_window,
    steps_in_epoch,
    window_steps,
)
from tests.conftest import examples

Job = tuple[Order, int, int, RankNodes, npt.NDArray[np.int32]]
"""(order, position, batch size, ranks, home of each sample)."""

MODES: tuple[Mode, ...] = ("batch", "global")
modes = st.sampled_from(MODES)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    n = draw(st.integers(1, 200))
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    node_of = np.repeat(np.arange(len(nodes)), nodes).astype(np.int32)
    if draw(st.booleans()):  # Ranks dealt round robin, as some launchers do.
        node_of = np.random.default_rng(0).permutation(node_of)
    homes = draw(st.lists(st.integers(-1, len(nodes) - 1), min_size=n, max_size=n))
    order = Order(n, draw(st.integers(0, 99)), draw(st.integers(0, 3)))
    position = draw(st.integers(0, n))
    return order, position, draw(st.integers(1, 9)), RankNodes(node_of), np.array(homes, np.int32)


@settings(max_examples=examples(150))
@given(jobs(), modes)
def test_plans_of_all_ranks_fit_together(job: Job, mode: Mode) -> None:
    order, position, batch, ranks, homes = job
    global_batch = batch * ranks.size
    steps = range(steps_in_epoch(len(order), position, global_batch))
    plans = [_plan(job, steps, rank, mode) for rank in range(ranks.size)]
    for step in steps:
        first = position + step * global_batch
        expected = order.samples(np.arange(first, min(first + global_batch, len(order))))
        dealt = [plan.samples[plan.starts[step] : plan.starts[step + 1]] for plan in plans]
        assert sorted(np.concatenate(dealt).tolist()) == sorted(expected.tolist())
        sizes = [len(share(len(expected), ranks.size, rank)) for rank in range(ranks.size)]
        assert [len(part) for part in dealt] == sizes
    for rank, plan in enumerate(plans):
        for sender in range(ranks.size):
            awaited = plan.samples[plan.senders == sender]
            pushed = plans[sender].sends.get(rank, np.empty(0, np.int64))
            assert np.array_equal(awaited, pushed)
        moved = plan.senders >= 0
        assert (homes[plan.samples[moved]] == ranks.node_of[plan.senders[moved]]).all()
        # Nothing is sent that the node has, or that nobody has.
        stays = np.isin(homes[plan.samples], [-1, ranks.node_of[rank]])
        assert np.array_equal(stays, ~moved)


@settings(max_examples=examples(150))
@given(jobs())
def test_batch_mode_keeps_at_home_what_the_shares_allow(job: Job) -> None:
    order, position, batch, ranks, homes = job
    steps = range(steps_in_epoch(len(order), position, batch * ranks.size))
    dealt = _all(job, steps, "batch")
    node = ranks.node_of[dealt.consumer]
    for step in steps:
        here = dealt.step == step
        quotas = np.bincount(
            ranks.node_of, [len(share(here.sum(), ranks.size, rank)) for rank in range(ranks.size)]
        )
        held = homes[dealt.samples[here]]
        for number, quota in enumerate(quotas.astype(int).tolist()):
            # The first `quota` of a node's samples stay there, the others leave.
            stay = (node[here] == number)[held == number]
            assert stay.tolist() == [place < quota for place in range(len(stay))]
    # Ranks of a node take its samples in turn, in the order's own order.
    assert np.array_equal(dealt.samples, order.samples(np.arange(position, len(order))))
    for number in range(ranks.nodes):
        for step in steps:
            takers = dealt.consumer[(node == number) & (dealt.step == step)]
            assert (np.diff(takers) >= 0).all()


@given(jobs(), modes)
def test_a_node_without_ranks_is_no_home(job: Job, mode: Mode) -> None:
    order, position, batch, ranks, homes = job
    steps = range(steps_in_epoch(len(order), position, batch * ranks.size))
    # Every second node number is without ranks, and so is the one after the last.
    spread = RankNodes(ranks.node_of * 2)
    lost = (homes * 2 + 1).astype(np.int32)
    nowhere = np.full(len(homes), -1, np.int32)
    orphaned = _all((order, position, batch, spread, lost), steps, mode)
    homeless = _all((order, position, batch, ranks, nowhere), steps, mode)
    assert np.array_equal(orphaned.consumer, homeless.consumer)
    assert (orphaned.sender == -1).all()
    # Gaps between the numbers change nothing.
    kept = np.where(homes < 0, homes, homes * 2).astype(np.int32)
    gaps = _all((order, position, batch, spread, kept), steps, mode)
    assert np.array_equal(gaps.consumer, _all(job, steps, mode).consumer)
    assert np.array_equal(gaps.sender, _all(job, steps, mode).sender)


@given(jobs(), modes)
def test_one_node_never_sends(job: Job, mode: Mode) -> None:
    order, position, batch, ranks, _ = job
    alone = RankNodes(np.zeros(ranks.size, np.int32))
    dealt = assign(
        order,
        position,
        RankShares.even(batch, ranks.size),
        range(3),
        lambda s: np.zeros(len(s), np.int32),
        alone,
        mode,
    )
    window = plan_window(dealt, 0, ranks.size)
    assert (window.senders == -1).all()
    assert not window.sends


def test_both_modes_have_the_same_global_batches_on_any_number_of_ranks() -> None:
    order = Order(1000, 4, 2)
    batches = []
    for size, batch in ((1, 32), (2, 16), (4, 8)):
        ranks = RankNodes(np.arange(size, dtype=np.int32))
        homes = (np.arange(1000) % size).astype(np.int32)
        for mode in MODES:
            dealt = _all((order, 100, batch, ranks, homes), range(29), mode)
            batches.append([sorted(dealt.samples[dealt.step == step]) for step in range(29)])
    assert all(other == batches[0] for other in batches[1:])
    assert sum(map(len, batches[0])) == 900


@given(jobs(), modes, st.integers(1, 5))
def test_windows_make_no_difference(job: Job, mode: Mode, length: int) -> None:
    order, position, batch, ranks, _ = job
    count = steps_in_epoch(len(order), position, batch * ranks.size)
    whole = _plan(job, range(count), 0, mode)
    parts = [_plan(job, range(k, min(k + length, count)), 0, mode) for k in range(0, count, length)]
    if parts:
        assert np.array_equal(whole.samples, np.concatenate([part.samples for part in parts]))
        assert np.array_equal(whole.senders, np.concatenate([part.senders for part in parts]))


@pytest.mark.parametrize(("nodes", "ranks_a_node", "batch"), [(2, 1, 32), (2, 2, 32), (8, 4, 16)])
def test_batch_mode_moves_only_the_overflow(nodes: int, ranks_a_node: int, batch: int) -> None:
    node_of = np.repeat(np.arange(nodes), ranks_a_node).astype(np.int32)
    n = 60_000
    homes = np.random.default_rng(1).permutation(np.arange(n) % nodes).astype(np.int32)
    steps = range(n // (batch * len(node_of)))
    moved: dict[Mode, float] = {}
    for mode in MODES:
        shares = RankShares.even(batch, len(node_of))
        dealt = assign(Order(n, 3), 0, shares, steps, lambda s: homes[s], RankNodes(node_of), mode)
        moved[mode] = float((dealt.sender >= 0).mean())
    node_batch = batch * ranks_a_node
    # Of node_batch·nodes samples, the excess of one node over node_batch: a binomial's.
    binomial = 1 / math.sqrt(2 * math.pi * node_batch) * math.sqrt(1 - 1 / nodes)
    assert moved["batch"] == pytest.approx(binomial, rel=0.1)
    assert moved["global"] == pytest.approx(1 - 1 / nodes, rel=0.02)


@settings(max_examples=examples(150))
@given(jobs())
def test_a_rank_gets_the_samples_that_it_keeps_as_far_as_its_share_allows(job: Job) -> None:
    order, position, batch, ranks, homes = job
    shares = RankShares.even(batch, ranks.size)
    steps = range(steps_in_epoch(len(order), position, shares.global_batch))
    near, plain = (
        assign(order, position, shares, steps, homes.__getitem__, ranks, "batch", on_devices)
        for on_devices in (True, False)
    )
    keepers = keepers_of(near.samples, homes[near.samples], ranks)
    away = homes[near.samples] >= 0
    assert (ranks.node_of[keepers[away]] == homes[near.samples[away]]).all()
    for step in steps:
        inside = near.step == step
        counts = np.bincount(near.consumer[inside], minlength=ranks.size)
        expected = np.bincount(plain.consumer[inside], minlength=ranks.size)
        assert counts.tolist() == expected.tolist()
        wanted = np.bincount(keepers[inside], minlength=ranks.size)
        got = np.bincount(keepers[inside & (near.consumer == keepers)], minlength=ranks.size)
        # Samples of an overfull node may take the place of some that a rank keeps.
        if ranks.nodes == 1:
            assert got.tolist() == np.minimum(wanted, counts).tolist()
        assert (got <= np.minimum(wanted, counts)).all()
    if away.all():
        assert (near.sender < 0).sum() == (plain.sender < 0).sum()


def test_eight_ranks_of_a_node_get_nearly_all_samples_that_they_keep() -> None:
    ranks, n, batch = RankNodes(np.zeros(8, np.int32)), 1 << 15, 256
    homes = np.zeros(n, np.int32)
    steps, shares = range(n // (8 * batch)), RankShares.even(batch, 8)
    for epoch in range(2):
        dealt = assign(
            Order(n, 1, epoch), 0, shares, steps, homes.__getitem__, ranks, "batch", True
        )
        keepers = keepers_of(dealt.samples, np.zeros(n, np.int32), ranks)
        assert (dealt.consumer == keepers).mean() > 1 - 1.3 / math.sqrt(2 * math.pi * batch)


def test_two_nodes_of_batch_32_move_at_most_12_percent() -> None:
    homes = (np.arange(20_000) % 2).astype(np.int32)
    ranks = RankNodes(np.array([0, 1], np.int32))
    shares = RankShares.even(32, 2)
    dealt = assign(Order(20_000, 0), 0, shares, range(313), lambda s: homes[s], ranks, "batch")
    assert (dealt.sender >= 0).mean() <= 0.12


def test_a_receiver_gets_one_message_per_peer_node() -> None:
    node_of = np.repeat(np.arange(3), 4).astype(np.int32)
    homes = (np.arange(5000) % 3).astype(np.int32)
    receivers: dict[int, int] = {}
    ranks = RankNodes(node_of)
    shares = RankShares.even(8, ranks.size)
    dealt = assign(Order(5000, 0), 0, shares, range(20), lambda s: homes[s], ranks, "global")
    for rank in range(12):
        window = plan_window(dealt, rank, 12)
        senders = np.unique(window.senders[window.senders >= 0])
        assert len(senders) == 2
        assert len(set(node_of[senders])) == 2
        receivers[rank] = len(window.sends)
    # And the ranks of a node share the sending.
    assert set(receivers.values()) == {2}


def test_ten_thousand_ranks_are_planned_alike() -> None:
    nodes, local = 1250, 8
    ranks = RankNodes(np.repeat(np.arange(nodes), local).astype(np.int32))
    order = Order(50_000_000, 1)
    dealt = assign(
        order,
        0,
        RankShares.even(32, ranks.size),
        range(3, 4),
        lambda s: (s // 1000 % nodes).astype(np.int32),
        ranks,
        "batch",
    )
    assert (np.bincount(dealt.consumer) == 32).all()
    moved = float((dealt.sender >= 0).mean())
    assert moved == pytest.approx(1 / math.sqrt(2 * math.pi * 32 * local), rel=0.1)


def test_windows_are_bounded_by_bytes() -> None:
    assert window_steps(100_000, 32, 16 << 20) == 5
    assert window_steps(1e9, 32, 16 << 20) == 1
    assert steps_in_epoch(100, 0, 30) == 4
    assert steps_in_epoch(100, 0, 30, drop_last=True) == 3
    assert steps_in_epoch(100, 100, 30) == 0


def _all(job: Job, steps: range, mode: Mode) -> StepAssignment:
    order, position, batch, ranks, homes = job
    shares = RankShares.even(batch, ranks.size)
    return assign(order, position, shares, steps, lambda s: homes[s], ranks, mode)


def _plan(job: Job, steps: range, rank: int, mode: Mode) -> RankWindow:
    return plan_window(_all(job, steps, mode), rank, job[3].size)
