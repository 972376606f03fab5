"""A packing whose processes are all killed at once leaves nothing in shared memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio_staging.pack import pack
from dlio_staging.processes import in_processes

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


def _exit(code: int) -> int:
    """Kill the worker, or return the code."""
    if code == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == 5:
        raise SourceError("5 cannot be read")
    return code


@pytest.mark.cold
def test_a_group_that_is_killed_leaves_no_semaphore(pictures: Path, tmp_path: Path) -> None:
    text = f"""
import sys, time
sys.path[:0] = {[str(ROOT), str(ROOT / "readers"), str(ROOT / "staging")]!r}
from dlio_staging.pack import pack
def slowly(done, of):
    print(done, flush=True)
    time.sleep(60)
pack({str(pictures)!r}, {str(tmp_path / "out")!r}, progress=slowly, workers=2, shard_bytes=1 << 16)
"""
    before = set(os.listdir(MEMORY))
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "DLIO_CACHE": str(tmp_path / "cache")},
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline()
        semaphores = {name for name in set(os.listdir(MEMORY)) - before if "sem." in name}
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(20)
    assert semaphores == set()
    assert {name for name in set(os.listdir(MEMORY)) - before if "sem." in name} == set()
    pack(str(pictures), str(tmp_path / "out"))
    source, packed = open_reader(str(pictures)), open_reader(str(tmp_path / "out"))
    assert len(packed) == len(source)


@pytest.mark.cold
def test_workers_give_results_and_errors_and_their_death_is_told() -> None:
    assert sorted(in_processes(_exit, [(k,) for k in range(4)], 2)) == [0, 1, 2, 3]
    with pytest.raises(SourceError, match="5 cannot be read"):
        list(in_processes(_exit, [(1,), (5,), (2,)], 2))
    with pytest.raises(SourceError, match="a worker process was killed"):
        list(in_processes(_exit, [(1,), (9,)], 2))


def test_no_named_semaphores_are_used() -> None:
    for room in ("dlio", "readers", "staging"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            assert "ProcessPoolExecutor" not in text, path
            assert "multiprocessing.Pool" not in text, path
