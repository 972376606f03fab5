"""`dlio plan` and `dlio simulate`, as users run them."""

import json
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.data.replicas import remember


def _said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert ended.value.code in (0, None), err
    return out


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_plan_of_a_data_set_on_disk(
    pictures: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ("plan", str(pictures), "--nodes", "2", "--ranks-per-node", "1", "--batch-size", "2")
    said = _said(capsys, *argv)
    assert "12 samples" in said
    assert "2 ranks of 2: 3 steps an epoch, mode batch" in said
    report = tmp_path / "plan.json"
    plan = json.loads(_said(capsys, *argv, "--json", "--report", str(report)))
    assert plan == json.loads(report.read_text())
    assert plan["samples"] == 12
    assert plan["source_bytes"] == 0
    assert plan["later_epoch"]["bottleneck"] == "model"


def test_a_plan_of_a_hypothetical_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--samples", "100000", "--sample-size", "100KiB", "--nodes", "4"]
    plan = json.loads(_said(capsys, *argv, "--tiers", "ram:1GiB,/nvme:1GiB", "--json"))
    assert plan["ranks"] == 32
    assert plan["held_bytes"] / plan["bytes"] == pytest.approx(8 / 9.54, rel=0.02)
    assert plan["source_bytes"] == pytest.approx(plan["bytes"] - plan["held_bytes"], rel=0.02)
    assert len(plan["tier_bytes"]) == 2
    assert any("hold it all" in line for line in plan["remedies"])


def test_a_sweep_is_a_table_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot = tmp_path / name
        argv = ["plan", "--samples", "20000", "--sweep", "nodes=1..6", "--plot", str(plot)]
        said = _said(capsys, *argv)
        rows = [line.split()[0] for line in said.splitlines() if line.strip()[:1].isdigit()]
        assert rows == ["1", "2", "4", "6"]
        assert plot.read_bytes().startswith(magic)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]


def test_a_simulation_reports_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--samples", "20000", "--nodes", "2", "--model-time", "10ms"]
    more = ["--jitter", "0.1", "--slow", "3:2", "--fail", "5:1", "--epochs", "3"]
    said = _said(capsys, *argv, *more)
    assert [line.split(":")[0] for line in said.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
    epochs = json.loads(_said(capsys, *argv, "--json"))
    assert [each["epoch"] for each in epochs] == [0, 1]
    assert epochs[0]["stall_s"] > epochs[1]["stall_s"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan"], "give a data set, or --samples"),
        (["plan", "/nowhere", "--samples", "5"], "give a data set, or --samples"),
        (["plan", "/nowhere"], "/nowhere"),
        (["plan", "--samples", "5", "--sweep", "ranks=1..4"], "nodes=1..1024"),
        (["plan", "--samples", "5", "--sweep", "nodes=4..1"], "nodes=1..1024"),
        (["plan", "--samples", "5", "--plot", "a.png"], "give --sweep too"),
        (["plan", "--samples", "5", "--model-time", "soon"], "is not a time"),
        (["plan", "--samples", "5", "--mode", "chaos"], "choose batch, global"),
        (["plan", "--samples", "5", "--tier-bandwidth", "1GiB,2GiB"], "one for each tier"),
        (["plan", "--samples", "5", "--link-bandwidth", "0B"], "give values above 0"),
        (["simulate", "--samples", "5", "--slow", "fast"], "two numbers"),
        (["simulate", "--samples", "5", "--fail", "1:99"], "rank 99 does not exist"),
    ],
)
def test_invalid_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    error = _refused(capsys, *argv)
    assert said in error
    assert len(error.splitlines()) == 1


def test_plans_take_measured_bandwidths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tier"
    folder.mkdir()
    plan = ("plan", "--samples", "10000", "--tiers", f"{folder}:1GiB", "--json")
    remember(str(folder), 1e-3, 1e6)
    slow = json.loads(_said(capsys, *plan))
    remember(str(folder), 1e-3, 1e9)
    fast = json.loads(_said(capsys, *plan))
    assert slow["later_epoch"]["seconds"] > 2 * fast["later_epoch"]["seconds"]
