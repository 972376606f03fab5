"""Checkpoints: complete whenever a run is killed; a resumed run equals an uninterrupted one."""

import errno
import fcntl
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from dlio.comm.single import SingleCommunicator
from dlio.errors import SourceError, UsageError
from dlio.train.checkpoint.checkpoint_store import Checkpoints, open_checkpoint
from dlio.train.checkpoint.tensor_reader import contents
from tests.conftest import SOURCES, in_time, is_running

Args = tuple[str, ...]
_START_TIMEOUT_S = 120
Dlio = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SHAPE = ("--image-size", "32", "--tiers", "ram:64MiB", "--workers", "1")
MLP = ("--model", "nets:mlp")


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


def _equal(one: Path, other: Path) -> bool:
    mine, theirs = _weights(one), _weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def _forget_after(folder: Path, count: int) -> None:
    """Remove all but the first `count` checkpoints, as if the run had been killed after them."""
    for path in sorted(folder.glob("step-*"))[count:]:
        shutil.rmtree(path)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("exchange", "model", "precision"),
    [
        ("allreduce", "resnet(width=4)", "fp32"),
        ("gossip", "nets:dropping", "fp32"),
        ("noloco(3)", "nets:mlp", "fp32"),
        ("gossip", "nets:louder", "fp16"),
        ("local-sgd(4)+int8", "nets:mlp", "fp32"),
        ("allreduce+adaptive", "nets:mlp", "fp32"),
        ("gossip+threshold", "nets:mlp", "fp32"),
    ],
)
@pytest.mark.daily("gossip-nets:louder-fp16")
def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(
    dlio: Dlio, pictures: Path, here: Path, exchange: str, model: str, precision: str
) -> None:
    same: Args = (
        str(pictures / "train"),
        "-n",
        "2",
        "--batch-size",
        "10",
        "--epochs",
        "2",
        *SHAPE,
    )
    same += ("--exchange", exchange, "--model", model, "--precision", precision)
    same += ("--checkpoint-every", "4", "--keep", "99")
    record = ("--report", "r.json", "--trace", "t.jsonl")
    whole = dlio("train", *same, "--checkpoint", "c", "--save", "whole.pt", *record)
    assert whole.returncode == 0, whole.stderr
    names = sorted(path.name for path in (here / "c").glob("step-*"))
    assert names == [f"step-{step:08d}" for step in (4, 6, 8, 12)]
    steps = _traced(here / "t.jsonl")
    epochs = json.loads((here / "r.json").read_text())["epochs"]
    _forget_after(here / "c", 3)

    again = dlio("train", *same, "--checkpoint", "c", "--resume", "--save", "again.pt", *record)
    assert again.returncode == 0, again.stderr
    assert "step-00000008: epoch 2, step 8" in again.stdout
    assert _equal(here / "whole.pt", here / "again.pt")
    resumed = _traced(here / "t.jsonl")
    assert resumed == [row for row in steps if (row["epoch"], row["step"]) >= (1, 2)]
    report = json.loads((here / "r.json").read_text())
    assert report["resumed"].endswith("step-00000008")
    for before, after in zip(epochs, report["epochs"], strict=True):
        for what in ("samples", "loss", "left_out"):
            assert before[what] == after[what]


