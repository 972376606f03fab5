"""Mixtures: exact counts, epochs of each source, ends of an epoch, ledgers."""

import json
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.fair_counts import FairCounts, largest_remainder
from dlio.plan.mixture import MixtureEpoch, MixtureOrder, MixtureRule
from tests.conftest import examples

_I64 = npt.NDArray[np.int64]
_parts = st.lists(st.integers(0, 10**6), min_size=1, max_size=7).filter(any)


def _weights(*parts: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(part, sum(parts)) for part in parts)


def _mixing(
    *schedule: tuple[int, tuple[int, ...]],
    sizes: tuple[int, ...] = (70, 200, 31),
    exhaustion: str = "repeat",
    samples: int | None = 500,
) -> MixtureRule:
    names = tuple("abcdefgh"[: len(sizes)])
    changes = tuple((step, _weights(*parts)) for step, parts in schedule)
    return MixtureRule(
        names, sizes, exhaustion, None if exhaustion != "repeat" else samples, changes
    )


def _order(epoch: MixtureEpoch, number: int = 0, seed: int = 5) -> MixtureOrder:
    return epoch.order(seed, number, True)


def _sources(order: MixtureOrder, positions: _I64) -> _I64:
    """Source of each position."""
    assert order.mixed is not None
    firsts = np.cumsum((0, *order.mixed.mixing.sizes))
    owners: _I64 = np.searchsorted(firsts, order.samples(positions), side="right") - 1
    return owners


def _counts(order: MixtureOrder, batch: int, sources: int) -> _I64:
    """Samples of each source in each batch; shape (batches, sources)."""
    owners = _sources(order, np.arange(order.n))
    return np.array(
        [np.bincount(owners[at : at + batch], minlength=sources) for at in range(0, order.n, batch)]
    )


@settings(max_examples=examples(60), deadline=None)
@given(parts=_parts, batch=st.integers(1, 300))
def test_each_batch_and_all_totals_are_within_one_of_the_weights(
    parts: list[int], batch: int
) -> None:
    weights = _weights(*parts)
    totals = FairCounts(weights, batch).totals(np.arange(400, dtype=np.int64))
    assert (totals.sum(1) == batch * np.arange(400)).all()
    for source, weight in enumerate(weights):
        a_batch = np.diff(totals[:, source])
        exact = weight * batch
        assert a_batch.min() >= exact.__floor__()
        assert a_batch.max() <= exact.__ceil__()
        for step in range(0, 400, 13):
            assert abs(int(totals[step, source]) - exact * step) < 1


@settings(max_examples=examples(40), deadline=None)
@given(
    parts=st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=4).filter(any),
    batch=st.integers(1, 50),
)
def test_any_floating_point_weights_are_exact(parts: list[float], batch: int) -> None:
    exact = [Fraction(repr(part)) for part in parts]
    weights = tuple(each / sum(exact) for each in exact)
    totals = FairCounts(weights, batch).totals(np.arange(60, dtype=np.int64))
    for source, weight in enumerate(weights):
        for step in range(60):
            assert abs(int(totals[step, source]) - weight * batch * step) < 1


def test_endless_computations_are_refused() -> None:
    uneven = tuple(Fraction(p, 2**60) for p in (2**59 + 1, 2**58 + 1, 2**58 - 2))
    with pytest.raises(UsageError, match="round the weights"):
        FairCounts(uneven, 3).totals(np.array([2**39]))
    two = FairCounts((uneven[0], 1 - uneven[0]), 3).totals(np.array([2**39]))
    assert two.sum() == 3 * 2**39


def test_counts_far_on_are_those_of_going_there_batch_by_batch() -> None:
    weights = _weights(3, 4, 6)
    far = FairCounts(weights, 10).totals(np.array([10_007], np.int64))
    whole = FairCounts(weights, 10).totals(np.arange(10_008, dtype=np.int64))
    assert (far[0] == whole[-1]).all()
    uneven = tuple(Fraction(p, 1_000_003) for p in (123_457, 400_001, 476_545))
    again = FairCounts(uneven, 7)
    late = again.totals(np.array([3000], np.int64))
    assert (late == FairCounts(uneven, 7).totals(np.arange(3001, dtype=np.int64))[-1]).all()
    assert (again.totals(np.array([12], np.int64)) >= 0).all()


@settings(max_examples=examples(60), deadline=None)
@given(parts=_parts, batches=st.integers(0, 50), more=st.integers(1, 30))
def test_a_smaller_last_batch_brings_totals_close_to_the_weights(
    parts: list[int], batches: int, more: int
) -> None:
    weights = _weights(*parts)
    before = tuple(FairCounts(weights, 30).totals(np.array([batches], np.int64))[0].tolist())
    given = largest_remainder(weights, before, 30 * batches, more)
    assert sum(given) == more
    assert min(given) >= 0
    for weight, had, now in zip(weights, before, given, strict=True):
        assert abs(had + now - weight * (30 * batches + more)) < 2


