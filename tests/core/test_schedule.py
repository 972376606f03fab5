"""Plans deal each global batch exactly once, agree between ranks, and move little."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.order import Order, share
from dlio.schedule import Mode, Ranks, Window, assign, plan_window, steps_in_epoch, window_steps

modes = st.sampled_from(["batch", "global"])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Order, int, int, Ranks, npt.NDArray[np.int32]]:
    """(order, position, batch size, ranks, home of each sample)."""
    n = draw(st.integers(1, 200))
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    node_of = np.repeat(np.arange(len(nodes)), nodes).astype(np.int32)
    if draw(st.booleans()):  # Ranks dealt round robin, as some launchers do.
        node_of = np.sort(node_of)[np.random.default_rng(0).permutation(len(node_of))]
    homes = draw(st.lists(st.integers(-1, len(nodes) - 1), min_size=n, max_size=n))
    order = Order(n, draw(st.integers(0, 99)), draw(st.integers(0, 3)))
    position = draw(st.integers(0, n))
    return order, position, draw(st.integers(1, 9)), Ranks(node_of), np.array(homes, np.int32)


@settings(max_examples=150)
@given(jobs(), modes)
def test_plans_of_all_ranks_fit_together(
    job: tuple[Order, int, int, Ranks, npt.NDArray[np.int32]], mode: Mode
) -> None:
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


@given(jobs(), modes, st.integers(1, 5))
def test_windows_make_no_difference(
    job: tuple[Order, int, int, Ranks, npt.NDArray[np.int32]], mode: Mode, length: int
) -> None:
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
    moved = {}
    for mode in ("batch", "global"):
        dealt = assign(Order(n, 3), 0, batch, steps, lambda s: homes[s], Ranks(node_of), mode)
        moved[mode] = float((dealt.sender >= 0).mean())
    node_batch = batch * ranks_a_node
    # Of node_batch·nodes samples, the excess of one node over node_batch: a binomial's.
    binomial = 1 / math.sqrt(2 * math.pi * node_batch) * math.sqrt(1 - 1 / nodes)
    assert moved["batch"] == pytest.approx(binomial, rel=0.1)
    assert moved["global"] == pytest.approx(1 - 1 / nodes, rel=0.02)


def test_two_nodes_of_batch_32_move_at_most_12_percent() -> None:
    homes = (np.arange(20_000) % 2).astype(np.int32)
    ranks = Ranks(np.array([0, 1], np.int32))
    dealt = assign(Order(20_000, 0), 0, 32, range(313), lambda s: homes[s], ranks, "batch")
    assert (dealt.sender >= 0).mean() <= 0.12


def test_a_receiver_gets_one_message_per_peer_node() -> None:
    node_of = np.repeat(np.arange(3), 4).astype(np.int32)
    homes = (np.arange(5000) % 3).astype(np.int32)
    for rank in range(12):
        window = plan_window(
            Order(5000, 0), 0, 8, range(20), lambda s: homes[s], Ranks(node_of), rank, "global"
        )
        senders = np.unique(window.senders[window.senders >= 0])
        assert len(senders) == 2
        assert len(set(node_of[senders])) == 2


def test_windows_are_bounded_by_bytes() -> None:
    assert window_steps(100_000, 32, 16 << 20) == 5
    assert window_steps(1e9, 32, 16 << 20) == 1
    assert steps_in_epoch(100, 0, 30) == 4
    assert steps_in_epoch(100, 0, 30, drop_last=True) == 3
    assert steps_in_epoch(100, 100, 30) == 0


def _plan(
    job: tuple[Order, int, int, Ranks, npt.NDArray[np.int32]], steps: range, rank: int, mode: Mode
) -> Window:
    order, position, batch, ranks, homes = job
    return plan_window(order, position, batch, steps, lambda s: homes[s], ranks, rank, mode)