@pytest.mark.mpi
def test_tied_weights_are_not_saved_for_each_rank(dlio: Dlio, pictures: Path, here: Path) -> None:
    same: Args = (str(pictures / "train"), "-n", "2", "--batch-size", "50", *SHAPE)
    same += ("--model", "nets:tied", "--epochs", "2", "--checkpoint", "c", "--keep", "9")
    done = dlio("train", *same, "--save", "whole.pt")
    assert done.returncode == 0, done.stderr
    saved = sorted((here / "c").glob("step-*"))
    held = contents(str(saved[0]))
    assert {"all/model/1.weight", "all/model/2.weight"} <= held.keys()
    assert not any("/model/" in name for name in held if name.startswith("rank"))
    _forget_after(here / "c", 1)
    again = dlio("train", *same, "--resume", "--save", "again.pt")
    assert again.returncode == 0, again.stderr
    assert _equal(here / "whole.pt", here / "again.pt")


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "backend"), [("3", "mpi"), ("5", "mpi"), ("3", "torch")])
@pytest.mark.daily("3-torch")
def test_sums_of_more_than_two_ranks_are_the_same_after_resuming(
    dlio: Dlio, pictures: Path, here: Path, ranks: str, backend: str
) -> None:
    # Two ranks would not show it: a + b is b + a. Libraries sum three in an order of their own.
    same: Args = (
        str(pictures / "train"),
        "-n",
        ranks,
        "--batch-size",
        "4",
        "--epochs",
        "2",
        *SHAPE,
    )
    same += (*MLP, "--backend", backend, "--checkpoint-every", "1", "--keep", "99")
    whole = dlio("train", *same, "--checkpoint", "c", "--save", "whole.pt")
    assert whole.returncode == 0, whole.stderr
    written = len(list((here / "c").glob("step-*")))
    _forget_after(here / "c", written * 3 // 4)
    again = dlio("train", *same, "--checkpoint", "c", "--resume", "--save", "again.pt")
    assert again.returncode == 0, again.stderr
    assert "epoch 2, step" in again.stdout
    assert _equal(here / "whole.pt", here / "again.pt")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.daily("1")
def test_a_run_is_resumed_with_another_number_of_ranks(
    dlio: Dlio, pictures: Path, here: Path, ranks: int
) -> None:
    same: Args = (
        str(pictures / "train"),
        "--epochs",
        "2",
        *SHAPE,
        *MLP,
        "--optimizer",
        "adam",
    )
    same += ("--keep", "99", "--checkpoint-every", "4")
    whole = dlio(
        "train", *same, "-n", "2", "--batch-size", "10", "--checkpoint", "c", "--save", "whole.pt"
    )
    assert whole.returncode == 0, whole.stderr
    _forget_after(here / "c", 3)
    batch = str(20 // ranks)
    again = dlio(
        *("train", *same, "-n", str(ranks), "--batch-size", batch, "--trace", "t.jsonl"),
        *("--checkpoint", "c", "--resume", "--save", "again.pt"),
    )
    assert again.returncode == 0, again.stderr
    assert "global batch was" not in again.stdout
    mine, theirs = _weights(here / "whole.pt"), _weights(here / "again.pt")
    for name, value in mine.items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=1e-5), name
    rows = _traced(here / "t.jsonl")
    # 8 of the run's 12 steps are done, and so 2 of this epoch's 6, each of 20 samples.
    assert len([s for row in rows for s in row["samples"]]) == 101 - 40


def _killed_at_random(
    pictures: Path, here: Path, ranks: int, kills: int, epochs: int
) -> tuple[int, list[Path]]:
    """Run to the end with kills in between; return (kills that hit the run, logs of the ranks)."""
    draws = random.Random(kills)
    environment = {**os.environ, "PYTHONPATH": SOURCES, "DLIO_CACHE": str(here)}
    # The test's folder is removed, and with it the files that a killed Open MPI leaves.
    environment["PRTE_MCA_prte_tmpdir_base"] = str(here)
    environment["OMPI_MCA_btl_sm_backing_directory"] = str(here)
    command = [sys.executable, "-m", "dlio.cli", "train", str(pictures / "train")]
    command += ["-n", str(ranks), "--batch-size", str(4 // ranks), *SHAPE, *MLP]
    command += ["--epochs", str(epochs)]
    command += ["--checkpoint-every", "3", "--checkpoint", "c", "--resume", "--save", "killed.pt"]
    command += ["--callback", "nets:Log(path='log')"]
    hits = 0
    for turn in range(kills + 1):
        with subprocess.Popen(
            command,
            cwd=here,
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            if turn < kills:
                # Kill at a random moment while it trains and writes some checkpoints.
                assert in_time(
                    lambda: _lines(here / "log.0") > 0 or run.poll() is not None, _START_TIMEOUT_S
                )
                before = _lines(here / "log.0")
                in_time(
                    lambda b=before: _lines(here / "log.0") > b or run.poll() is not None,  # type: ignore[misc]
                    _START_TIMEOUT_S,
                )
                time.sleep(draws.uniform(0, 0.15))
            else:
                output, _ = run.communicate(timeout=300)
                assert run.returncode == 0, output
                break
            if run.poll() is None:
                hits += 1
            _kill(run)
        for path in (here / "c").glob("step-*"):
            open_checkpoint(str(path))
        with Checkpoints(str(here / "c"), SingleCommunicator(), 99) as checkpoints:
            newest = sorted(path.name for path in (here / "c").glob("step-*"))[-1:]
            checkpoint = checkpoints.newest()
            assert ([] if checkpoint is None else [Path(checkpoint.path).name]) == newest
    return hits, [here / f"log.{rank}" for rank in range(ranks)]


def _kill(run: "subprocess.Popen[str]") -> None:
    """Kill the launcher, mpirun and all ranks at once: its session and their children."""
    family = {run.pid}
    for _ in range(3):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent in family:
                family.add(int(entry))
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    run.communicate(timeout=400)
    assert in_time(lambda: not any(is_running(pid) for pid in family), _START_TIMEOUT_S)


def _traced(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace, without hashes: they begin anew with a run."""
    lines = map(json.loads, path.read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "hash"} for line in lines]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _check_killed_run(
    dlio: Dlio, pictures: Path, here: Path, ranks: int, kills: int, epochs: int
) -> int:
    hits, logs = _killed_at_random(pictures, here, ranks, kills, epochs)
    whole = dlio(
        *("train", str(pictures / "train"), "-n", str(ranks), "--batch-size", str(4 // ranks)),
        *("--epochs", str(epochs), *SHAPE, *MLP, "--save", "whole.pt"),
        *("--callback", "nets:Log(path='whole')"),
    )
    assert whole.returncode == 0, whole.stderr
    assert _equal(here / "whole.pt", here / "killed.pt")
    for rank, log in enumerate(logs):
        expected = {}
        for line in (here / f"whole.{rank}").read_text().splitlines():
            number, *rest = json.loads(line)
            expected[number] = rest
        seen = set()
        for line in log.read_text().splitlines():
            number, *rest = json.loads(line)
            # A step that was repeated after a kill had the same samples.
            assert rest == expected[number]
            seen.add(number)
        assert seen == expected.keys()
    assert not list((here / "c").glob(".unfinished-*"))
    return hits


def test_a_killed_run_resumes_from_a_whole_checkpoint_and_has_the_same_result(
    dlio: Dlio, pictures: Path, here: Path
) -> None:
    assert _check_killed_run(dlio, pictures, here, ranks=1, kills=2, epochs=4) >= 1


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.cold
def test_twenty_kills_of_two_ranks(dlio: Dlio, pictures: Path, here: Path) -> None:
    assert _check_killed_run(dlio, pictures, here, ranks=2, kills=20, epochs=8) >= 15


def _saved(folder: Path, steps: int = 2) -> None:
    with Checkpoints(str(folder), SingleCommunicator(), 9) as checkpoints:
        for step in range(steps):
            checkpoints.save(step, {"all/model/w": torch.full((1000,), float(step))}, {"at": step})
            checkpoints.wait()
        assert not checkpoints.failures


def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path / "c")
    (file,) = (tmp_path / "c" / "step-00000001").glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = data.index(torch.ones(8).numpy().tobytes())
    data[place + 5] ^= 4
    file.write_bytes(data)
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
        checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.about["at"] == 0
    assert not checkpoint.read("all/")["model/w"].any()
    assert "step-00000001" in capsys.readouterr().err


def test_a_run_that_begins_anew_keeps_its_checkpoints_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path / "c", steps=4)
    for path in (tmp_path / "c").glob("step-*"):
        (path / "about.json").write_text("{")
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator(), keep=2) as checkpoints:
        assert checkpoints.newest() is None
        said = capsys.readouterr().err.splitlines()
        for step in range(2):
            checkpoints.save(step, {"all/model/w": torch.ones(9)}, {"at": step})
            checkpoints.wait()
        newest = checkpoints.newest()
    assert ["trying an older" in line for line in said] == [True, True, True, False]
    assert "none is left: training begins anew" in said[-1]
    assert newest is not None
    assert newest.about["at"] == 1


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


class _Attribute:
    """Pickled by getattr, as Python before 3.11.4 pickles members of enumerations."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Metadata, "__init__")


@pytest.mark.parametrize(
    "what",
    [b"", b"garbage", pickle.dumps([1]), pickle.dumps(_Evil()), pickle.dumps(_Attribute())],
)
def test_a_table_of_contents_is_read_without_running_pickled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    _saved(tmp_path / "c", 1)
    path = tmp_path / "c" / "step-00000000"
    assert set(contents(str(path))) == {"all/model/w", "checksum/rank0"}
    (path / ".metadata").write_bytes(what)
    with pytest.raises(SourceError, match="table of contents"):
        contents(str(path))
    assert not (tmp_path / "evil").exists()


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        Checkpoints(str(tmp_path / "c"), SingleCommunicator()),
        pytest.raises(UsageError, match=f"another run .process {os.getpid()}"),
    ):
        Checkpoints(str(tmp_path / "c"), SingleCommunicator())
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()):
        pass


def test_unfinished_checkpoints_are_removed_and_the_wanted_number_is_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "c" / ".unfinished-00000007").mkdir(parents=True)
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator(), keep=2) as checkpoints:
        for step in range(5):
            checkpoints.save(step, {"rank0/x": torch.zeros(3)}, {})
        checkpoints.wait()
        assert [Path(path).name for path in checkpoints.paths()] == [
            "step-00000004",
            "step-00000003",
        ]
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        ".lock",
        "step-00000003",
        "step-00000004",
    }


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, full_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
        checkpoints.save(1, {"all/w": torch.zeros(10)}, {})
        checkpoints.wait()
        with full_disk(5000):
            checkpoints.save(2, {"all/w": torch.zeros(100_000)}, {})
            checkpoints.wait()
        assert len(checkpoints.failures) == 1
        checkpoints.save(3, {"all/w": torch.zeros(100_000)}, {})
        checkpoints.wait()
    assert "no checkpoint:" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == [".lock", "step-00000001", "step-00000003"]


