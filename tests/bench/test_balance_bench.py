"""The benchmark of balancing trains what it says, on little data."""

import pytest

from dlio_bench.balance import measure


@pytest.mark.mpi
def test_a_slowed_rank_gets_less_and_the_ideal_is_told() -> None:
    told = measure(1, (2,), images=128, epochs=2, sample_s=0.002)["2_ranks"]
    # 2 and 6 ms a sample: 500 and 167 samples a second.
    assert told["asked_s"] == pytest.approx(128 / (500 + 500 / 3))
    assert told["ideal_s"]["min"] >= told["asked_s"]
    for name in ("even", "first", "balanced"):
        expected = told[f"{name}_s"]["median"] / told["ideal_s"]["median"]
        assert told[f"{name}_over_ideal"]["median"] == pytest.approx(expected)
    ((fast, slow),) = told["shares"]
    assert fast + slow == 64
    assert fast > slow
