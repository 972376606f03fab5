"""Shares: every sample once, in proportion, the same on all ranks; the slowest is done soonest."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.loader.shuffle.sample_shuffle import windows_of
from dlio.plan.epoch import EpochPlan, GlobalPlan, check_shares, plan_epoch
from dlio.plan.layout import Layout
from dlio.plan.order import Order, share
from dlio.plan.rank_shares import RankShares, checked_shares, fastest_shares
from dlio.plan.schedule import RankNodes, RankWindow, steps_in_epoch
from tests.conftest import examples

counts = st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple)
seconds = st.floats(1e-5, 10.0)


@given(counts, st.integers(0, 500))
def test_a_step_of_any_size_is_dealt_once_and_in_proportion(
    samples: tuple[int, ...], count: int
) -> None:
    shares = RankShares(samples)
    parts = [shares.part(count, rank) for rank in range(len(samples))]
    assert list(chain(*parts)) == list(range(count))
    for part, most in zip(parts, samples, strict=True):
        assert abs(len(part) - count * most / sum(samples)) < 1
        assert len(part) <= most or count > shares.global_batch
    assert [len(part) for part in parts] == shares.quotas(np.array([count]))[0].tolist()
    places = np.arange(count, dtype=np.int64)
    dealt = shares.deal(places, np.full(count, count, np.int64)).tolist()
    assert all(place in parts[rank] for place, rank in enumerate(dealt))


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 60))
def test_a_rank_gets_few_samples_or_none(batch: int, ranks: int, count: int) -> None:
    shares = RankShares((batch,) * ranks, fewest=2)
    parts = [shares.part(count, rank) for rank in range(ranks)]
    assert list(chain(*parts)) == list(range(count))
    assert all(len(part) != 1 for part in parts) or count == 1
    assert not count or len(parts[0])
    lengths = [len(part) for part in parts]
    assert lengths == shares.quotas(np.array([count]))[0].tolist()
    if count >= 2 * ranks:
        assert lengths == [len(RankShares.even(batch, ranks).part(count, r)) for r in range(ranks)]
    places = np.arange(count, dtype=np.int64)
    dealt = shares.deal(places, np.full(count, count, np.int64)).tolist()
    assert all(place in parts[rank] for place, rank in enumerate(dealt))


@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 200))
def test_equal_shares_are_the_even_ones(batch: int, ranks: int, count: int) -> None:
    shares = RankShares.even(batch, ranks)
    for rank in range(ranks):
        assert shares.part(count, rank) == share(count, ranks, rank)


@st.composite
def epochs(draw: st.DrawFn) -> EpochPlan:
    """With shares, as rank 0 sees it."""
    n = draw(st.integers(1, 300))
    cuts = draw(st.lists(st.integers(1, n), max_size=12))
    layout = Layout(np.unique([0, n, *cuts]).astype(np.int64), Order(n, 99))
    nodes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    ranks = RankNodes(np.repeat(np.arange(len(nodes)), nodes).astype(np.int32))
    batch = draw(st.integers(1, 9))
    cost = draw(st.lists(seconds, min_size=ranks.size, max_size=ranks.size))
    shares = fastest_shares(batch * ranks.size, [0.0] * ranks.size, cost)
    blocks = layout.blocks
    homes = draw(st.lists(st.integers(-1, len(nodes) - 1), min_size=blocks, max_size=blocks))
    position = draw(st.integers(0, n))
    steps = steps_in_epoch(n, position, batch * ranks.size, draw(st.booleans()))
    order, home = Order(n, draw(st.integers(0, 99))), np.array(homes, np.int32)
    return EpochPlan(order, position, shares, steps, "batch", ranks, 0, home, layout, 1 << 10)


def _of(plan: EpochPlan, mode: str, rank: int) -> EpochPlan:
    values = {name: getattr(plan, name) for name in plan.__slots__}
    return EpochPlan(**{**values, "mode": mode, "rank": rank})


@settings(max_examples=examples(150), deadline=None)
@given(epochs(), st.sampled_from(["batch", "global", "many nodes"]))
def test_plans_with_shares_agree_and_give_each_sample_once(plan: EpochPlan, mode: str) -> None:
    def window(rank: int) -> RankWindow:
        if mode == "many nodes":
            return GlobalPlan(_of(plan, "global", rank)).window(range(plan.steps))
        return plan_epoch(_of(plan, mode, rank)).window(range(plan.steps))

    windows = [window(rank) for rank in range(plan.ranks.size)]
    whole = plan.shares.global_batch
    for step in range(plan.steps):
        first = plan.position + step * whole
        expected = plan.order.samples(np.arange(first, min(first + whole, plan.order.n)))
        dealt = [w.samples[w.starts[step] : w.starts[step + 1]] for w in windows]
        assert sorted(np.concatenate(dealt)) == sorted(expected)
        sizes = [len(plan.shares.part(len(expected), rank)) for rank in range(plan.ranks.size)]
        assert [len(part) for part in dealt] == sizes
        assert max(sizes) <= max(plan.shares.counts)
    for rank, mine in enumerate(windows):
        for sender in range(plan.ranks.size):
            pushed = windows[sender].sends.get(rank, np.empty(0, np.int64))
            assert np.array_equal(mine.samples[mine.senders == sender], pushed)
    lengths = [windows_of(_of(plan, "batch", rank), 100.0) for rank in range(plan.ranks.size)]
    assert all(each == lengths[0] for each in lengths)
    if plan.ranks.nodes > 1:
        # A window's payloads fit the budget of the rank that takes most of each step.
        assert all(
            len(w) == 1 or len(w) * max(plan.shares.counts) * 100 <= 1 << 10 for w in lengths[0]
        )


@settings(max_examples=examples(60), deadline=None)
@given(epochs())
def test_the_plan_for_many_nodes_is_that_of_the_whole_batch(plan: EpochPlan) -> None:
    for rank in range(plan.ranks.size):
        one = _of(plan, "global", rank)
        for steps in (range(plan.steps), range(plan.steps // 2, plan.steps)):
            mine, batch = GlobalPlan(one).window(steps), plan_epoch(one).window(steps)
            assert np.array_equal(mine.senders, batch.senders)
            assert np.array_equal(mine.samples, batch.samples)
            assert np.array_equal(mine.starts, batch.starts)
            assert mine.sends.keys() == batch.sends.keys()
            assert all(np.array_equal(mine.sends[k], batch.sends[k]) for k in mine.sends)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(0, 60))
def test_the_slowest_rank_could_not_be_done_sooner(
    costs: list[tuple[float, float]], more: int
) -> None:
    """No other rank could take a sample off the slowest one's hands and be done before it."""
    fixed, per_sample = zip(*costs, strict=True)
    results = fastest_shares(len(costs) + more, fixed, per_sample)
    assert results.global_batch == len(costs) + more
    assert results == fastest_shares(len(costs) + more, fixed, per_sample)
    ends = [a + b * n for a, b, n in zip(fixed, per_sample, results.counts, strict=True)]
    slowest = int(np.argmax(ends))
    if results.counts[slowest] > 1:
        others = [
            a + b * (n + 1) for a, b, n in zip(fixed, per_sample, results.counts, strict=True)
        ]
        assert all(end >= ends[slowest] * (1 - 1e-9) for end in others)


