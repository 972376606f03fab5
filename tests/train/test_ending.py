"""Runs that are told to end: they write a checkpoint first, and lose nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlio.cli.train_command import train_rank
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.config import train_config
from dlio.train.run_requests import AsynchronousRequests, RunRequest, SynchronousRequests
from dlio.util.signals import RESUME_CODE
from tests.conftest import SOURCES, FullDisk, MpiRun, in_time

_TIMEOUT_S = 120
Dlio = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("--image-size", "32", "--tiers", "ram:64MiB", "--workers", "1", "--model", "nets:dropping")


def _environment(here: Path) -> dict[str, str]:
    own = {"PYTHONPATH": SOURCES, "DLIO_CACHE": str(here)}
    return {**os.environ, **own}


def _steps(here: Path, rank: int) -> list[int]:
    path = here / f"log.{rank}"
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def _told_to_end_until_done(
    pictures: Path, here: Path, ranks: int, times: int, epochs: int, more: tuple[str, ...]
) -> int:
    """Run a training that is told to end some times; return how many times that was amid steps."""
    draws = random.Random(times)
    command = [sys.executable, "-m", "dlio.cli", "train", str(pictures / "train")]
    command += ["-n", str(ranks), "--batch-size", str(4 // ranks), *SHAPE, *more]
    command += ["--epochs", str(epochs)]
    command += ["--checkpoint", "c", "--resume", "--save", "ended.pt"]
    command += ["--callback", "nets:Log(path='log')"]
    hits = 0
    for turn in range(times + 1):
        before = len(_steps(here, 0))
        with subprocess.Popen(
            command,
            cwd=here,
            env=_environment(here),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            if turn < times:
                assert in_time(
                    lambda b=before: len(_steps(here, 0)) > b or run.poll() is not None,  # type: ignore[misc]
                    _TIMEOUT_S,
                )
                time.sleep(draws.uniform(0, 0.1))
                run.send_signal(draws.choice((signal.SIGTERM, signal.SIGUSR1)))
            output, _ = run.communicate(timeout=300)
        assert "Traceback" not in output, output
        if run.returncode == 0:
            assert (here / "ended.pt").exists()
            break
        assert turn < times, output
        assert run.returncode == RESUME_CODE, output
        assert "go on with --resume" in output
        hits += 1
    return hits


def _check(
    dlio: Dlio, pictures: Path, here: Path, times: int, epochs: int, more: tuple[str, ...] = ()
) -> int:
    ranks = 2
    hits = _told_to_end_until_done(pictures, here, ranks, times, epochs, more)
    whole = dlio(
        *("train", str(pictures / "train"), "-n", str(ranks), "--batch-size", str(4 // ranks)),
        *("--epochs", str(epochs), *SHAPE, *more, "--save", "whole.pt"),
        *("--callback", "nets:Log(path='whole')"),
    )
    assert whole.returncode == 0, whole.stderr
    mine, theirs = (torch.load(here / name, weights_only=True) for name in ("ended.pt", "whole.pt"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for rank in range(ranks):
        ended, undisturbed = (
            [json.loads(line) for line in (here / f"{name}.{rank}").read_text().splitlines()]
            for name in ("log", "whole")
        )
        # Each step once: none was lost, and none came again.
        assert ended == undisturbed
    return hits


@pytest.mark.mpi
def test_a_run_that_is_told_to_end_goes_on_exactly(dlio: Dlio, pictures: Path, here: Path) -> None:
    # SIGTERM; the other signal does the same, as tests/cli/test_late_signals.py has it.
    assert _check(dlio, pictures, here, times=1, epochs=4) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("fault", ["shrink", pytest.param("restart", marks=pytest.mark.nightly)])
def test_ranks_that_others_survive_are_all_told_to_end(
    fault: str, dlio: Dlio, pictures: Path, here: Path
) -> None:
    more = ("--fault-tolerance", fault, "--checkpoint", "whole-c")
    assert _check(dlio, pictures, here, times=1, epochs=4, more=more) == 1


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.parametrize(
    "exchange",
    [
        *("allreduce+onebit", "gossip", "noloco(3)", "noloco(1)+adaptive"),
        *("diloco(4)", "diloco(4)+adaptive"),
    ],
)
def test_twenty_signals(dlio: Dlio, pictures: Path, here: Path, exchange: str) -> None:
    hits = _check(dlio, pictures, here, times=20, epochs=6, more=("--exchange", exchange))
    assert hits >= 5


@pytest.mark.nightly
@pytest.mark.mpi
def test_asynchronous_ranks_end_at_one_step(pictures: Path, here: Path) -> None:
    assert _told_to_end_until_done(pictures, here, 2, 4, 6, ("--exchange", "asgd")) >= 1
    steps = [_steps(here, rank) for rank in range(2)]
    assert steps[0] == steps[1] == sorted(set(steps[0]))


def test_a_last_checkpoint_that_cannot_be_written_is_no_success(
    dlio: Dlio, pictures: Path, here: Path
) -> None:
    done = dlio(
        *("train", str(pictures / "train"), "--batch-size", "4", *SHAPE, "--checkpoint", "c"),
        *("--callback", "nets:Spoil"),
    )
    assert done.returncode == 1, done.stderr
    assert "the last checkpoint was not written" in done.stdout
    assert "no checkpoint: " in done.stderr


def test_a_finished_run_says_so_at_once(dlio: Dlio, pictures: Path, here: Path) -> None:
    same = ("train", str(pictures / "train"), *SHAPE, "--checkpoint", "c", "--resume")
    done = dlio(*same, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    again = dlio(*same, "--epochs", "1")
    assert again.returncode == 0, again.stderr
    assert "1 epoch done in c: there is nothing to train" in again.stdout
    assert "epoch 1" not in again.stdout
    more = dlio(*same, "--epochs", "2")
    assert more.returncode == 0, more.stderr
    assert "epoch 2" in more.stdout


def test_checkpoints_by_time(dlio: Dlio, pictures: Path, here: Path) -> None:
    done = dlio(
        *("train", str(pictures / "train"), "--batch-size", "4", "--epochs", "1", *SHAPE),
        *("--checkpoint", "c", "--checkpoint-minutes", "0.001", "--keep", "99"),
    )
    assert done.returncode == 0, done.stderr
    assert len(list((here / "c").glob("step-*"))) > 1


def test_time_between_checkpoints_needs_ranks_that_end_together() -> None:
    with pytest.raises(UsageError, match="give --checkpoint-every"):
        train_config(
            source="data", checkpoint="c", checkpoint_minutes=1.0, fault_tolerance="shrink"
        )


def test_one_rank_acts_on_its_own_wish() -> None:
    for wishes in (
        SynchronousRequests(SingleCommunicator(), 1),
        AsynchronousRequests(SingleCommunicator()),
    ):
        acted = []
        for step in range(1, 6):
            if step == 3:
                wishes.wish(RunRequest.SAVE)
            acted.append(wishes.after_step(step, ends_epoch=False))
        assert acted.count(RunRequest.SAVE) == 1
        assert set(acted) == {RunRequest.SAVE, RunRequest.NONE}
        wishes.close()


WISHES = """
import sys, time
import numpy as np
from dlio.comm import world
from dlio.train.run_requests import AsynchronousRequests, RunRequest, SynchronousRequests
comm = world()
draws = np.random.default_rng(int(sys.argv[1]))
for kind in ("turn", "all"):
    for trial in range(20):
        wishes = (
            SynchronousRequests(comm, 1 + trial % 3)
            if kind == "turn"
            else AsynchronousRequests(comm)
        )
        asks = {int(draws.integers(comm.size)): int(draws.integers(1, 15)) for _ in range(2)}
        slow = int(draws.integers(comm.size))
        acted = []
        for step in range(1, 31):
            if asks.get(comm.rank) == step:
                wishes.wish(RunRequest.END)
            if comm.rank == slow and step < 10:
                time.sleep(0.002)
            did = wishes.after_step(step, ends_epoch=step % 10 == 0)
            if did:
                acted.append((step, int(did)))
                break
        wishes.close()
        everyone = comm.allgather(acted)
        assert all(each == everyone[0] for each in everyone), (kind, trial, everyone)
        assert everyone[0], (kind, trial)
print("kept", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.daily("4")
def test_all_ranks_act_after_the_same_step(mpirun: MpiRun, ranks: int, tmp_path: Path) -> None:
    body = tmp_path / "wishes.py"
    body.write_text(WISHES)
    done = mpirun(ranks, "-W", "error", str(body), "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kept"] * ranks


def test_a_run_whose_last_checkpoint_found_no_room_says_so(
    pictures: Path, tmp_path: Path, full_disk: FullDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    config = train_config(
        source=str(pictures / "train"),
        checkpoint=str(folder),
        epochs=1,
        image_size=32,
        tiers="none",
        workers=1,
        batch_size=4,
    )
    with full_disk(500):
        train_rank(config)
    out, said = capsys.readouterr()
    assert f"dlio: --checkpoint {folder}: the last checkpoint was not written; this run has" in said
    assert f"{folder} cannot be written: File too large; raise the limit of file sizes" in said
    assert "Wrote 0 checkpoints" in out
    assert [path.name for path in folder.iterdir()] == [".lock"]
