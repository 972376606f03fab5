"""Plans of all modes: every rank's agree, each sample is consumed once, no more moves than must."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.epoch import EpochPlan, GlobalPlan, check_mode, exchanged, plan_epoch
from dlio.plan.layout import Layout
from dlio.plan.order import Order, share
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import MaskedOrder, SampleMask, masked_layout
from dlio.plan.schedule import RankNodes, RankWindow, assign, plan_window, steps_in_epoch
from tests.conftest import examples

MODES = ("batch", "global", "ring", "local", "partial(0.1)", "partial(0.5)", "partial(1)")


@st.composite
def epochs(draw: st.DrawFn) -> EpochPlan:
    """As rank 0 sees it; of all samples or of those that are kept."""
    n = draw(st.integers(1, 300))
    cuts = draw(st.lists(st.integers(1, n), max_size=12))
    starts = np.unique([0, n, *cuts]).astype(np.int64)
    layout = Layout(starts, Order(n, 99, shuffled=draw(st.booleans())))
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    node_of = np.repeat(np.arange(len(nodes)), nodes).astype(np.int32)
    if draw(st.booleans()):
        node_of = np.random.default_rng(0).permutation(node_of)
    blocks = layout.blocks
    homes = draw(st.lists(st.integers(-1, len(nodes)), min_size=blocks, max_size=blocks))
    ranks = RankNodes(node_of)
    batch = draw(st.integers(1, 9))
    about = (draw(st.integers(0, 99)), draw(st.integers(0, 3)))
    order = Order(n, *about)
    if draw(st.booleans()):
        mask = np.random.default_rng(n).random(n) < draw(st.sampled_from([0.1, 0.6, 0.9]))
        mask[-1] = True
        kept = SampleMask.of(mask, n)
        n, order = kept.count, MaskedOrder(kept.count, *about, True, kept)
        layout = masked_layout(layout, kept)
    whole = batch * ranks.size
    position = draw(st.integers(0, n // whole)) * whole
    steps = steps_in_epoch(n, position, whole, draw(st.booleans()))
    home = np.array(homes, np.int32)
    shares = RankShares.even(batch, ranks.size)
    return EpochPlan(order, position, shares, steps, "batch", ranks, 0, home, layout)


@given(epochs(), st.sampled_from(["batch", "global"]), st.integers(0, 20), st.integers(0, 40))
@settings(max_examples=examples(200), deadline=None)
def test_the_only_rank_plans_as_one_of_several_would(
    plan: EpochPlan, mode: str, start: int, count: int
) -> None:
    shares = RankShares.even(plan.shares.global_batch, 1)
    values = {name: getattr(plan, name) for name in plan.__slots__}
    alone = RankNodes(np.zeros(1, np.int32))
    plan = EpochPlan(**{**values, "mode": mode, "shares": shares, "ranks": alone, "rank": 0})
    start = min(start, plan.steps)
    steps = range(start, min(plan.steps, start + count))
    mine, dealt = plan.window(steps), plan_window(plan.dealt(steps), 0, 1)
    assert mine.steps == dealt.steps
    for name in ("samples", "starts", "senders"):
        one, other = getattr(mine, name), getattr(dealt, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other), name
    assert mine.sends == dealt.sends == {}


def _of(plan: EpochPlan, mode: str, rank: int) -> EpochPlan:
    values = {name: getattr(plan, name) for name in plan.__slots__}
    return EpochPlan(**{**values, "mode": mode, "rank": rank})


def _windows(plan: EpochPlan, mode: str) -> list[RankWindow]:
    return [
        plan_epoch(_of(plan, mode, rank)).window(range(plan.steps))
        for rank in range(plan.ranks.size)
    ]


def _check(plan: EpochPlan, windows: list[RankWindow]) -> None:
    """Whatever the mode."""
    ranks, whole = plan.ranks, plan.shares.global_batch
    for step in range(plan.steps):
        count = min(whole, plan.order.n - plan.position - step * whole)
        sizes = [w.starts[step + 1] - w.starts[step] for w in windows]
        shares = [len(share(count, ranks.size, rank)) for rank in range(ranks.size)]
        if plan.mode == "ring":
            sizes, shares = sorted(sizes), sorted(shares)
        assert sizes == shares
    for rank, window in enumerate(windows):
        for sender in range(ranks.size):
            pushed = windows[sender].sends.get(rank, np.empty(0, np.int64))
            assert np.array_equal(window.samples[window.senders == sender], pushed)
        homes = plan.home[plan.layout.block_of(window.samples)]
        homes[homes >= ranks.nodes] = -1
        moved = window.senders >= 0
        assert (homes[moved] == ranks.node_of[window.senders[moved]]).all()
        assert np.array_equal(~moved, np.isin(homes, [-1, ranks.node_of[rank]]))


@settings(max_examples=examples(150), deadline=None)
@given(epochs(), st.sampled_from(MODES))
def test_plans_of_all_ranks_agree_and_give_each_sample_once(plan: EpochPlan, mode: str) -> None:
    windows = _windows(plan, mode)
    _check(_of(plan, mode, 0), windows)
    consumed = np.concatenate([window.samples for window in windows])
    assert len(np.unique(consumed)) == len(consumed)
    left = plan.order.n - plan.position
    expected = min(left, plan.steps * plan.shares.global_batch)
    assert len(consumed) == expected


@settings(max_examples=examples(60), deadline=None)
@given(epochs(), st.sampled_from(["local", "ring", "partial(0.3)"]), st.data())
def test_inexact_modes_give_each_sample_once_by_uneven_shares(
    plan: EpochPlan, mode: str, data: st.DataObject
) -> None:
    """As when fewer ranks go on with a global batch that their number does not divide."""
    ranks = plan.ranks.size
    shares = RankShares.of(data.draw(st.integers(ranks, 9 * ranks)), ranks)
    whole = shares.global_batch
    steps = steps_in_epoch(plan.order.n, 0, whole)
    uneven = replace(plan, position=0, steps=steps, shares=shares)
    windows = _windows(uneven, mode)
    consumed = np.sort(np.concatenate([window.samples for window in windows]))
    assert np.array_equal(consumed, np.sort(plan.order.samples(np.arange(plan.order.n))))
    for rank, window in enumerate(windows):
        for sender in range(ranks):
            pushed = windows[sender].sends.get(rank, np.empty(0, np.int64))
            assert np.array_equal(window.samples[window.senders == sender], pushed)
        if mode != "ring":
            assert (np.diff(window.starts)[: plan.order.n // whole] == shares.counts[rank]).all()


@settings(max_examples=examples(100), deadline=None)
@given(epochs(), st.sampled_from(["local", "ring", "partial(0.3)"]), st.data())
def test_ranks_that_are_left_take_over_what_their_neighbours_would_have_consumed(
    plan: EpochPlan, mode: str, data: st.DataObject
) -> None:
    ranks = plan.ranks
    left = tuple(sorted(data.draw(st.sets(st.integers(0, ranks.size - 1), min_size=1))))
    before = _windows(plan, mode)
    windows = {
        rank: plan_epoch(replace(plan, mode=mode, rank=rank, left=left)).window(range(plan.steps))
        for rank in left
    }
    stranger = plan_epoch(replace(plan, mode=mode, rank=-1, left=left)).window(range(plan.steps))
    assert len(stranger.samples) == 0
    for step in range(plan.steps):
        taken = Counter(
            sample
            for window in windows.values()
            for sample in window.samples[window.starts[step] : window.starts[step + 1]].tolist()
        )
        dealt = [w.samples[w.starts[step] : w.starts[step + 1]] for w in before]
        assert taken == Counter(np.concatenate(dealt).tolist())
        for rank, samples in enumerate(dealt):
            near = [each for each in left if ranks.node_of[each] == ranks.node_of[rank]]
            for sample in samples.tolist() if near else []:
                by = [
                    each
                    for each, w in windows.items()
                    if sample in w.samples[w.starts[step] : w.starts[step + 1]]
                ]
                assert ranks.node_of[by[0]] == ranks.node_of[rank]


@settings(max_examples=examples(60), deadline=None)
@given(epochs(), st.sampled_from(["local", "ring", "partial(0.3)"]), st.integers(1, 4))
def test_an_inexact_epoch_is_the_same_in_parts(plan: EpochPlan, mode: str, length: int) -> None:
    """Windows make no difference, nor does going on at a step."""
    first = plan.position // plan.shares.global_batch
    values = {name: getattr(plan, name) for name in plan.__slots__}
    start = EpochPlan(**{**values, "position": 0, "steps": first + plan.steps})
    for rank in range(plan.ranks.size):
        full, rest = plan_epoch(_of(start, mode, rank)), plan_epoch(_of(plan, mode, rank))
        for begin in range(0, plan.steps, length):
            end = min(begin + length, plan.steps)
            a, b = rest.window(range(begin, end)), full.window(range(first + begin, first + end))
            assert np.array_equal(a.samples, b.samples)
            assert np.array_equal(a.senders, b.senders)
            assert a.sends.keys() == b.sends.keys()
            assert all(np.array_equal(a.sends[k], b.sends[k]) for k in a.sends)


@settings(max_examples=examples(100), deadline=None)
@given(epochs())
def test_the_plan_for_many_nodes_is_that_of_the_whole_batch(plan: EpochPlan) -> None:
    for rank in range(plan.ranks.size):
        one = _of(plan, "global", rank)
        for steps in (range(plan.steps), range(plan.steps // 2, plan.steps)):
            mine = GlobalPlan(one).window(steps)
            batch = plan_epoch(one).window(steps)
            assert np.array_equal(mine.samples, batch.samples)
            assert np.array_equal(mine.senders, batch.senders)
            assert np.array_equal(mine.starts, batch.starts)
            assert mine.sends.keys() == batch.sends.keys()
            assert all(np.array_equal(mine.sends[k], batch.sends[k]) for k in mine.sends)


def _even(n: int, nodes: int, local: int, batch: int, mode: str, rank: int = 0) -> EpochPlan:
    layout = Layout(np.arange(0, n + 1, 100, dtype=np.int64), Order(n, 5))
    home = (np.random.default_rng(0).permutation(n // 100) % nodes).astype(np.int32)
    ranks = RankNodes(np.repeat(np.arange(nodes), local).astype(np.int32))
    steps = steps_in_epoch(n, 0, batch * ranks.size)
    shares = RankShares.even(batch, ranks.size)
    return EpochPlan(Order(n, 3, 1), 0, shares, steps, mode, ranks, rank, home, layout)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_partial_moves_its_fraction_and_local_nothing(fraction: float) -> None:
    nodes, n = 4, 40_000
    plan = _even(n, nodes, 2, 16, f"partial({fraction})")
    moved = sum(int((w.senders >= 0).sum()) for w in _windows(plan, plan.mode))
    # An exchange meets its own node's now and then.
    assert moved / n == pytest.approx(fraction * (1 - 1 / nodes), abs=0.01)
    if not fraction:
        assert moved == 0


def test_what_a_node_lacks_is_mixed_evenly_into_its_epoch() -> None:
    """Half of the data is in the source alone, and one node holds more than its share."""
    plan = _even(20_000, 2, 1, 10, "local")
    home = plan.home.copy()
    home[::2] = -1
    home[1::6] = 0
    values = {name: getattr(plan, name) for name in plan.__slots__}
    for rank in range(2):
        window = plan_epoch(EpochPlan(**{**values, "home": home, "rank": rank})).window(
            range(plan.steps)
        )
        away = home[plan.layout.block_of(window.samples)] != rank
        tenths = away.reshape(10, -1).mean(1)
        assert tenths == pytest.approx(np.full(10, away.mean()), abs=0.01)


def test_a_ring_hands_each_ranks_samples_to_one_other_until_all_have_had_all() -> None:
    nodes, n, batch = 6, 6000, 10
    plan = _even(n, nodes, 1, batch, "ring")
    values = {name: getattr(plan, name) for name in plan.__slots__}
    seen: dict[int, list[set[int]]] = {rank: [] for rank in range(nodes)}
    for epoch in range(60):
        values["order"] = Order(n, 3, epoch)
        for rank in range(nodes):
            window = plan_epoch(EpochPlan(**{**values, "rank": rank})).window(range(plan.steps))
            seen[rank].append(set(window.samples.tolist()))
            # One partner at a time: the node that holds the samples of the rank's turn.
            assert len(np.unique(window.senders)) == 1
            assert len(window.sends) <= 1
    for epoch in range(59):
        before = [seen[rank][epoch] for rank in range(nodes)]
        after = [seen[rank][epoch + 1] for rank in range(nodes)]
        assert all(samples in before for samples in after)
        assert all(seen[rank][epoch] != seen[rank][epoch + 1] for rank in range(nodes))
    for rank in range(nodes):
        assert len(set.union(*seen[rank])) == n


@pytest.mark.parametrize("mode", ["local", "partial(0.2)"])
def test_inexact_epochs_differ_and_are_well_mixed(mode: str) -> None:
    n = 40_000
    plan = _even(n, 4, 1, 10, mode)
    values = {name: getattr(plan, name) for name in plan.__slots__}
    seen = []
    for epoch in range(2):
        order = Order(n, 3, epoch)
        seen.append(plan_epoch(EpochPlan(**{**values, "order": order})).window(range(plan.steps)))
    first, second = (window.samples for window in seen)
    assert not np.array_equal(first, second)
    shared = np.intersect1d(first, second).size / first.size
    assert shared > 0.6 if mode != "local" else shared == 1.0
    # No run of positions prefers some of the node's samples.
    ranks = np.argsort(np.argsort(first))
    assert abs(np.corrcoef(ranks[:-1], ranks[1:])[0, 1]) < 0.03
    counts = np.histogram2d(np.arange(len(ranks)), ranks, bins=10)[0]
    expected = counts.sum() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 160  # 99 degrees: 3.5 sigma.


def test_a_thousand_ranks_plan_an_epoch_in_time_and_memory() -> None:
    """1.28 million samples on 128 nodes of 8; generous, for the machine may be busy."""
    for mode in ("global", "ring", "local", "partial(0.1)"):
        plan = _even(1_280_000, 128, 8, 32, mode, rank=77)
        began = time.process_time()
        window = plan_epoch(plan).window(range(plan.steps))
        assert len(window.samples) == 1250
        assert time.process_time() - began < 20
    sizes = [len(part) for part in window.sends.values()]
    assert sum(sizes) == pytest.approx(125, rel=0.5)


def test_positions_up_to_a_trillion_are_addressed() -> None:
    n = 10**12
    order = Order(n, 7)
    positions = np.array([0, 1, n // 2, n - 2, n - 1], np.int64)
    samples = order.samples(positions)
    assert len(np.unique(samples)) == 5
    assert np.array_equal(order.positions(samples), positions)
    layout = Layout(np.arange(0, n + 1, 10**9, dtype=np.int64), Order(n, 0, shuffled=False))
    ranks = RankNodes(np.arange(8, dtype=np.int32))
    home = (np.arange(layout.blocks) % 8).astype(np.int32)
    steps = range(10**9, 10**9 + 2)
    shares, home_of = RankShares.even(64, 8), lambda s: home[layout.block_of(s)]
    dealt = assign(order, 0, shares, steps, home_of, ranks, "batch")
    assert len(dealt.samples) == 2 * 8 * 64


def test_modes_are_named_and_others_refused() -> None:
    assert exchanged("partial(0.25)") == 0.25
    assert exchanged("local") == 0
    for mode in ("partial(2)", "partial(-0.1)", "partial()", "chaos", "", "partial(x)", None):
        with pytest.raises(UsageError, match=r"choose batch, global, ring, local or partial"):
            check_mode(mode)
    plan = _even(1000, 2, 1, 10, "local")
    values = {name: getattr(plan, name) for name in plan.__slots__}
    with pytest.raises(UsageError, match="within a global batch"):
        plan_epoch(EpochPlan(**{**values, "position": 7}))
