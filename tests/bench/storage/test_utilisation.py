"""Utilisation, throughput and the least time of an epoch, compared with numbers made by hand."""

from dataclasses import replace

import pytest

from dlio_bench.storage_cases.utilisation import StepTimes, least_seconds

FOUR = StepTimes(
    load_s=(2.0, 0.5, 0.0, 0.5),
    compute_s=(1.0,) * 4,
    over_s=(0.0,) * 4,
    seconds=6.5,
    batch_size=10,
)
"""Steps of 3, 1.5, 1 and 1.5 s, with 0.5 s less of waiting for other ranks."""


def test_the_first_step_does_not_count() -> None:
    # 6.5 s - (2 + 1) s are left, of which three steps compute.
    assert FOUR.counted_s == pytest.approx(3.5)
    assert FOUR.utilisation == pytest.approx(3 / 3.5)
    assert FOUR.throughput == pytest.approx(30 / 3.5)


def test_time_of_the_comparison_beyond_a_step_does_not_count() -> None:
    slow = replace(FOUR, over_s=(0.5, 0.0, 0.25, 0.25), seconds=7.5)
    assert slow.counted_s == pytest.approx(FOUR.counted_s)
    assert slow.utilisation == pytest.approx(FOUR.utilisation)


def test_dlio_counts_one_step_less_in_the_same_time() -> None:
    # statscounter.py of DLIO e1919d7: (len(compute) - 2) / total_time * batch_size.
    assert FOUR.dlio_throughput == pytest.approx(2 * 10 / 3.5)


def test_an_epoch_of_one_step_has_no_figures() -> None:
    one = StepTimes((1.0,), (1.0,), (0.0,), 2.0, 4)
    assert (one.utilisation, one.throughput, one.dlio_throughput) == (0.0, 0.0, 0.0)


def test_the_least_time_is_that_of_the_slower_part() -> None:
    # 100 bytes a step: at 1,000 B/s the accelerator is the limit, at 50 B/s the storage.
    assert least_seconds(10, 1.0, 100, 1000) == pytest.approx(0.1 + 10 * 1.0)
    assert least_seconds(10, 1.0, 100, 50) == pytest.approx(10 * 2.0 + 1.0)
