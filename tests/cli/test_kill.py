"""A job leaves no process, shared memory or half-written file behind, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from dlio.util.shared_folders import SHARED_MEMORY, sweep_shared_memory, user_folder
from tests.conftest import SOURCES, shared_folders_of

# At night, the signals reach interpreters without a stand-in before them.
pytestmark = [pytest.mark.mpi, pytest.mark.cold("nightly")]
ROOT = Path(__file__).resolve().parents[2]
Soon = Callable[[Callable[[], bool]], bool]
OURS = Path(SHARED_MEMORY, user_folder())


@pytest.fixture
def job(pictures: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training job on 2 ranks that has trained for one epoch of 5,000."""
    sweep_shared_memory()
    options = ["-n", "2", "--pretend-nodes", "2", "--epochs", "5000", "--batch-size", "2"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    _folder(tmp_path).mkdir()
    tiers = ["--tiers", f"ram:100KiB,{scratch}:64MiB"]
    files = ["--report", str(tmp_path / "r.json"), "--trace", str(tmp_path / "t.json")]
    with subprocess.Popen(
        [sys.executable, "-m", "dlio.cli", "train", str(pictures), *options, *files, *tiers],
        env={**os.environ, "PYTHONPATH": SOURCES, "DLIO_CACHE": str(tmp_path)},
        cwd=_folder(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        try:
            assert "epoch 1/5000" in run.stdout.readline()
            tiers_in_ram = shared_folders_of(open_reader(str(pictures)).fingerprint)
            assert any(list(tier.glob("*.blk")) for tier in tiers_in_ram)
            assert list(scratch.rglob("*.blk"))
            assert len(_processes(tmp_path)) >= 4
            holdings = _shared_memory(_processes(tmp_path))
            assert any(path.startswith(f"{OURS}/") for path in holdings)
            (tmp_path / "holdings").write_text("\n".join(holdings), encoding="utf-8")
            yield run
        finally:
            for process in _processes(tmp_path):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _processes(tmp_path: Path) -> list[int]:
    """Find the job's launcher, mpirun and ranks by the current folder, which they inherit."""
    processes = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == str(_folder(tmp_path)):
                    processes.append(int(entry))
    return processes


def _folder(tmp_path: Path) -> Path:
    return tmp_path / "here"


def _shared_memory(processes: list[int]) -> set[str]:
    """Return the files and folders in shared memory that processes have open or mapped."""
    paths: list[str] = []
    for process in processes:
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(FileNotFoundError):
                paths.append(os.readlink(f"/proc/{process}/fd/{descriptor}"))
        maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
        paths += ["/" + line.partition("/")[2] for line in maps]
    # All jobs of a user share the folder and the lock in it.
    return {
        path
        for path in paths
        if path.startswith(f"{SHARED_MEMORY}/") and path not in (str(OURS), f"{OURS}/sweep")
    }


def _leftovers(tmp_path: Path) -> list[str]:
    """Return the job's processes, half-written files and shared memory that are still there."""
    left = [f"process {process}" for process in _processes(tmp_path)]
    left += [str(path) for path in (*tmp_path.rglob("*.tmp"), *tmp_path.rglob("tmp.*"))]
    holdings = (tmp_path / "holdings").read_text(encoding="utf-8").splitlines()
    left += [path for path in holdings if os.path.lexists(path)]
    # The last job removes the user's folder; other jobs may still have folders in it.
    jobs = [name for name in os.listdir(OURS) if name != "sweep"] if OURS.is_dir() else None
    return [*left, str(OURS)] if jobs == [] else left


def test_ctrl_c_ends_all_ranks_at_once(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=400)
    assert job.returncode == 130
    assert said.splitlines() == ["dlio: interrupted"]
    assert soon(lambda: not _leftovers(tmp_path)), _leftovers(tmp_path)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.nightly  # By day, tests/train/loss and the storms of tests/bench kill ranks.
def test_a_rank_that_is_killed_ends_the_job(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    ranks = [
        process
        for process in _processes(tmp_path)
        if process != job.pid
        and b"dlio.cli.rank_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    os.kill(ranks[0], signal.SIGKILL)
    job.communicate(timeout=400)
    assert job.returncode not in (0, 2)
    assert soon(lambda: not _leftovers(tmp_path)), _leftovers(tmp_path)


def test_a_launcher_that_is_killed_takes_its_ranks_along(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    job.kill()
    job.communicate(timeout=400)
    assert soon(lambda: not _leftovers(tmp_path)), _leftovers(tmp_path)
    # Every block in the disk tier that it leaves is whole.
    from dlio_staging.verify import verify

    check = verify(str(tmp_path / "scratch"))
    assert check.samples > 0
    assert check.damaged == []
