"""Figures of `dlio bench storage` and of DLIO side by side."""

import json
from pathlib import Path

import pytest

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio_bench.peers.environments import missing
from dlio_bench.storage_cases.side_by_side import (
    AgreementOptions,
    ProgramFigures,
    agreement,
    command,
    dlio_keys,
)


def test_medians_agree_within_3_percent_and_2_points() -> None:
    theirs = [
        ProgramFigures(90.0, 100.0, ()),
        ProgramFigures(91.0, 100.0, ()),
        ProgramFigures(10.0, 900.0, ()),
    ]
    for rate, au, agrees in (
        (102.5, 88.5, True),
        (104.0, 90.0, False),
        (96.0, 90.0, False),
        (100.0, 92.5, False),
    ):
        percent, points, within = agreement([ProgramFigures(au, rate, ())], theirs)
        assert percent == pytest.approx(rate - 100)
        assert points == pytest.approx(au - 90.0)
        assert within is agrees


def test_dlio_gets_the_same_settings(tmp_path: Path) -> None:
    case = AgreementOptions(
        str(tmp_path), files=64, batch_size=8, step_ms=50.0, epochs=2, workers=3
    )
    keys = dlio_keys(case, "torch", "/data", "/results")
    for key in (
        "dataset.data_folder=/data",
        "dataset.num_files_train=64",
        "dataset.record_length_bytes=262144",
        "reader.batch_size=8",
        "reader.read_threads=3",
        "train.epochs=2",
        "train.computation_time=0.05",
    ):
        assert f"++workload.{key}" in keys
    assert "hydra.run.dir=/results" in keys
    assert not any("classname" in key for key in keys)
    assert any("DlioLoader" in key for key in dlio_keys(case, "dlio", "/data", "/results"))


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give at least 32"):
        AgreementOptions(str(tmp_path), files=31)


@pytest.mark.nightly
@pytest.mark.skipif(missing("dlio_benchmark") is not None, reason="dlio_benchmark is absent")
def test_both_programs_read_the_same_files(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    case = AgreementOptions(str(tmp_path), files=64, sample_size="64KiB", epochs=2)
    command(case, OutputOptions(report=str(report)))
    made = json.loads(report.read_text())
    assert set(made["agreement"]) == {"torch", "dlio"}
    names = {(each["labels"]["loader"], each["labels"]["program"]) for each in made["figures"]}
    assert len(names) == 4
    # 8 steps of 100 ms at 2 ranks: no more than 80 samples a second, and no less than some.
    for each in made["figures"]:
        if each["unit"] == "samples/s":
            assert 0 < each["values"][0] < 85
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
