"""The benchmark runs, counts every sample, and tells what it is asked to."""

from pathlib import Path

import pytest

from dlio.errors import UsageError
from dlio_bench.loader import Case, measure
from dlio_staging.pack import pack


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_its_small_form_measures_all_contenders_in_one_run(pictures: Path) -> None:
    found = measure(Case(str(pictures), image_size=32, batch_size=5, workers=2, repeats=2))
    assert found["samples"] == 12
    for name in ("torch", "torch_floats", "dlio", "ceiling"):
        rate = found["samples_per_s"][name]
        assert len(rate["all"]) == 2
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert found["dlio_bytes_of_last_pass"] == {
        "source": 0,
        "peer": 0,
        "ram": found["bytes"],
        "disk": 0,
    }
    ratios = [
        mine / torch
        for mine, torch in zip(
            found["samples_per_s"]["dlio"]["all"],
            found["samples_per_s"]["torch"]["all"],
            strict=True,
        )
    ]
    assert found["dlio_over_torch"]["median"] == pytest.approx(sum(ratios) / 2)
    assert found["machine"]["versions"]["torch"]


def test_packed_data_is_refused_with_a_reason(pictures: Path, tmp_path: Path) -> None:
    pack(str(pictures), str(tmp_path / "packed"))
    with pytest.raises(UsageError, match="is packed"):
        measure(Case(str(tmp_path / "packed")))
