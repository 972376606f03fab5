"""`dlio bench prune` compares variants under equal conditions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlio.cli import main
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_surgery import apply
from dlio_bench.prune import images, removal_case, tabular
from dlio_bench.prune.curves import TrainingCurve, sooner
from dlio_bench.prune.prune_options import PruneBenchOptions


def test_variants_of_a_perceptron_are_as_large_as_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    argv = ["bench", "prune", "--case", "tabular", "--seeds", "1", "--epochs", "2"]
    argv += ["--width", "128", "--rows", "6000"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--report", str(report), "--plot", str(picture)])
    assert ended.value.code in (0, None)
    assert "narrow from the start" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(report.read_text())["tabular"]
    last = {name: curves[0] for name, curves in results["raw"].items()}
    whole = last.pop("unpruned")
    assert whole["widths"][-1] == [128, 128, 128]
    assert whole["accuracy"][-1] > 0.3  # Of ten classes.
    assert len({curve["parameters"][-1] for curve in last.values()}) == 1
    assert len({tuple(curve["widths"][-1]) for curve in last.values()}) == 1
    assert last["apoptosis"]["parameters"][-1] < whole["parameters"][-1]
    assert [row["variant"] for row in results["rows"]] == ["unpruned", *last]


@pytest.mark.nightly
def test_rows_that_are_left_out_are_not_read() -> None:
    results: dict[str, Any] = tabular.measure_rows(
        PruneBenchOptions(seeds=1, epochs=6, shrunk_epochs=6, width=64, rows=6000)
    )
    curves = {name: runs[0] for name, runs in results["raw"].items()}
    whole, some = curves["unpruned"]["extra"], curves["samples left out"]["extra"]
    assert whole["trained_on"] == 6 * 6000
    assert some["trained_on"] < whole["trained_on"]
    a_row = whole["read_MB"] / whole["trained_on"]
    assert some["read_MB"] == pytest.approx(a_row * some["trained_on"], rel=0.01)
    assert curves["both"]["parameters"][-1] <= curves["unpruned"]["parameters"][-1]
    work = some["trained_on"] / whole["trained_on"]
    assert len(curves["fewer epochs"]["seconds"]) == round(6 * work)


def test_rows_are_what_the_teacher_says_but_for_some() -> None:
    task = tabular.make_task(3, 4000)
    again = tabular.make_task(3, 4000)
    assert torch.equal(task.rows, again.rows)
    assert torch.equal(task.labels, again.labels)
    assert len(task.held_out_rows) == 1000
    counts = torch.bincount(task.labels, minlength=10)
    assert counts.min() > 40
    # Columns beyond those that are read carry no information.
    assert not torch.equal(task.labels, tabular.make_task(4, 4000).labels)


def test_magnitude_keeps_the_largest_and_chance_as_many() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight[::2] *= 100
    groups = find_groups(model, torch.randn(2, 5)).groups
    widths = {groups[0].name: 8}
    plan = removal_case.by_magnitude(model, groups, widths)
    assert plan.keep[groups[0].name].tolist() == list(range(0, 16, 2))
    chance = removal_case.by_chance(groups, widths, np.random.default_rng(0))
    kept = chance.keep[groups[0].name]
    assert len(set(kept.tolist())) == 8
    apply(model, groups, plan)
    assert first.weight.shape == (8, 5)


def test_sooner_is_against_the_end_of_the_same_seed() -> None:
    whole = TrainingCurve([10.0, 20.0], [0.2, 0.4], [100, 100], [(), ()])
    early = TrainingCurve([5.0, 10.0], [0.4, 0.5], [100, 10], [(), ()])
    late = TrainingCurve([5.0, 10.0], [0.1, 0.39], [100, 10], [(), ()])
    assert sooner([(early, whole)], 0.0) == "4.00 (4.00 to 4.00)"
    soon = TrainingCurve([10.0, 20.0, 30.0], [0.4, 0.5, 0.4], [9, 9, 9], [(), (), ()])
    assert sooner([(soon, soon)], 0.0) == "1.00 (1.00 to 1.00)"
    assert sooner([(late, whole)], 0.0) == "never"
    assert sooner([(early, whole), (late, whole)], 0.0).endswith("1 of 2")
    assert sooner([(late, whole)], 0.01).startswith("2.00")


@pytest.mark.nightly
@pytest.mark.mpi
def test_variants_of_a_network_for_images(pictures: Path, tmp_path: Path) -> None:
    options = PruneBenchOptions(
        source=str(pictures),
        val=str(pictures.parent / "val"),
        seeds=1,
        epochs=4,
        width=32,
        image_size=32,
        keep=str(tmp_path),
    )
    results: dict[str, Any] = images.measure(options)
    last = {name: curves[0]["parameters"][-1] for name, curves in results["raw"].items()}
    assert last["apoptosis"] == last["by chance, as apoptosis"] == last["magnitude, after training"]
    assert last["apoptosis"] <= last["unpruned"]
    assert abs(last["narrow from the start"] / last["apoptosis"] - 1) < 0.2
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-0.json")}
    assert images.measure(options)["rows"] == results["rows"]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-0.json")} == written


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--case", "telepathy"], "choose one of images"),
        (["--case", "images"], "--val"),
        (["--plot", "curve.gif"], "ends in .png or .svg"),
        (["--tolerance", "-1"], "at least 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "prune", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
