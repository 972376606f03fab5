"""Agent, zygote and shim as processes, without MPI: how ranks begin and end, and what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dlio.launch.node import shim
from dlio.launch.node.agent_protocol import BEAT_S, PeerSilence, job_folder
from dlio.util.shared_folders import SHARED_MEMORY, user_folder

pytestmark = pytest.mark.cold

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_there(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class _Job:
    """An agent with a light zygote, as the launcher sees it."""

    def __init__(self, folder: Path, silence_s: float = 1e9) -> None:
        self.token = f"test{os.getpid()}{time.monotonic_ns()}"
        self.folder = Path(job_folder(self.token, socket.gethostname()))
        self.agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "dlio.launch.node.node_agent", self.token],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        environment = {"GIVEN": "by the launcher", "PMIX_RANK": "of another job"}
        modules = ["token", "no.such.module"]
        self.order(environment=environment, modules=modules, folder="/", silence_s=silence_s)
        self.node = self.answer("node")["node"]

    def order(self, **order: object) -> None:
        assert self.agent.stdin is not None
        self.agent.stdin.write(json.dumps(order).encode() + b"\n")
        self.agent.stdin.flush()

    def answer(self, name: str) -> dict[str, Any]:
        """Return the next answer that has a name."""
        assert self.agent.stdout is not None
        while True:
            answer: dict[str, Any] = json.loads(self.agent.stdout.readline())
            if name in answer:
                return answer

    def rank(self, *argv: str, start: int = 0, **own: str) -> subprocess.Popen[str]:
        """Start a shim."""
        folder = str(self.folder).replace(socket.gethostname(), "{node}")
        command = ["-I", "-S", str(shim.__file__), folder, str(start), "tests.launch.programs"]
        return subprocess.Popen(
            [sys.executable, *command, *argv],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def zygote(self) -> int:
        """Return the process id of the zygote."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text()
        (zygote,) = (
            int(each)
            for each in children.split()
            if b"dlio.launch.node.zygote" in Path(f"/proc/{each}/cmdline").read_bytes()
        )
        return zygote

    def close(self) -> None:
        assert self.agent.stdin is not None
        assert self.agent.stdout is not None
        with suppress(OSError):
            self.agent.stdin.close()
        try:
            assert self.agent.wait(TIMEOUT_S) is not None
        finally:
            self.agent.kill()
            self.agent.stdout.close()


@pytest.fixture(scope="module")
def light_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLIO_TEST_COLD", "1")
        job = _Job(tmp_path_factory.mktemp("job"))
        job.order(start=0, environment={"STARTED": "once"})
        yield job
        job.close()
    _until(lambda: not job.folder.exists())


def test_a_rank_has_environment_folder_and_streams(light_job: _Job, tmp_path: Path) -> None:
    with light_job.rank("tell", "more", PMIX_RANK="3", OF_SHIM="yes", GIVEN="by ssh") as rank:
        output, errors = rank.communicate("from standard input", timeout=TIMEOUT_S)
    assert rank.returncode == 0, errors
    facts = json.loads(output)
    environment = facts["environment"]
    assert environment["GIVEN"] == "by the launcher"
    assert environment["STARTED"] == "once"
    assert environment["PMIX_RANK"] == "3"
    assert environment["OF_SHIM"] == "yes"
    assert environment["DLIO_AGENT"] == str(light_job.folder)
    assert environment["DLIO_LAUNCHER_PID"] == str(light_job.agent.pid)
    assert facts["folder"] == os.getcwd()
    assert facts["argv"] == ["tell", "more"]
    assert facts["imported"]
    assert facts["error"] == "from standard input"
    assert facts["descriptors"] == 3, "a rank inherits nothing of the zygote"
    assert errors == "to standard error\n"
    assert rank.returncode == 0


@pytest.mark.parametrize(
    ("how", "own", "code"),
    [
        ("exit", {}, 7),
        ("exit", {"OMPI_MCA_mpi_ft_enable": "1"}, -signal.SIGKILL),
        ("segv", {}, -signal.SIGSEGV),
    ],
)
def test_a_shim_ends_as_its_rank(light_job: _Job, how: str, own: dict[str, Any], code: int) -> None:
    with light_job.rank(how, **own) as rank:
        rank.communicate(timeout=TIMEOUT_S)
    assert rank.returncode == code


