"""`dlio bench chaos --torchft`: its arithmetic, its command, and kills in a job of torchft."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

import dlio
from dlio.errors import UsageError
from dlio_bench.chaos.accounts import quantiles, uneven_epochs
from dlio_bench.chaos.chaos_figures import JobRecord, RunRecord, figures_of, rows_of
from dlio_bench.chaos.chaos_job import ChaosJob
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.scheduled_faults import InjectedFault, ScheduledFault
from dlio_bench.chaos.stamps import RankStamps, StepStamp
from dlio_bench.chaos.torchft_job import (
    ComputedBatch,
    account,
    joins,
    next_quorum_step,
    torchft_argv,
)


def _stamp(step: int, t: float, generation: int = 0) -> StepStamp:
    return {"t": t, "epoch": 0, "step": step, "generation": generation, "ranks": 2}


def _fault() -> ScheduledFault:
    return ScheduledFault(1.0, "kill", (0.5, 0.5), 0.01)


def _batch(
    epoch: int, step: int, *samples: int, quorum: int = 1, sums: bool = True
) -> ComputedBatch:
    numbers = {"epoch": epoch, "batch": 0, "step": step, "quorum": quorum}
    return cast(ComputedBatch, {**numbers, "samples": list(samples), "sums": sums})


def test_a_batch_of_torchft_counts_if_anyone_committed_its_step_in_its_quorum() -> None:
    left, hurt = RankStamps(0, 10, 0.0), RankStamps(1, 11, 0.0)
    left.steps = [_stamp(1, 1.0, 1), _stamp(2, 2.0, 1), _stamp(3, 9.0, 2), _stamp(4, 9.5, 3)]
    hurt.steps = left.steps[:1]
    batches = [
        (0, _batch(0, 1, 0, 2)),
        (1, _batch(0, 1, 1, 3)),
        (0, _batch(0, 2, 4)),
        (1, _batch(0, 2, 5)),  # Killed after the sum: the other has committed it.
        (0, _batch(0, 3, 6)),  # The sum is torn, and the batch is dropped.
        (0, _batch(1, 3, 0, 2, quorum=2)),
        (1, _batch(0, 4, 5, quorum=3)),  # It has kept no position, and begins again with this one.
        (1, _batch(1, 4, 1, quorum=3, sums=False)),
        (0, _batch(2, 4, 0, quorum=3)),
    ]
    whole = account(batches, [left, hurt], epochs=2)
    assert whole.lines == [
        {"epoch": 0, "step": 0, "rank": 0, "samples": [0, 2, 1, 3, 4, 5, 5]},
        {"epoch": 1, "step": 0, "rank": 0, "samples": [0, 2]},
    ]
    assert (whole.dropped, whole.beyond) == (2, 1)
    assert uneven_epochs(whole.lines, 7, 2) == [
        {"epoch": 0, "lost": 1, "doubled": 1, "problems": 0},
        {"epoch": 1, "lost": 5, "doubled": 0, "problems": 0},
    ]
    assert account([], [], epochs=1).lines[0]["samples"] == []


def test_the_next_step_of_torchft_is_of_a_quorum_without_the_lost_one() -> None:
    left, slow, hurt = (RankStamps(rank, 10 + rank, 0.0) for rank in range(3))
    again = RankStamps(2, 20, 4.0)
    before = [_stamp(1, 1.0, 1), _stamp(2, 2.0, 1)]
    # One commits the step that was summed before the fault.
    left.steps = [*before, _stamp(3, 3.0, 1), _stamp(4, 8.0, 2), _stamp(5, 9.5, 3)]
    slow.steps = [*before, _stamp(4, 8.5, 2), _stamp(5, 9.6, 3)]
    hurt.steps = before
    made = InjectedFault(_fault(), 2.5, (2,))
    assert next_quorum_step([left, slow, hurt], made) == 8.5
    again.steps = [_stamp(5, 9.7, 3)]
    ranks = [left, slow, hurt, again]
    assert next_quorum_step(ranks, made) == 8.5
    assert next_quorum_step(ranks, InjectedFault(_fault(), 9.8, (2,))) is None
    ((group, join),) = joins(ranks)
    assert group is again
    assert (join["ranks"], join["generation"], join["t"]) == ([2], 3, 9.7)
    assert join["seconds"] == pytest.approx(1.2 - 1.1)  # The median step took 1.1 s.
    assert joins([RankStamps(0, 1, 0.0)]) == []


def test_figures_of_torchft_tell_of_dropped_samples() -> None:
    left, hurt = RankStamps(0, 10, 0.0), RankStamps(1, 11, 0.0)
    left.steps = [*(_stamp(k, float(k), 1) for k in range(1, 5)), _stamp(5, 10.0, 2)]
    hurt.steps = left.steps[:4]
    run = RunRecord(0, False, [left, hurt], [InjectedFault(_fault(), 4.5, (1,))], 11.0, "", 0, [])
    job = JobRecord(
        [run], [{"epoch": 0, "lost": 6, "doubled": 0, "problems": 0}], dropped=2, beyond=0, epochs=1
    )
    figures = figures_of("torchft", [job], samples=10)
    assert figures["next_step_s"] == quantiles([5.5])
    assert figures["ettr"] == pytest.approx(4 / 9)
    assert (figures["samples_lost"], figures["samples_dropped"]) == (6, 2)
    assert {row["figure"] for row in rows_of({"torchft": figures})} >= {
        "of them, in batches that were computed"
    }


def test_the_newest_process_of_a_rank_is_hurt(tmp_path: Path) -> None:
    def stamp(rank: int, pid: int, begun: float, *steps: StepStamp) -> None:
        lines: list[object] = [
            {"t": begun, "kind": "begin", "rank": rank, "pid": pid, "step": 0},
            *({"kind": "step", **step} for step in steps),
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"rank-{rank}-{pid}.jsonl").write_text(text)

    with ChaosJob(["sleep", "60"], str(tmp_path), str(tmp_path), 60) as job:
        child = subprocess.Popen(["sleep", "60"])
        try:
            stamp(0, 2**22 + 1, 1.0, _stamp(1, 2.0))
            stamp(0, child.pid, 3.0)
            job.stamps.read()
            assert job.left() == []  # It has begun again, and made no step.
            stamp(1, child.pid, 3.0, _stamp(2, 4.0))
            job.stamps.read()
            assert job.left() == [1]
            made = job.hurt_by(_fault())
            assert made is not None
            assert made.ranks == (1,)
            assert child.wait(60) == -signal.SIGKILL
            assert job.left() == []
        finally:
            child.kill()
            child.wait()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_job_of_torchft_has_decoded_pictures_and_a_model(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ChaosOptions(ranks=3, batch_size=5, pause_ms=50, torchft="python-of-torchft", seed=7)
    folder = tmp_path / "job" / "1"
    argv = torchft_argv(options, str(pictures), str(folder), "resnet(width=4)")
    assert argv[:2] == ["python-of-torchft", "-I"]
    assert argv[3:] == ["supervise", str(folder)]
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["ranks"], settings["batch_size"], settings["pause_s"]) == (3, 5, 0.05)
    assert (settings["heartbeat_ms"], settings["plain"]) == (5000, False)
    images = np.load(Path(settings["data"], "pictures.npy"))
    labels = np.load(Path(settings["data"], "labels.npy"))
    with dlio.open(str(pictures), image_size=32, train=False) as dataset:
        assert images.shape == (len(dataset), 3, 32, 32)
        assert labels.tolist() == dataset.targets
        assert np.array_equal(images[-1], dataset[len(dataset) - 1][0])
    model = torch.jit.load(settings["model"])  # type: ignore[no-untyped-call]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, len(dataset.classes))
    (tmp_path / "odd_model.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self, classes): super().__init__()\n"
        "    def forward(self, *images, **more): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"torch\.jit\.script cannot script it for --torchft"):
        torchft_argv(options, str(pictures), f"{folder}0", "odd_model:Odd")


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
def test_the_same_kills_are_made_in_a_job_of_torchft(pictures: Path, tmp_path: Path) -> None:
    python = os.environ.get("DLIO_TORCHFT")
    if not python:
        pytest.skip("DLIO_TORCHFT does not name the Python interpreter of a torchft")
    argv = ("-n", "2", "--kills", "2", "--every", "2", "--epochs", "30", "--pause-ms", "30")
    path = tmp_path / "report.json"
    more = ("--spares", "2", "--torchft", python, "--report", str(path))
    command = (sys.executable, "-m", "dlio.cli", "bench", "chaos", str(pictures), *argv, *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    shrink, torchft = report["storm"]["shrink"], report["storm"]["torchft"]
    assert (shrink["samples_lost"], shrink["samples_doubled"]) == (0, 0)
    assert report["torchft"]["torchft"]
    assert torchft["faults"] == shrink["faults"]
    assert (torchft["hangs"], torchft["failed_jobs"]) == (0, 0)
    assert torchft["next_step_s"]["count"] == 2 - torchft["unnoticed"]
    assert torchft["epochs_checked"] == 30 * torchft["jobs"]
    assert torchft["ledger_problems"] == 0
    assert (torchft["left_processes"], torchft["left_files"]) == (0, [])
    assert 0 < torchft["ettr"] < 1