def test_three_times_as_slow_takes_a_third_as_much() -> None:
    assert fastest_shares(64, [0, 0], [0.002, 0.006]).counts == (48, 16)
    assert fastest_shares(96, [0, 0, 0], [1, 1, 3]).counts == (42, 41, 13)
    # A rank with a large constant cost per step gets fewer samples.
    assert fastest_shares(64, [0.064, 0.0], [0.002, 0.002]).counts == (16, 48)
    # A rank that would be behind with any still has one: all take part in each step.
    assert fastest_shares(8, [0, 100], [1, 1]).counts == (7, 1)


def test_a_thousand_ranks_get_shares_that_sum_up() -> None:
    generator = np.random.default_rng(0)
    cost = generator.uniform(0.001, 0.1, 1000)
    results = fastest_shares(64_000, np.zeros(1000).tolist(), cost.tolist())
    assert results.global_batch == 64_000
    ideal_s = 64_000 / (1 / cost).sum()
    # A slow rank's fraction of a sample is given to the fast ones, whom it costs next to nothing.
    assert (np.array(results.counts) >= np.floor(ideal_s / cost)).all()
    assert (np.array(results.counts) * cost).max() < 1.02 * ideal_s


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((3, 0, 9), "a whole number of samples from 1"),
        ((6, 6), "3 numbers that sum to 12"),
        ((4, 4, 5), "3 numbers that sum to 12"),
    ],
)
def test_shares_that_cannot_be_say_what_to_give(counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked_shares(counts, 12, 3)


@pytest.mark.parametrize("mode", ["ring", "local", "partial(0.5)"])
def test_modes_that_give_all_ranks_alike_refuse_shares(mode: str) -> None:
    with pytest.raises(UsageError, match="choose mode batch or global"):
        check_shares(mode, True)