def test_a_checkpoint_holds_the_values_at_the_moment_of_the_request(tmp_path: Path) -> None:
    weights = torch.zeros(1_000_000)
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
        for step in range(3):
            weights += 1
            checkpoints.save(step, {"all/w": weights}, {})
            weights += 100  # Training continues meanwhile.
            weights -= 100
        checkpoints.wait()
        checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert torch.equal(checkpoint.read("all/")["w"], torch.full((1_000_000,), 3.0))


def test_a_run_does_not_resume_from_checkpoints_of_another_run(
    dlio: Dlio, pictures: Path, here: Path
) -> None:
    same = ("train", str(pictures / "train"), "--epochs", "1", *SHAPE, "--checkpoint", "c")
    assert dlio(*same, *MLP, "--resume").returncode == 0  # Without a checkpoint it starts anew.
    again = dlio(*same, *MLP)
    assert again.returncode == 2
    assert "add --resume to continue it" in again.stderr
    for other, named in (
        (("--seed", "5"), "--seed 0"),
        (("--model", "resnet"), "--model nets:mlp"),
    ):
        refused = dlio(*same, *MLP, *other, "--resume")
        assert refused.returncode == 2
        assert named in refused.stderr


@pytest.mark.parametrize("file", ["__0_0.distcp", "part-0.json", "about.json"])
def test_a_failure_names_the_folder_that_the_user_gave(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, link = os.open, os.link

    def full(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).startswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return original(path, flags, *args, **options)

    def full_link(source: str, path: str, **options: Any) -> None:
        if path.startswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, path)
        link(source, path, **options)

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(os, "link", full_link)
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
        checkpoints.save(1, {"all/model/w": torch.ones(9)}, {})
        checkpoints.wait()
    (failure,) = checkpoints.failures
    assert str(tmp_path / "c") in failure
    assert "/proc/self" not in failure