@pytest.mark.parametrize("shuffled", [True, False])
def test_each_source_is_gone_through_before_it_repeats_a_sample(shuffled: bool) -> None:
    mixing = _mixing((0, (5, 1, 4)))
    seen = np.zeros(sum(mixing.sizes), np.int64)
    edges = np.cumsum(mixing.sizes)[:-1]
    ledger = None
    for number in range(4):
        epoch = mixing.epoch(number, 0, 16, False, ledger)
        order = epoch.order(9, number, shuffled)
        samples = order.samples(np.arange(order.n))
        for at in range(0, order.n, 16):
            np.add.at(seen, samples[at : at + 16], 1)
            assert all(np.ptp(part) <= 1 for part in np.split(seen, edges))
        ledger = epoch.following(False)
    assert seen.max() > 10


def test_epochs_of_a_source_have_orders_of_their_own() -> None:
    order = _order(_mixing((0, (1,)), sizes=(40,), samples=120).epoch(0, 0, 1, False))
    rounds = order.samples(np.arange(120)).reshape(3, 40)
    assert len({tuple(row) for row in rounds.tolist()}) == 3
    assert (np.sort(rounds, axis=1) == np.arange(40)).all()


def test_any_part_of_the_order_is_that_of_the_whole() -> None:
    order = _order(_mixing((0, (2, 3, 1)), (9, (1, 0, 1))).epoch(0, 0, 24, False))
    whole = order.samples(np.arange(order.n))
    picked = np.random.default_rng(0).permutation(order.n)[:80].reshape(8, 10)
    assert (order.samples(picked) == whole[picked]).all()
    with pytest.raises(UsageError, match="several positions"):
        order.positions(np.array([0]))


def test_places_within_a_batch_do_not_tell_the_source() -> None:
    order = _order(_mixing((0, (1, 1)), sizes=(400, 400), samples=3200).epoch(0, 0, 32, False))
    owners = _sources(order, np.arange(order.n)).reshape(-1, 32)
    by_place = owners.sum(0)
    # Each place is a fair coin in 100 batches: chi-square with 32 degrees of freedom, p = 1e-6.
    assert (((by_place - 50) ** 2) / 25).sum() < 90


def test_draws_of_a_source_are_uniform_by_chi_square() -> None:
    mixing = _mixing((0, (7, 3)), sizes=(50, 50), samples=1000)
    seen = np.zeros(100)
    for number in range(20):
        order = _order(mixing.epoch(number, 0, 20, False), number, seed=number)
        # The first quarter, in which no source has been gone through.
        seen += np.bincount(order.samples(np.arange(60)), minlength=100)
    for part, count in ((seen[:50], 20 * 42), (seen[50:], 20 * 18)):
        expected = count / 50
        assert part.sum() == count
        assert ((part - expected) ** 2 / expected).sum() < 110  # 49 degrees of freedom, p < 1e-6.


def test_stop_ends_before_a_source_repeats() -> None:
    mixing = _mixing((0, (7, 2, 1)), sizes=(70, 200, 31), exhaustion="stop")
    epoch = mixing.epoch(0, 0, 16, False)
    drawn = epoch.drawn(epoch.n)
    assert drawn[0] == 70
    assert drawn[1] <= 200
    assert drawn[2] <= 31
    assert 98 <= epoch.n <= 101  # 70 / 0.7, but for rounding.


def test_until_all_ends_when_each_source_was_gone_through() -> None:
    mixing = _mixing((0, (7, 2, 1)), sizes=(70, 200, 31), exhaustion="until_all")
    epoch = mixing.epoch(0, 0, 16, False)
    drawn = epoch.drawn(epoch.n)
    assert drawn[0] > 70
    assert drawn[1] == 200
    assert drawn[2] >= 31
    assert len(set(_order(epoch).samples(np.arange(epoch.n)).tolist())) == 301
    unused = _mixing((0, (7, 0, 1)), sizes=(70, 200, 31), exhaustion="until_all")
    assert unused.epoch(0, 0, 16, False).drawn(310)[1] == 0


