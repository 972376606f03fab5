"""Which samples are skipped: the share that was asked for, and no bias, by losses that stay low."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.sample_mask import STRETCH
from dlio.train.skipping.rule import (
    CERTAIN,
    SHARE,
    SkipRule,
    chance_of,
    chances,
    encoded,
    kept_of,
    remembered,
)

RULE = SkipRule(10, 0.4, easy=math.inf)


def _scores(
    n: int, spread: float = 2.0, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    losses = np.exp(np.random.default_rng(seed).normal(-0.5, spread, n))
    return encoded(losses.astype(np.float32))


def test_codes_rise_with_losses_and_tell_them_to_a_few_percent() -> None:
    losses = np.geomspace(2.0**-9.9, 2.0**5.8, 1000)
    codes = encoded(losses)
    assert (np.diff(codes.astype(int)) >= 0).all()
    back = 2.0 ** (-10 + (codes - 1.0) / 16)
    assert back == pytest.approx(losses, rel=0.03)
    assert encoded(np.array([0.0, -1.0, np.inf, np.nan, 1e30])).tolist() == [1, 1, 255, 255, 255]


def test_what_is_remembered_rises_at_once_and_falls_by_half() -> None:
    scores = np.array([0, 0, 100, 100, 100, 1], np.uint8)
    seen = np.array([0, 7, 0, 200, 20, 1], np.uint8)
    assert remembered(scores, seen).tolist() == [0, 7, 100, 200, 60, 1]
    fallen = np.array([200], np.uint8)
    for _ in range(20):
        fallen = remembered(fallen, np.array([20], np.uint8))
    assert 20 <= fallen[0] <= 21


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, SHARE), st.floats(0.01, 4), st.integers(0, 9), st.integers(8, 20))
def test_the_share_that_is_asked_for_is_left_out(
    share: float, spread: float, seed: int, revisit: int
) -> None:
    rule = SkipRule(10, share, revisit=revisit, easy=math.inf)
    scores = _scores(20_000, spread, seed)
    table = chances(np.bincount(scores, minlength=256), rule)
    assert (np.diff(table[1:]) >= 0).all()
    assert table.min() >= rule.floor * CERTAIN - 1
    assert table.max() <= CERTAIN
    kept = kept_of(scores, table, seed, 3, revisit)
    assert 1 - kept.count / kept.samples == pytest.approx(share, abs=0.02)


def test_what_the_network_is_unsure_of_is_kept() -> None:
    """Whatever share is asked for; and what is sure is skipped, up to the share."""
    rule = SkipRule(10, 0.5)
    losses = np.array([0.05] * 600 + [0.6] * 100 + [0.8] * 300)  # 1 - p: 0.05, 0.45, 0.55.
    scores = encoded(losses)
    kept = kept_of(scores, chances(np.bincount(scores, minlength=256), rule), 0, 1, rule.revisit)
    assert kept.holds(np.arange(700, 1000)).all()
    assert 0.8 < kept.holds(np.arange(600, 700)).mean() < 1
    assert kept.holds(np.arange(600)).mean() == pytest.approx(0.2 + 0.8 / 8, abs=0.06)
    unsure = encoded(np.full(1000, 1.2))
    assert kept_of(unsure, chances(np.bincount(unsure, minlength=256), rule), 0, 1, 8).count == 1000
    # Where enough is easy it is the share.
    easy = np.tile(scores[:600], 5)
    few = kept_of(easy, chances(np.bincount(easy, minlength=256), rule), 0, 1, rule.revisit)
    assert few.count / few.samples == pytest.approx(0.5, abs=0.04)


def test_what_has_had_no_loss_is_kept() -> None:
    scores = _scores(5000)
    scores[::3] = 0
    table = chances(np.bincount(scores, minlength=256), RULE)
    kept = kept_of(scores, table, 0, 1, RULE.revisit)
    assert kept.holds(np.arange(0, 5000, 3)).all()
    nothing = chances(np.bincount(np.zeros(9, np.int64), minlength=256), RULE)
    assert nothing[0] == CERTAIN


def test_each_sample_is_seen_within_its_turn_and_low_losses_less_often() -> None:
    scores = _scores(4000)
    table = chances(np.bincount(scores, minlength=256), RULE)
    ids = np.arange(4000)
    seen = np.array(
        [kept_of(scores, table, 5, epoch, RULE.revisit).holds(ids) for epoch in range(40)]
    )
    for begin in range(40 - RULE.revisit):
        assert seen[begin : begin + RULE.revisit].any(0).all()
    rates = seen.mean(0)
    low, high = scores < np.quantile(scores, 0.2), scores > np.quantile(scores, 0.8)
    assert rates[low].mean() < 0.4
    assert rates[high].mean() > 0.95


def test_samples_are_kept_as_often_as_their_chance_says() -> None:
    """Chi-square over samples: each one's count of 600 draws against its chance."""
    scores = _scores(1000)
    table = chances(np.bincount(scores, minlength=256), RULE)
    ids = np.arange(1000)
    counts, expected, variance = np.zeros(1000), np.zeros(1000), np.zeros(1000)
    for epoch in range(600):
        chance = chance_of(ids, scores, table, 7, epoch, RULE.revisit) / CERTAIN
        counts += kept_of(scores, table, 7, epoch, RULE.revisit).holds(ids)
        expected += chance
        variance += chance * (1 - chance)
    free = variance > 0
    assert (counts[~free] == expected[~free]).all()
    square = ((counts - expected)[free] ** 2 / variance[free]).sum()
    degrees = int(free.sum())
    assert degrees > 500
    assert abs(square - degrees) < 4 * np.sqrt(2 * degrees)