def _array(monkeypatch: pytest.MonkeyPatch, task: int) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))


@pytest.mark.parametrize("locks", ["none", "of a node"])
def test_runs_without_common_locks_do_not_write_to_one_folder_in_silence(
    locks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on file systems without locks, or whose locks end at the node."""

    def flock(*_: object) -> None:
        if locks == "none":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = tmp_path / "c"
    _array(monkeypatch, 3)
    with Checkpoints(str(folder), SingleCommunicator()) as first:
        first.save(1, {"all/model/w": torch.zeros(9)}, {"at": 1})
        first.wait()
        assert not first.failures
        _array(monkeypatch, 4)
        with Checkpoints(str(folder), SingleCommunicator()) as second:
            for step in (2, 3):
                for checkpoints, value in ((first, 1.0), (second, 2.0)):
                    tensors = {"all/model/w": torch.full((9,), value)}
                    checkpoints.save(step, tensors, {"at": step})
                    checkpoints.wait()
            assert not second.failures
            newest = second.newest()
        assert newest is not None
        assert float(newest.read("all/model/")["w"][0]) == 2.0
        assert len(first.failures) == 2
    said = capsys.readouterr().err
    assert "task 4 of job array 77" in said
    assert f"--checkpoint {folder}/$SLURM_ARRAY_TASK_ID" in said


def test_a_task_of_a_job_array_says_whose_checkpoint_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, said in ((3, ""), (3, ""), (4, "of task 3"), (5, "of task 4")):
        _array(monkeypatch, task)
        with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
            assert (said in checkpoints.sharing()) if said else not checkpoints.sharing()
            with pytest.raises(UsageError, match=r"task \d of job array 77.*SLURM_ARRAY_TASK_ID"):
                Checkpoints(str(tmp_path / "c"), SingleCommunicator())
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "78")
    with Checkpoints(str(tmp_path / "c"), SingleCommunicator()) as checkpoints:
        assert not checkpoints.sharing()


_RATES = """
from dlio.train.callbacks import Callback

class Rates(Callback):
    def after_step(self, run):
        print("rate", run.updates, repr(run.optimizer.param_groups[0]["lr"]), flush=True)

def make():
    return Rates()
"""


def _rates(text: str) -> dict[int, float]:
    rows = [line.split() for line in text.splitlines() if line.startswith("rate ")]
    return {int(row[1]): float(row[2]) for row in rows}


def test_a_run_that_is_made_longer_goes_on_at_the_rate_of_the_longer_one_and_says_so(
    dlio: Dlio, pictures: Path, here: Path
) -> None:
    (here / "rates.py").write_text(_RATES)
    same: Args = (str(pictures / "train"), "--batch-size", "10", *SHAPE, *MLP)
    same += ("--callback", "rates:make")
    whole = dlio("train", *same, "--epochs", "8")
    assert whole.returncode == 0, whole.stderr
    kept = (*same, "--checkpoint", "c")
    first = dlio("train", *kept, "--epochs", "2")
    assert first.returncode == 0, first.stderr
    again = dlio("train", *kept, "--epochs", "8", "--resume")
    assert again.returncode == 0, again.stderr
    assert "was to have 2 epochs and is to have 8 now" in again.stdout
    expected, rates = _rates(whole.stdout), _rates(again.stdout)
    steps = [step for step in expected if step > max(_rates(first.stdout))]
    assert steps
    assert [rates[step] for step in steps] == [expected[step] for step in steps]
    assert "epochs and is to have" not in first.stdout
