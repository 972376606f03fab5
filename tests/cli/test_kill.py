"""However a job ends, nothing of it is left: no process, no shared memory, no half-written file."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlio.util.shared import SHARED_MEMORY, sweep_shared_memory, user_folder

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).resolve().parents[2]
Soon = Callable[[Callable[[], bool]], bool]
OURS = Path(SHARED_MEMORY, user_folder())


@pytest.fixture
def job(pictures: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training job on 2 ranks, in the middle of its work."""
    sweep_shared_memory()
    if OURS.is_dir():
        pytest.skip("another job of dlio's runs on this machine")
    (tmp_path / "before").write_text("\n".join(_segments()), encoding="utf-8")
    paths = [str(ROOT), *(str(ROOT / room) for room in ("readers", "staging", "bench"))]
    options = ["-n", "2", "--pretend-nodes", "2", "--epochs", "5000", "--batch-size", "2"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tiers = ["--tiers", f"ram:100KiB,{scratch}:64MiB"]
    files = ["--report", str(tmp_path / "r.json"), "--trace", str(tmp_path / "t.json")]
    with subprocess.Popen(
        [sys.executable, "-m", "dlio.cli", "train", str(pictures), *options, *files, *tiers],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DLIO_CACHE": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        try:
            assert "epoch 1/5000" in run.stdout.readline()
            assert list(OURS.glob("*/*.blk"))
            assert list(scratch.rglob("*.blk"))
            assert len(_processes(tmp_path)) >= 4
            yield run
        finally:
            for process in _processes(tmp_path):
                os.kill(process, signal.SIGKILL)


def _processes(tmp_path: Path) -> list[int]:
    """Launcher, mpirun and ranks of the job, by what they inherit from it."""
    inherited = f"DLIO_CACHE={tmp_path}\0".encode()
    processes = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "cmdline").read_bytes()
                variables = Path("/proc", entry, "environ").read_bytes()
            except OSError:
                continue
            if b"dlio.cli" in words and inherited in variables:
                processes.append(int(entry))
    return processes


def _segments() -> set[str]:
    """Open MPI's, in shared memory."""
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith("sm_segment")}


def _nothing_is_left(tmp_path: Path) -> bool:
    halves = [*tmp_path.rglob("*.tmp"), *tmp_path.rglob("tmp.*")]
    before = (tmp_path / "before").read_text(encoding="utf-8").split()
    segments = _segments().difference(before)
    return not (_processes(tmp_path) or OURS.is_dir() or segments or halves)


def test_ctrl_c_ends_all_ranks_at_once(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=30)
    assert job.returncode == 130
    assert said.splitlines() == ["dlio: interrupted"]
    assert soon(lambda: _nothing_is_left(tmp_path))
    assert not (tmp_path / "r.json").exists()


def test_a_rank_that_is_killed_ends_the_job(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    ranks = [
        process
        for process in _processes(tmp_path)
        if process != job.pid and b"mpirun" not in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    os.kill(ranks[0], signal.SIGKILL)
    job.communicate(timeout=30)
    assert job.returncode not in (0, 2)
    # What the trace had so far stays beside its name: rank 0 may be the one that was killed.
    for file in tmp_path.glob("t.json.*.tmp"):
        file.unlink()
    assert soon(lambda: _nothing_is_left(tmp_path))


def test_a_launcher_that_is_killed_takes_its_ranks_along(
    job: subprocess.Popen[str], tmp_path: Path, soon: Soon
) -> None:
    job.kill()
    job.communicate(timeout=30)
    assert soon(lambda: _nothing_is_left(tmp_path))
    # The disk tier that it leaves serves no wrong byte: every block is whole.
    from dlio_staging.verify import verify

    found = verify(str(tmp_path / "scratch"))
    assert found.samples > 0
    assert found.damaged == []
