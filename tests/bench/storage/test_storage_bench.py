"""`dlio bench storage`: a tiny run from end to end, and its refusals."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio.errors import UsageError
from dlio_bench.emulated.emulated_mount import why_not
from dlio_bench.storage_cases.storage_options import StorageCase
from tests.conftest import in_time

TINY = (
    *("--files", "66", "--sample-size", "4KiB", "--batch-size", "3", "--step-ms", "2"),
    *("--workers", "1", "--bare-seconds", "0.1", "--metadata-files", "5", "--tiers", "ram:4MiB"),
)


def _run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlio.cli", "bench", "storage", str(folder), *TINY, *more]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=folder
    )


@pytest.mark.mpi
def test_two_ranks_report_both_loaders_by_epoch(tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", "--csv", "r.csv", "--report", "r.json", "--rules", "v2.0")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["benchmark"] == "storage"
    # The command is the user's, not a rank's.
    assert report["command"][1:4] == [
        "bench",
        "storage",
        str(tmp_path),
    ]  # The user's, not a rank's.
    assert report["command"][-2:] == ["--rules", "v2.0"]
    names = {(each["name"], each["unit"]) for each in report["figures"]}
    assert {
        ("accelerator utilisation", "%"),
        ("throughput", "samples/s"),
        ("bandwidth", "MiB/s"),
        ("batch p99.9", "ms"),
        ("request p50", "ms"),
        ("sample p50", "ms"),
        ("metadata operations", "1/s"),
        ("processor time of a run", "s"),
    } <= names
    labels = [
        each["labels"] for each in report["figures"] if each["name"] == "accelerator utilisation"
    ]
    assert labels == [
        {"loader": loader, "epoch": epoch} for loader in ("torch", "dlio") for epoch in ("1", "2")
    ]
    assert [row["rank"] for row in report["by_rank"]] == [0, 1, 0, 1]
    # Each byte of each sample passed through a rank, and dlio's second epoch asked for none.
    served = {(each["loader"], each["epoch"]): each for each in report["served"]}
    assert served["torch", 1]["asked_bytes"] >= 66 * 4096
    assert "other ranks" in done.stdout.replace("\n", " ")
    assert "IOPS" in done.stdout
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["loader"], row["epoch"], row["of"]) for row in rows] == [
        *(("torch", "1", "sample"), ("torch", "2", "sample")),
        *(("dlio", "1", "request"), ("dlio", "2", "request")),
    ]
    assert int(rows[0]["count"]) == 66
    times = [float(value) for key, value in rows[2].items() if key.startswith("lat_")]
    assert len(times) == 18
    assert times == sorted(times)
    assert times[0] > 0
    assert float(rows[2]["iops"]) == pytest.approx(
        int(rows[2]["count"]) / float(rows[2]["runtime_s"]), rel=0.01
    )
    (tmp_path / "r.csv").unlink()
    assert "rules of MLPerf Storage v2.0" in done.stdout
    assert "Not an MLPerf result" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_data_is_kept_on_demand_and_used_again(tmp_path: Path) -> None:
    for written in (66, 0):
        done = _run(tmp_path, "--keep", "--loaders", "dlio", "--report", "r.json")
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "r.json").read_text())["generated_files"] == written


def test_wrong_options_name_the_remedy(tmp_path: Path) -> None:
    for loaders, says in (
        ("tensor", "choose torch or dlio, or name a function"),
        ("dlio,dlio", "names a loader twice"),
    ):
        with pytest.raises(UsageError, match=says):
            StorageCase(str(tmp_path), loaders=loaders)
    done = _run(tmp_path, "--workload", "resnet5_h100")
    assert done.returncode == 2
    assert "resnet50_h100" in done.stderr
    done = _run(tmp_path, "--files", "2", "--epochs", "1")
    assert done.returncode == 2
    assert "2 samples: an epoch has less than a batch of 3" in done.stderr
    streams = ("--format", "tar", "--files", "2", "--samples-per-file", "2", "--workers", "2")
    done = _run(tmp_path, *streams, "--epochs", "1")
    assert done.returncode == 2
    assert "torch's workers have less than a batch of 3" in done.stderr
    with pytest.raises(UsageError, match="--csv is of no use with --plan"):
        StorageCase(str(tmp_path), plan=True, csv="x.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly  # By day, tests/cli/test_kill.py interrupts a training.
def test_a_report_has_the_workload_as_it_ran(tmp_path: Path) -> None:
    def settings(**options: Any) -> dict[str, object]:
        case = StorageCase(str(tmp_path), **options)
        return case.as_run(case.asked().workload)

    # Values are the same however they were given: by default, by an option, or by one of DLIO's
    # keys; and an option is not a difference to reports of the workload that it repeats.
    assert settings() == settings(epochs=2, sample_size="1MiB", step_ms=100)
    named = settings(workload="unet3d_h100", settings=("train.epochs=2",))
    assert named == settings(workload="unet3d_h100", epochs=2)
    assert (named["workload"], named["epochs"]) == ("unet3d_h100", settings()["epochs"])
    assert settings(format="tar")["format"] == "tar"


def test_ctrl_c_leaves_nothing(tmp_path: Path, soon: Callable[..., bool]) -> None:
    command = [sys.executable, "-m", "dlio.cli", "bench", "storage", str(tmp_path), *TINY]
    with subprocess.Popen(
        [*command, "-n", "2", "--epochs", "999"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            assert in_time(lambda: any(tmp_path.rglob("*.npz")), 120)
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(120) != 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert in_time(lambda: not any(tmp_path.iterdir()), 60), list(tmp_path.rglob("*"))


def test_an_epoch_of_one_step_has_no_utilisation(tmp_path: Path) -> None:
    tiny = ("--files", "3", "--batch-size", "2", "--loaders", "torch", "--metadata-files", "0")
    done = _run(tmp_path, *tiny, "--epochs", "1", "--rules", "v2.0", "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    names = {each["name"] for each in report["figures"]}
    assert "epoch" in names
    assert not names & {"accelerator utilisation", "throughput", "bandwidth"}
    notes = " ".join(report["notes"])
    assert (
        "1 step, of which the first does not count: utilisation and throughput are unknown" in notes
    )
    assert "1 of 3 samples are left out of each epoch" in notes
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["torch"]][:1]
    assert row.split()[2:5] == ["-", "-", "-"]


def test_few_steps_have_no_utilisation_and_no_verdict(tmp_path: Path) -> None:
    few = ("--files", "20", "--batch-size", "2", "--loaders", "dlio", "--metadata-files", "0")
    more = ("--epochs", "1", "--rules", "v2.0", "--report", "r.json", "--workload", "resnet50_h100")
    done = _run(tmp_path, *few, *more, "--samples-per-file", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert not [each for each in report["figures"] if each["name"] == "accelerator utilisation"]
    assert any("10 steps, of which the first" in note for note in report["notes"])
    rows = report["rules"]["checks"] if "checks" in report["rules"] else report["rules"]["dlio"]
    checks = rows["checks"] if isinstance(rows, dict) else rows
    (verdict,) = [each for each in checks if each["rule"].startswith("accelerator utilisation")]
    assert (verdict["outcome"], verdict["measured"]) == ("unknown", "too few steps")


@pytest.mark.skipif(why_not() is not None, reason="needs FUSE")
def test_metadata_are_those_of_the_emulated_storage(tmp_path: Path) -> None:
    few = ("--files", "3", "--samples-per-file", "1", "--loaders", "dlio", "--epochs", "1")
    slow = ("--emulate", "latency(0s,metadata=30ms)", "--report", "r.json")
    done = _run(tmp_path, *few, *slow)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    (median,) = [
        each["values"]
        for each in report["figures"]
        if each["name"] == "metadata p50" and each["labels"] == {"operation": "remove"}
    ]
    assert median[0] >= 30  # A disk takes less than one.
    assert os.listdir(tmp_path) == ["r.json"]


def test_an_epoch_of_a_single_step_shows_no_latencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    few = ("--files", "3", "--batch-size", "3", "--samples-per-file", "1", "--epochs", "1")
    done = _run(tmp_path, *few, "--loaders", "dlio", "--metadata-files", "0")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(" dlio "))
    assert row.split()[-4:-1] == ["-", "-", "-"]


def test_a_plan_says_how_much_data_the_rules_ask_for(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        *("--plan", "--memory", "1GiB", "--workload", "unet3d_h100", "-n", "8", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    plan = json.loads(done.stdout.splitlines()[-1])
    # TINY overrides files of 4 KiB and batches of 3: 5 GiB are more than 500 steps of 8 ranks.
    assert plan["files"] == 5 * 2**30 // 4096
    assert plan["files_by_steps"] == 500 * 8 * 3
    assert f"--workload unet3d_h100 --files {plan['files']} -n 8" in done.stdout


def test_a_plan_for_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlio.cli", "bench", "storage", f"{tmp_path}/no", "--plan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 2
    assert "/no is not a folder" in done.stderr
