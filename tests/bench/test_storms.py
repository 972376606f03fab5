"""`dlio bench chaos` with real jobs: storms in which no sample is lost."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio_bench.chaos.leftovers import kill, processes_of
from dlio_bench.chaos.scheduled_faults import KINDS

Soon = Callable[[Callable[[], bool]], bool]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pictures for some steps an epoch."""
    from tests.drawn import draw_once

    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    draw_once(folder, images=97, validation=3, classes=3)
    return str(folder / "train")


def _bench(folder: Path, *argv: str, timeout_s: float = 400) -> dict[str, Any]:
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlio.cli", "bench", "chaos", *argv),
            *("--report", str(report), "--keep", str(folder / "kept")),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


def _check_whole(figures: dict[str, Any], kills: int) -> None:
    """No job has hung or failed, no sample was lost or doubled, and nothing is left."""
    assert sum(figures["faults"].values()) == kills
    assert figures["failures"] == []
    assert (figures["hangs"], figures["failed_jobs"]) == (0, 0)
    assert figures["unchecked_jobs"] == 0
    assert (figures["samples_lost"], figures["samples_doubled"]) == (0, 0)
    assert (figures["left_processes"], figures["left_files"]) == (0, [])


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly
def test_a_short_storm_loses_nothing(source: str, tmp_path: Path) -> None:
    # Never two within half a second, which Open MPI does not always survive.
    argv = ("-n", "3", "--kills", "2", "--every", "1", "--spacing", "uniform", "--epochs", "8")
    report = _bench(tmp_path, source, *argv, "--faults", "raise,first", "--pause-ms", "20")
    figures = report["storm"]["shrink"]
    _check_whole(figures, 2)
    assert figures["faults"] == {"first": 1, "raise": 1}
    assert figures["epochs_checked"] == 8 * figures["jobs"]
    assert report["storm"]["shared_memory_left"] == []
    # A loss after the last step is felt by nobody.
    assert figures["next_step_s"]["count"] == 2 - figures["unnoticed"]
    assert figures["recovery_s"]["count"] >= figures["next_step_s"]["count"]
    assert 0 < figures["ettr"] <= 1


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly  # By day, tests/cli/test_kill.py interrupts a training.
def test_sigterm_ends_the_job_and_leaves_nothing(
    pictures: Path, tmp_path: Path, soon: Soon
) -> None:
    kept = tmp_path / "kept"
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "dlio.cli", "bench", "chaos", str(pictures)),
            *("-n", "2", "--every", "1000", "--epochs", "1000", "--keep", str(kept)),
        ],
        stdout=subprocess.DEVNULL,
    )
    job = kept / "storm" / "shrink-1" / "1"
    try:
        deadline = time.monotonic() + 120
        while len(list(job.glob("rank-*"))) < 2 and time.monotonic() < deadline:
            assert bench.poll() is None
            time.sleep(0.1)
        ranks = [int(path.stem.rpartition("-")[2]) for path in job.glob("rank-*")]
        assert set(ranks) <= set(processes_of(str(job)))
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(120) == 130
        assert processes_of(str(job)) == []
        assert list((job / "tmp").iterdir()) == []
    finally:
        bench.kill()
        bench.wait()
        kill(processes_of(str(job)))


@pytest.mark.mpi
@pytest.mark.nightly
def test_overhead_is_of_pairs(source: str, tmp_path: Path) -> None:
    argv = ("--case", "overhead", "-n", "2", "--repeats", "1", "--megabytes", "15")
    report = _bench(tmp_path, source, *argv, "--epochs", "1")
    (row,) = report["overhead"]["rows"]
    assert row["shrink_over_off"] == row["step_s_shrink"]["median"] / row["step_s_off"]["median"]
    assert row["from_95_percent"] == row["to_95_percent"] == row["shrink_over_off"]
    assert row["peak_MiB_off"] > 15


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.timeout(2 * 3600)
def test_nobody_is_suspected_in_ten_thousand_steps_with_pauses(source: str, tmp_path: Path) -> None:
    report = _bench(tmp_path, source, "-n", "4", "--case", "suspicions", timeout_s=2 * 3600)
    (row,) = report["suspicions"]["rows"]
    assert row["steps"] >= 10_000
    assert row["longest_step_s"] >= 6
    assert row["suspicions"] == 0


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.parametrize("more", [(), ("--pause-ms", "20")], ids=["fast", "slow steps"])
def test_two_hundred_faults_lose_nothing(
    source: str, tmp_path: Path, more: tuple[str, ...]
) -> None:
    argv = ["-n", "4", "--kills", "200", "--every", "1", "--epochs", "20"]
    argv += ["--faults", ",".join(KINDS), *more]
    report = _bench(tmp_path, source, *argv, timeout_s=3 * 3600)
    _check_whole(report["storm"]["shrink"], 200)


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
def test_a_rank_hangs_when_the_one_before_was_felt(source: str, tmp_path: Path) -> None:
    # Two that hang at once end a job by design: both compute, and nobody knows who waits for whom.
    argv = ("-n", "4", "--kills", "3", "--every", "0.05", "--epochs", "8", "--faults", "hang")
    figures = _bench(tmp_path, source, *argv)["storm"]["shrink"]
    _check_whole(figures, 3)
    assert (figures["jobs"], figures["next_step_s"]["count"]) == (1, 3)


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.parametrize(
    "exchange",
    [
        "allreduce",
        "tree+fp16",
        "parameter-server",
        "hierarchical+int8",
        "local-sgd(3)",
        "diloco(2)",
        "gossip",
        "asgd",
    ],
)
def test_faults_and_restarts_lose_nothing_with_any_exchange(
    source: str, tmp_path: Path, exchange: str
) -> None:
    argv = ["-n", "4", "--kills", "25", "--every", "0.3", "--epochs", "25", "--pause-ms", "2"]
    argv += ["--refill", "--faults", "kill,kill,twice,segv,exit,raise", "--exchange", exchange]
    report = _bench(tmp_path, source, *argv, timeout_s=1200)
    figures = report["storm"]["shrink"]
    _check_whole(figures, 25)
    assert figures["refills"] > 0
    assert figures["others_lost"] == 0


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
def test_the_same_faults_are_made_in_a_job_that_is_restarted(source: str, tmp_path: Path) -> None:
    argv = ("-n", "2", "--kills", "2", "--every", "1", "--epochs", "8", "--pause-ms", "20")
    more = ("--restart", "--checkpoint-every", "3")
    report = _bench(tmp_path, source, *argv, *more, timeout_s=1200)
    shrink, restart = report["storm"]["shrink"], report["storm"]["restart"]
    _check_whole(shrink, 2)
    assert restart["faults"] == shrink["faults"]
    assert (restart["hangs"], restart["failed_jobs"]) == (0, 0)
    assert restart["runs"] > restart["jobs"]
    assert restart["caught_up_s"]["count"] == 2 - restart["unnoticed"]
    assert 0 < restart["ettr"] < 1
