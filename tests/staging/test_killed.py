"""A packing whose processes are all killed at once leaves nothing in shared memory."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio_staging.pack_folder import in_processes, pack

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


def _exit(code: int) -> int:
    """Kill the worker, or return the code."""
    if code == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == 5:
        raise SourceError("5 cannot be read")
    return code


def _named_semaphores(session: int) -> list[str]:
    """Return the names in shared memory of semaphores that a session's processes use.

    A semaphore is mapped under a name that it had while it was made: its inode tells its own.
    """
    used = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.getsid(int(process)) == session:
                maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
                used |= {int(line.split()[4]) for line in maps if f"{MEMORY}/sem." in line}
    return [entry.name for entry in os.scandir(MEMORY) if entry.inode() in used]


@pytest.mark.cold
def test_a_group_that_is_killed_leaves_no_semaphore(pictures: Path, tmp_path: Path) -> None:
    text = f"""
import sys, time
sys.path[:0] = {[str(ROOT), str(ROOT / "readers"), str(ROOT / "staging")]!r}
from dlio_staging.pack import pack
def slowly(done, of):
    print(done, flush=True)
    time.sleep(600)
pack({str(pictures)!r}, {str(tmp_path / "out")!r}, progress=slowly, workers=2, shard_bytes=1 << 16)
"""
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "DLIO_CACHE": str(tmp_path / "cache")},
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline()
        semaphores = _named_semaphores(run.pid)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(60)
    assert semaphores == []
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
