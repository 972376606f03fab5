"""The rule for skipping samples: it skips the requested share, and gradients stay unbiased."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.features.skipping.skip_rule import (
    CERTAIN,
    SHARE,
    Codes,
    SkipRule,
    Table,
    encode_losses,
    keep_probabilities,
    probability_table,
    sample_mask,
    update_codes,
)
from dlio.plan.sample_mask import STRETCH
from tests.conftest import examples

RULE = SkipRule(10, 0.4, easy=math.inf)


def _scores(n: int, spread: float = 2.0, seed: int = 0) -> Codes:
    losses = np.exp(np.random.default_rng(seed).normal(-0.5, spread, n))
    return encode_losses(losses.astype(np.float32))


def _table(scores: Codes, rule: SkipRule) -> Table:
    return probability_table(np.bincount(scores, minlength=256), rule)


def test_codes_rise_with_losses_and_encode_them_to_a_few_percent() -> None:
    losses = np.geomspace(2.0**-9.9, 2.0**5.8, 1000)
    codes = encode_losses(losses)
    assert (np.diff(codes.astype(int)) >= 0).all()
    back = 2.0 ** (-10 + (codes - 1.0) / 16)
    assert back == pytest.approx(losses, rel=0.03)
    extremes = encode_losses(np.array([0.0, -1.0, np.inf, np.nan, 1e30]))
    assert extremes.tolist() == [1, 1, 255, 255, 255]


def test_stored_codes_rise_at_once_and_fall_by_half() -> None:
    scores = np.array([0, 0, 100, 100, 100, 1], np.uint8)
    seen = np.array([0, 7, 0, 200, 20, 1], np.uint8)
    assert update_codes(scores, seen).tolist() == [0, 7, 100, 200, 60, 1]
    fallen = np.array([200], np.uint8)
    for _ in range(20):
        fallen = update_codes(fallen, np.array([20], np.uint8))
    assert 20 <= fallen[0] <= 21


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(0.05, SHARE), st.floats(0.01, 4), st.integers(0, 9), st.integers(8, 20))
def test_the_requested_share_is_skipped(
    share: float, spread: float, seed: int, revisit: int
) -> None:
    rule = SkipRule(10, share, revisit=revisit, easy=math.inf)
    scores = _scores(20_000, spread, seed)
    table = _table(scores, rule)
    assert (np.diff(table[1:]) >= 0).all()
    assert table.min() >= rule.floor * CERTAIN - 1
    assert table.max() <= CERTAIN
    kept = sample_mask(scores, table, seed, 3, revisit)
    assert 1 - kept.count / kept.samples == pytest.approx(share, abs=0.02)


def test_samples_that_the_network_is_unsure_of_are_kept() -> None:
    """Unsure samples are kept whatever the share; sure ones are skipped up to the share."""
    rule = SkipRule(10, 0.5)
    losses = np.array([0.05] * 600 + [0.6] * 100 + [0.8] * 300)  # 1 - p: 0.05, 0.45, 0.55.
    scores = encode_losses(losses)
    kept = sample_mask(scores, _table(scores, rule), 0, 1, rule.revisit)
    assert kept.holds(np.arange(700, 1000)).all()
    assert 0.8 < kept.holds(np.arange(600, 700)).mean() < 1
    assert kept.holds(np.arange(600)).mean() == pytest.approx(0.2 + 0.8 / 8, abs=0.06)
    unsure = encode_losses(np.full(1000, 1.2))
    assert sample_mask(unsure, _table(unsure, rule), 0, 1, 8).count == 1000
    # With enough easy samples the whole share is skipped.
    easy = np.tile(scores[:600], 5)
    few = sample_mask(easy, _table(easy, rule), 0, 1, rule.revisit)
    assert few.count / few.samples == pytest.approx(0.5, abs=0.04)


def test_samples_without_a_loss_are_kept() -> None:
    scores = _scores(5000)
    scores[::3] = 0
    table = _table(scores, RULE)
    kept = sample_mask(scores, table, 0, 1, RULE.revisit)
    assert kept.holds(np.arange(0, 5000, 3)).all()
    nothing = probability_table(np.bincount(np.zeros(9, np.int64), minlength=256), RULE)
    assert nothing[0] == CERTAIN


def test_each_sample_is_seen_within_its_turn_and_low_losses_less_often() -> None:
    scores = _scores(4000)
    table = _table(scores, RULE)
    ids = np.arange(4000)
    seen = np.array(
        [sample_mask(scores, table, 5, epoch, RULE.revisit).holds(ids) for epoch in range(40)]
    )
    for begin in range(40 - RULE.revisit):
        assert seen[begin : begin + RULE.revisit].any(0).all()
    rates = seen.mean(0)
    low, high = scores < np.quantile(scores, 0.2), scores > np.quantile(scores, 0.8)
    assert rates[low].mean() < 0.4
    assert rates[high].mean() > 0.95


def test_samples_are_kept_with_their_probability() -> None:
    """Chi-square over samples: the count in 600 draws against the probability."""
    scores = _scores(1000)
    table = _table(scores, RULE)
    ids = np.arange(1000)
    counts, expected, variance = np.zeros(1000), np.zeros(1000), np.zeros(1000)
    for epoch in range(600):
        chance = keep_probabilities(ids, scores, table, 7, epoch, RULE.revisit) / CERTAIN
        counts += sample_mask(scores, table, 7, epoch, RULE.revisit).holds(ids)
        expected += chance
        variance += chance * (1 - chance)
    free = variance > 0
    assert (counts[~free] == expected[~free]).all()
    square = ((counts - expected)[free] ** 2 / variance[free]).sum()
    degrees = int(free.sum())
    assert degrees > 500
    assert abs(square - degrees) < 4 * np.sqrt(2 * degrees)


def test_weighted_sums_of_kept_samples_are_those_of_all_on_average() -> None:
    """Compute the exact expectation over all 2^n outcomes of a small data set."""
    scores = encode_losses(np.array([0.01, 0.1, 0.3, 0.8, 1.5, 2.5, 0.05, 0.6]))
    table = _table(scores, RULE)
    ids, values = np.arange(8), np.random.default_rng(0).normal(size=8)
    chance = keep_probabilities(ids, scores, table, 1, 2, RULE.revisit) / CERTAIN
    assert (chance < 1).sum() >= 3
    mean = 0.0
    for outcome in range(256):
        kept = (outcome >> ids & 1).astype(bool)
        likely = float(np.prod(np.where(kept, chance, 1 - chance)))
        if likely:
            # The mean of a step over kept samples, with weights normalised to mean 1.
            weights = kept.sum() / 8 / chance
            mean += likely * float((weights * values)[kept].sum() / kept.sum())
    assert mean == pytest.approx(values.mean(), abs=1e-12)


def test_draws_are_the_same_in_any_stretch_and_other_ones_in_another_epoch() -> None:
    n = STRETCH + 77
    scores = np.tile(_scores(97), n // 97 + 1)[:n]
    table = _table(scores, RULE)
    one, same = (sample_mask(scores, table, 1, 4, RULE.revisit) for _ in range(2))
    assert one.digest == same.digest
    few = sample_mask(scores[:1000], table, 1, 4, RULE.revisit)
    assert np.array_equal(few.holds(np.arange(1000)), one.holds(np.arange(1000)))
    tail = np.arange(STRETCH - 50, n)
    assert 0.4 < one.holds(tail).mean() < 0.8
    for other in (sample_mask(scores, table, 1, 5, 8), sample_mask(scores, table, 2, 4, 8)):
        assert other.digest != one.digest


def test_the_first_and_the_last_epoch_keep_all_samples() -> None:
    assert [SkipRule(8).sees_all(epoch) for epoch in range(8)] == [True] + [False] * 6 + [True]
    assert SkipRule(100).ending == 12
    first_two = SkipRule(4, last=0, first=2)
    assert [first_two.sees_all(epoch) for epoch in range(4)] == [True, True, False, False]


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
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SkipRule(10, **wrong)  # type: ignore[arg-type]