@settings(max_examples=examples(40), deadline=None)
@given(
    parts=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    batch=st.integers(1, 40),
    data=st.data(),
)
def test_ends_are_as_the_policies_promise(
    parts: list[int], batch: int, data: st.DataObject
) -> None:
    sizes = tuple(data.draw(st.integers(60, 300)) for _ in parts)
    for exhaustion in ("stop", "until_all"):
        epoch = _mixing((0, tuple(parts)), sizes=sizes, exhaustion=exhaustion).epoch(
            0, 0, batch, False
        )
        drawn = epoch.drawn(epoch.n)
        assert sum(drawn) == epoch.n
        gaps = [have - size for have, size in zip(drawn, sizes, strict=True)]
        if exhaustion == "stop":
            assert max(gaps) <= 0
            assert max(gaps) >= -1
        else:
            assert min(gaps) >= 0
            assert min(gaps) <= 1
    repeat = _mixing((0, tuple(parts)), sizes=sizes, samples=777).epoch(3, 0, batch, False)
    assert repeat.n == 777


def test_weights_change_at_a_step_of_the_run_and_counts_stay_exact() -> None:
    mixing = _mixing((0, (7, 2, 1)), (20, (1, 1, 8)), (45, (0, 1, 0)))
    for drop_last, steps in ((False, 32), (True, 31)):
        ledger, step = None, 0
        for number in range(3):
            epoch = mixing.epoch(number, 0, 16, drop_last, ledger)
            assert epoch == mixing.epoch(number, 0, 16, drop_last)
            assert epoch.step == step
            assert epoch.steps(drop_last) == steps
            rows = _counts(_order(epoch, number), 16, 3)[:31]
            for k, row in enumerate(rows):
                now = [w for begin, w in mixing.schedule if begin <= step + k][-1]
                assert all(abs(int(n) - w * 16) < 1 for n, w in zip(row, now, strict=True))
            ledger = epoch.following(drop_last)
            step += steps


@settings(max_examples=examples(60), deadline=None)
@given(
    stop=st.integers(1, 31),
    batch=st.integers(1, 40),
    later=st.integers(0, 40),
    number=st.integers(0, 2),
)
def test_a_ledger_goes_on_with_any_other_batch(
    stop: int, batch: int, later: int, number: int
) -> None:
    mixing = _mixing((0, (7, 2, 1)), (20 + later, (1, 1, 8)))
    epoch = mixing.epoch(number, 0, 16, False)
    position = min(stop * 16, epoch.n)
    resumed = mixing.epoch(number, position, batch, False, epoch.text(position))
    assert resumed.n == epoch.n
    before, after = _order(epoch, number), _order(resumed, number)
    part = np.arange(position)
    assert (before.samples(part) == after.samples(part)).all()
    if batch == 16:
        assert resumed == epoch
    # Each source goes on where it was, so that no sample of its epoch is lost or seen twice.
    drawn = resumed.drawn(position)
    assert drawn == epoch.drawn(position)
    rest = np.arange(position, epoch.n)
    more = np.bincount(_sources(after, rest), minlength=3)
    total = tuple(a + int(b) for a, b in zip(drawn, more, strict=True))
    assert total == resumed.drawn(resumed.n)
    for segment in resumed.segments:
        assert segment.batch == 16 or segment.batch == batch


def test_the_ledger_of_another_mixture_or_a_damaged_one_is_refused() -> None:
    mixing = _mixing((0, (7, 2, 1)))
    text = mixing.epoch(0, 0, 16, False).text(32)
    with pytest.raises(UsageError, match="of a mixture of a \\(70\\)"):
        _mixing((0, (7, 2, 1)), sizes=(70, 71, 72)).epoch(0, 32, 16, False, text)
    for change in (
        {"schedule": [[1, "1 0 0"]]},
        {"schedule": [[0, "1 1 1"]]},
        {"drawn": [1, 2]},
        {"segments": [[5, 16, "1 0 0", [0, 0, 0]]]},
        {"segments": [[0, 0, "1 0 0", [0, 0, 0]]]},
        {"segments": [[0, 16, "1/0 0 0", [0, 0, 0]]]},
        {"step": -1},
        {"schedule": [[0, "1e999999999 0 0"]]},
        {"segments": [[0, 16, "1/1" + "0" * 5000 + " 0 0", [0, 0, 0]]]},
        {"n": "x"},
    ):
        damaged = json.dumps(json.loads(text) | change)
        with pytest.raises(UsageError, match="damaged ledger"):
            mixing.epoch(0, 32, 16, False, damaged)
    with pytest.raises(UsageError, match="damaged ledger"):
        mixing.epoch(0, 32, 16, False, "[" * 100_000)
    with pytest.raises(UsageError, match="position 900 of an epoch of 500"):
        mixing.epoch(0, 900, 16, False, text)
    with pytest.raises(UsageError, match="without its ledger"):
        mixing.epoch(0, 32, 16, False)