def test_a_rank_ends_with_its_shim_and_gets_its_signals(light_job: _Job) -> None:
    with light_job.rank("sleep") as killed, light_job.rank("sleep") as ended:
        assert killed.stdout is not None
        assert ended.stdout is not None
        process = int(killed.stdout.readline())
        ended.stdout.readline()
        killed.kill()
        ended.terminate()
        _until(lambda: not _is_there(process))
        assert ended.wait(TIMEOUT_S) == 5


def test_shims_of_another_start_and_of_no_job_get_no_rank(light_job: _Job) -> None:
    with light_job.rank("tell", start=-2) as rank:
        assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    command = [sys.executable, "-I", "-S", str(shim.__file__), "/dev/shm/nothing.{node}", "0", "m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"dlio: error: node {socket.gethostname()} has no agent")


def test_others_cannot_enter(light_job: _Job) -> None:
    assert light_job.folder.stat().st_mode & 0o777 == 0o700
    for name in ("zygote", "keeper"):
        assert (light_job.folder / name).stat().st_mode & 0o777 == 0o600


def test_locks_outlive_ranks_and_all_ends_with_the_launcher(tmp_path: Path) -> None:
    """A whole life: a start, a stop, a lost zygote, another start, and the end."""
    job = _Job(tmp_path)
    assert job.node == socket.gethostname()
    job.order(start=0, environment={})
    name = f"kept{job.token}"
    kept = Path(SHARED_MEMORY, user_folder(), name)
    with job.rank("keep", name) as rank:
        assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    assert (kept / "contents").read_text() == "kept"
    with job.rank("sleep") as rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline())
        job.order(stop=True)
        assert job.answer("stopped").items() >= {"stopped": 0, "done": None, "newest": -1}.items()
        assert not _is_there(process)
        assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    job.order(start=1, environment={})
    with job.rank("sleep", start=1) as rank:
        assert rank.stdout is not None
        process, zygote = int(rank.stdout.readline()), job.zygote()
        os.kill(zygote, signal.SIGKILL)
        assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
        _until(lambda: not _is_there(process))
    # The agent has started another zygote.
    with job.rank("done", start=1) as rank:
        assert rank.wait(TIMEOUT_S) == 0
    assert job.answer("done")["done"] == 0
    assert (kept / "contents").exists()
    with job.rank("sleep", start=1) as rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline())
        job.close()
        _until(lambda: not _is_there(process))
        assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
    _until(lambda: not job.folder.exists() and not kept.exists())


def test_an_agent_that_hears_nothing_of_the_launcher_ends_with_its_ranks(tmp_path: Path) -> None:
    job = _Job(tmp_path, silence_s=2.0)
    try:
        job.order(start=0, environment={})
        with job.rank("sleep") as rank:
            assert job.agent.wait(TIMEOUT_S) == 0
            assert rank.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not job.folder.exists()
    finally:
        job.close()


def test_a_machine_that_stands_still_is_no_silence() -> None:
    now = [0.0]
    silence = PeerSilence(lambda: now[0])
    for _ in range(3):
        now[0] += 25.0
        assert silence.looked() <= BEAT_S
        silence.heard()
    looks = 0
    while silence.looked() <= 2.0:
        now[0] += 0.05
        looks += 1
    assert looks == pytest.approx(2.0 / 0.05, abs=1)


@pytest.mark.nightly
def test_an_agent_that_stood_still_with_the_launcher_lives_on(tmp_path: Path) -> None:
    job = _Job(tmp_path, silence_s=3.0)
    try:
        os.kill(job.agent.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(job.agent.pid, signal.SIGCONT)
        # It has looked, and ends if it ends.
        for _ in range(10):
            time.sleep(0.1)
            job.order(beat=True)
        assert job.agent.poll() is None
    finally:
        job.close()
