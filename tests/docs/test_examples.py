"""The examples run on drawn pictures, and print the expected results."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SOURCES, TorchRun

ROOT = Path(__file__).resolve().parents[2]
# `python`, `mpirun` and `dlio` are those of the tests' warm interpreter, where there is one.
FOLDERS = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), os.environ["PATH"]]
EXAMPLES = ROOT / "examples"
PROGRAMS = {
    "draw_pictures.py",
    "drop_in.py",
    "distributed.py",
    "single_process.py",
    "custom_transform.py",
    "stage.sh",
}
if (ROOT / "dlio/features/mesh").is_dir():  # A feature's examples are deleted with it.
    PROGRAMS |= {"mesh_transformer.py", "mesh_volumes.py"}
JOBS = {
    "imagenet": (
        *("--slurm", "nodes=8,ranks-per-node=4,gpus-per-node=4,time=12h,name=imagenet", "--stage"),
        *("train", "/lustre/packed/train", "--val", "/lustre/packed/val"),
        *("--tiers", "ram:32GiB,$TMPDIR:500GiB", "--epochs", "90", "--image-size", "224"),
        *("--batch-size", "64", "--checkpoint", "/lustre/runs/ckpt", "--checkpoint-every", "500"),
        *("--report", "report.json"),
    ),
    "pack": (
        *("--slurm", "nodes=4,ranks-per-node=16,time=1h,name=pack"),
        *("pack", "/lustre/imagenet/train", "/lustre/packed/train", "--resize", "256"),
    ),
    "program": (
        *("--slurm", "nodes=2,ranks-per-node=8,time=2h,name=program"),
        *("--", "python", "my.py", "--epochs", "90"),
    ),
}
"""Arguments of `dlio launch --print` for each job script."""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command in an empty folder and return its standard output."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(FOLDERS),
        "PYTHONPATH": SOURCES,
        "OMP_NUM_THREADS": "1",
        "DLIO_CACHE": str(tmp_path / "cache"),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            timeout=400,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_every_example_has_a_test() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "slurm")}
    assert names == PROGRAMS
    assert {path.name for path in (EXAMPLES / "slurm").iterdir()} == {
        f"{name}.sbatch" for name in JOBS
    }


@pytest.mark.parametrize("name", JOBS)
def test_job_scripts_are_those_that_dlio_writes(run: Run, name: str) -> None:
    path = EXAMPLES / "slurm" / f"{name}.sbatch"
    setup = ("--setup", 'source "$HOME/venv/bin/activate"')
    assert path.read_text() == run("dlio", "launch", "--print", *setup, *JOBS[name])
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_pictures_are_drawn(run: Run, tmp_path: Path) -> None:
    run(sys.executable, str(EXAMPLES / "draw_pictures.py"), "pictures")
    assert len(list((tmp_path / "pictures" / "train").rglob("*.jpg"))) == 120


def test_the_drop_in_loader_trains(run: Run, pictures: Path) -> None:
    said = run(sys.executable, str(EXAMPLES / "drop_in.py"), str(pictures.parent))
    assert "epoch 1: loss" in said


@pytest.mark.mpi
def test_ranks_of_the_distributed_loop_share_the_samples(run: Run, pictures: Path) -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    script = str(EXAMPLES / "distributed.py")
    said = run(*launcher, sys.executable, script, str(pictures.parent))
    shares = [int(line.split()[6]) for line in said.splitlines() if line.startswith("epoch 1")]
    assert len(shares) == 2
    assert sum(shares) == 12


@pytest.mark.mpi
def test_the_unmodified_script_ends_with_the_same_weights(run: Run) -> None:
    script = str(EXAMPLES / "single_process.py")
    alone = run(sys.executable, script).split("weights:")[1]
    ranks = run("dlio", "run", "-n", "2", script).split("weights:")[1]
    expected = [float(each) for each in alone.strip(" []\n").split(",")]
    weights = [float(each) for each in ranks.strip().splitlines()[0].strip(" []").split(",")]
    assert weights == pytest.approx(expected, abs=0.002)


@pytest.mark.mpi
@pytest.mark.needs("mesh")
def test_ranks_share_volumes(run: Run) -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    script = str(EXAMPLES / "mesh_volumes.py")
    said = run(*launcher, sys.executable, script, "volumes.h5", "space=2")
    first = [line.split() for line in said.splitlines() if line.startswith("epoch 0")]
    slabs = 8 * 16 * 32 * 32 * (4 + 8)  # Bytes of half of 8 volumes and their classes.
    assert [int(words[-2]) for words in first] == [slabs, slabs]
    assert first[0][5] == first[1][5]  # The loss is that of whole volumes.


@pytest.mark.needs("mesh")
@pytest.mark.nightly  # By day, tests of the mesh train such models.
@pytest.mark.parametrize("arguments", [("model=2",), ("data=2", "fsdp")])
def test_ranks_share_layers(
    torchrun: TorchRun, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(EXAMPLES / "mesh_transformer.py")
    for said in torchrun(2, script, "rows.h5", *arguments):
        losses = [float(line.split()[-1]) for line in said.splitlines()]
        assert len(losses) == 8
        assert losses[-1] < losses[0] / 4


def test_a_custom_transform_is_applied(run: Run, pictures: Path) -> None:
    said = run(sys.executable, str(EXAMPLES / "custom_transform.py"), str(pictures.parent))
    assert "torch.uint8 (12, 3, 32, 32)" in said


def test_the_staging_script_runs(run: Run, pictures: Path, tmp_path: Path) -> None:
    run("sh", str(EXAMPLES / "stage.sh"), str(pictures), "scratch")
    assert not list((tmp_path / "scratch" / "tier").rglob("*.blk"))
