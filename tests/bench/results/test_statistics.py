"""Confidence intervals of medians and ratios."""

import numpy as np
import pytest

from dlio_bench.results.repeats import interval_of_median, interval_of_ratio


def test_an_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        mine, other = random.normal(2.0, 0.2, 12), random.normal(1.0, 0.1, 12)
        interval = interval_of_ratio(mine.tolist(), other.tolist())
        assert interval is not None
        covered += interval[0] <= 2.0 <= interval[1]
    assert covered >= 52


def test_equal_repeats_have_an_interval_without_width() -> None:
    assert interval_of_median([2.0] * 6) == (2.0, 2.0)
    assert interval_of_ratio([3.0] * 6, [2.0] * 6) == (1.5, 1.5)


def test_intervals_are_reproducible() -> None:
    values = [1.0, 1.2, 0.9, 1.1, 1.3, 1.05]
    assert interval_of_median(values) == interval_of_median(values)


@pytest.mark.parametrize(("mine", "other"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_there_is_no_interval_of_one_value_or_over_zero(
    mine: list[float], other: list[float]
) -> None:
    assert interval_of_ratio(mine, other) is None