def test_weighted_sums_of_kept_samples_are_those_of_all_on_average() -> None:
    """The exact expectation, over all 2^n outcomes of the draws of a small data set."""
    scores = encoded(np.array([0.01, 0.1, 0.3, 0.8, 1.5, 2.5, 0.05, 0.6]))
    table = chances(np.bincount(scores, minlength=256), RULE)
    ids, values = np.arange(8), np.random.default_rng(0).normal(size=8)
    chance = chance_of(ids, scores, table, 1, 2, RULE.revisit) / CERTAIN
    assert (chance < 1).sum() >= 3
    mean = 0.0
    for outcome in range(256):
        kept = (outcome >> ids & 1).astype(bool)
        likely = float(np.prod(np.where(kept, chance, 1 - chance)))
        if likely:
            # What a step's mean over kept samples is, with weights of 1 on average.
            weights = kept.sum() / 8 / chance
            mean += likely * float((weights * values)[kept].sum() / kept.sum())
    assert mean == pytest.approx(values.mean(), abs=1e-12)


def test_draws_are_the_same_in_any_stretch_and_other_ones_in_another_epoch() -> None:
    n = STRETCH + 77
    scores = np.tile(_scores(97), n // 97 + 1)[:n]
    table = chances(np.bincount(scores, minlength=256), RULE)
    one, same = (kept_of(scores, table, 1, 4, RULE.revisit) for _ in range(2))
    assert one.digest == same.digest
    few = kept_of(scores[:1000], table, 1, 4, RULE.revisit)
    assert np.array_equal(few.holds(np.arange(1000)), one.holds(np.arange(1000)))
    tail = np.arange(STRETCH - 50, n)
    assert 0.4 < one.holds(tail).mean() < 0.8
    for other in (kept_of(scores, table, 1, 5, 8), kept_of(scores, table, 2, 4, 8)):
        assert other.digest != one.digest


def test_the_first_epoch_and_the_last_see_all() -> None:
    assert [SkipRule(8).sees_all(epoch) for epoch in range(8)] == [True] + [False] * 6 + [True]
    assert SkipRule(100).ending == 12
    assert [SkipRule(4, last=0, first=2).sees_all(k) for k in range(4)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 0.0},
        {"share": 0.7},
        {"floor": 0.5},
        {"revisit": 2},
        {"first": 0},
        {"last": -1},
        {"easy": 0.0},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SkipRule(10, **wrong)  # type: ignore[arg-type]
