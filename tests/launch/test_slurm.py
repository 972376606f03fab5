"""`dlio launch` on a real Slurm of two nodes: states, requeues, resumed weights, both launchers."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlio.comm.allocation import expand_hosts
from tests.conftest import in_time
from tests.launch.slurm_lab import two_nodes

pytestmark = [pytest.mark.nightly, pytest.mark.mpi]

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 240


class _Lab:
    """The commands of Slurm in an empty folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        rooms = (_ROOT, *(_ROOT / each for each in ("readers", "staging", "bench")))
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(map(str, rooms)),
            "OMP_NUM_THREADS": "1",
            "DLIO_CACHE": str(folder / "cache"),
        }

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command; return both of its outputs."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def fact(self, job: str, name: str) -> str:
        """Return a fact of a job, such as its JobState."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def comes_to(self, job: str, state: str) -> bool:
        """Wait until a job is in a state."""
        return in_time(lambda: self.fact(job, "JobState") == state, _TIMEOUT_S)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def lab(slurm: dict[str, str], tmp_path: Path) -> _Lab:
    return _Lab(tmp_path, slurm)


def _train(pictures: Path, *more: str) -> list[str]:
    words = f"train {pictures} --epochs 3 --batch-size 4 --image-size 32 --model lenet --seed 3"
    return [*words.split(), *more]


def test_a_preempted_job_goes_on_as_if_undisturbed_and_evicts_at_its_end(
    lab: _Lab, pictures: Path
) -> None:
    tier = lab.folder / "tier"
    tier.mkdir()
    lab.run("dlio", "launch", "-n", "2", *_train(pictures, "--save", "plain", "--tiers", "none"))
    own = ("--checkpoint", "ck", "--checkpoint-every", "1", "--save", "weights")
    lab.run(
        *("dlio", "launch", "--stage", "--slurm", "nodes=2,time=10m,name=lab,signal=60"),
        *_train(pictures, *own, "--tiers", f"{tier}:1GiB"),
    )
    assert in_time(lambda: bool(list(lab.folder.glob("ck/step-*"))), _TIMEOUT_S)
    lab.run("scancel", "--signal=USR1", "--batch", "1")
    assert lab.comes_to("1", "PENDING")
    assert lab.comes_to("1", "COMPLETED")
    assert (lab.fact("1", "Restarts"), lab.fact("1", "ExitCode")) == ("1", "0:0")
    said = (lab.folder / "lab-1.out").read_text()
    assert "resumed from" in said
    assert "MPI_ABORT" not in said
    assert (lab.folder / "weights").read_bytes() == (lab.folder / "plain").read_bytes()
    assert not list(tier.rglob("*.blk"))


def test_errors_and_cancelled_jobs_do_not_come_back(lab: _Lab, pictures: Path) -> None:
    def submit(name: str, *more: str) -> str:
        words = ("dlio", "launch", "--slurm", f"nodes=2,time=10m,name={name}")
        said = lab.run(*words, *_train(pictures, "--tiers", "none", *more))
        return said.splitlines()[-1].split()[1]

    job = submit("fails", "--checkpoint", "a", "--weights", "nowhere")
    assert lab.comes_to(job, "FAILED")
    assert lab.fact(job, "ExitCode") == "2:0"
    job = submit("ends", "--checkpoint", "b", "--checkpoint-every", "1", "--epochs", "500")
    assert in_time(lambda: bool(list(lab.folder.glob("b/step-*"))), _TIMEOUT_S)
    lab.run("scancel", job)
    assert lab.comes_to(job, "CANCELLED")
    in_time(lambda: "COMPLETING" not in lab.run("squeue"), 60)
    time.sleep(8)  # Longer than a requeued job waits here.
    assert (lab.fact(job, "JobState"), lab.fact(job, "Restarts")) == ("CANCELLED", "0")


def test_mpirun_and_srun_train_alike_on_all_nodes(lab: _Lab, pictures: Path) -> None:
    own = ("salloc", "--nodes=2", "--ntasks-per-node=1")
    words = _train(pictures, "--tiers", "none", "--epochs", "1")
    said = lab.run(*own, "dlio", "launch", *words, "--save", "mpi")
    assert "2 ranks on 2 nodes of Slurm's job" in said
    assert "by mpirun" in said
    said = lab.run(*own, "dlio", "launch", "--backend", "torch", *words, "--save", "torch")
    assert "by srun" in said
    task = ("srun", "dlio", "launch", "--backend", "torch")
    lab.run(*own, "env", "MASTER_ADDR=127.0.0.1", *task, *words, "--save", "task")
    weights = {(lab.folder / name).read_bytes() for name in ("mpi", "torch", "task")}
    assert len(weights) == 1


def test_tasks_of_srun_that_do_not_find_each_other_are_refused(lab: _Lab, pictures: Path) -> None:
    words = ("dlio", *_train(pictures, "--tiers", "none"))
    said = lab.run("srun", "--nodes=2", "--ntasks=2", *words, code=2)
    assert "srun dlio launch" in said


def test_slurm_names_the_nodes_that_are_read_from_its_variables(lab: _Lab) -> None:
    for text in ("n[1-3,7],login2", "rack[1-2]n[01-03]", "a-[008-011],b"):
        assert tuple(lab.run("scontrol", "show", "hostnames", text).split()) == expand_hosts(text)
