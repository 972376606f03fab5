"""Percentiles of latencies, from counts that ranks add up."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio_bench.storage_cases.latencies import Latencies

_SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60)


@given(_SECONDS, st.sampled_from((50.0, 99.0, 99.9)))
def test_a_percentile_is_exact_to_a_bin(seconds: list[float], share: float) -> None:
    exact = float(np.quantile(seconds, share / 100, method="inverted_cdf"))
    found_s = Latencies(seconds).percentile(share)
    assert exact * 0.9999 <= found_s <= exact * 1.0117


@given(_SECONDS, _SECONDS)
def test_merged_counts_are_those_of_all(first: list[float], second: list[float]) -> None:
    merged = Latencies(first)
    merged.merge(json.loads(json.dumps(Latencies(second).to_json())))
    assert merged.to_json() == Latencies([*first, *second]).to_json()
    assert len(merged) == len(first) + len(second)


def test_a_curve_ends_at_all_and_at_the_largest() -> None:
    seconds, shares = Latencies(np.geomspace(1e-4, 5, 3000)).curve()
    assert shares[-1] == pytest.approx(1.0)
    assert seconds[-1] == pytest.approx(5.0)
    assert list(shares) == sorted(shares)
    assert list(seconds) == sorted(seconds)


def test_without_latencies_there_is_nothing() -> None:
    empty = Latencies()
    assert (len(empty), empty.percentile(99), empty.curve()) == (0, 0.0, ((), ()))
