"""Real jobs whose ranks' sockets are attacked."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlio.comm.net.address import LOOPBACK
from dlio.launch import mpi_launch, torch_launch
from tests.conftest import in_time
from tests.hostile.sockets import listening

MEETING = str(Path(__file__).with_name("meeting.py"))
BODY = str(Path(__file__).with_name("beleaguered.py"))
FLOOD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for port in map(int, sys.argv[2:]):
    for _ in range(int(sys.argv[1])):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(("127.0.0.1", port))
print("flooded", flush=True)
sys.stdin.read()
"""


def _ended(folder: Path, launcher: str, flood: int, files: int) -> subprocess.CompletedProcess[str]:
    """Run a job, attack the sockets of its ranks, and return its end."""
    done: list[subprocess.CompletedProcess[str]] = []
    shell = f'ulimit -n {files}; exec "$@"'
    limited = ["sh", "-c", shell, "sh", sys.executable, BODY, str(folder)]

    def run() -> None:
        least = 1 if launcher == "surviving" else None
        start = mpi_launch.launch if launcher == "mpi" else torch_launch.launch
        done.append(start(limited, 2, capture=True, timeout_s=120, min_ranks=least))

    def texts() -> list[str]:
        return [path.read_text("ascii") for path in folder.glob("pid-*")]

    job = threading.Thread(target=run)
    job.start()
    try:
        # A file is there before its text.
        met = in_time(lambda: len([*filter(None, texts())]) == 2, 60)
        pids = [int(text) for text in texts()]
        places = set[tuple[str, int]]().union(*map(listening, pids)) if met else set()
        assert {host for host, _ in places} == (set() if launcher == "mpi" else {LOOPBACK}), places
        ports = [str(port) for _, port in places]
        _flooded([str(flood), *ports], folder / "enough", job)
    finally:
        (folder / "enough").touch()
        job.join(120)
    return done[0]


def _flooded(arguments: Sequence[str], enough: Path, job: threading.Thread) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as attack:
        assert attack.stdout is not None
        assert attack.stdout.readline() == "flooded\n"
        enough.touch()
        job.join(120)
        attack.communicate("")


def test_ranks_that_meet_at_loopback_listen_nowhere_else() -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = str(free.getsockname()[1])
    started = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [sys.executable, MEETING],
                env=os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=400)[0] for process in started]
    assert said == [f"[0, 1] 2 {LOOPBACK}\n"] * 2


@pytest.mark.mpi
@pytest.mark.cold("nightly")
@pytest.mark.parametrize(
    "launcher",
    ["surviving", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("torch", "mpi"))],
)
def test_a_job_goes_on_while_thousands_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    ended = _ended(tmp_path, launcher, 1300, 1024)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("slowest round") == 2
