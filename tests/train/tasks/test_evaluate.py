"""`dlio eval`, averages of weights, and schedules of the learning rate."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.train.learning_rate import SCHEDULES, learning_rate
from tests.conftest import has_feature

Dlio = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.mpi
def test_evaluation_alone_gives_the_metrics_of_the_run(
    dlio: Dlio, pictures: Path, tmp_path: Path
) -> None:
    narrow = ("--model", "resnet(width=4)")
    averaged = ("--ema", "0.9") if has_feature("ema") else ()
    done = dlio(
        *("train", str(pictures), "--image-size", "32", "--epochs", "2", "--save", "w.pt"),
        *(*narrow, "--report", "r.json", *averaged, "--lr-schedule", "linear"),
    )
    assert done.returncode == 0, done.stderr
    trained = json.loads((tmp_path / "r.json").read_text())["epochs"][-1]
    common = ("eval", str(pictures / "val"), "--weights", "w.pt", "--image-size", "32")
    for ranks in ("1", "2"):
        alone = dlio(*common, *narrow, "-n", ranks, "--report", "e.json")
        assert alone.returncode == 0, alone.stderr
        measured = json.loads((tmp_path / "e.json").read_text())
        assert measured["metrics"]["accuracy"] == trained["val_accuracy"]
        assert measured["metrics"]["loss"] == pytest.approx(trained["metrics"]["loss"], rel=1e-5)
    other = dlio(*common, "--model", "resnet(width=8)")
    assert other.returncode == 2
    assert "give the --model" in other.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_reaches_its_peak(schedule: str) -> None:
    rates = [learning_rate(1.0, done, 10, 1000, schedule) for done in range(0, 1000, 10)]
    assert rates[0] < 0.1
    assert max(rates) == 1.0
    assert rates.index(max(rates)) <= 15
    after = rates[16:]
    assert after == sorted(after, reverse=True)
    assert rates[-1] == pytest.approx({"constant": 1.0, "step": 0.01}.get(schedule, 0.0), abs=0.02)
