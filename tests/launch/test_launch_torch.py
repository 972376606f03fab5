"""The launcher without MPI: it tells the ranks of deaths, reports errors and ends with them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlio.errors import UsageError
from dlio.launch import mpi_launch, torch_launch
from dlio.launch.command_ranks import has_mpi, on_ranks
from tests.conftest import in_time, is_running

PLACE = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"


def _launch(
    text: str, ranks: int = 3, *, min_ranks: int | None = None, timeout_s: float = 60
) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-c", PLACE + text]
    return torch_launch.launch(argv, ranks, capture=True, timeout_s=timeout_s, min_ranks=min_ranks)


def test_ranks_know_their_places() -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    done = _launch(f"print(rank, *[os.environ[name] for name in {names!r}])")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{k} 3 {k} 127.0.0.1" for k in range(3)]


def test_a_failed_rank_ends_the_others() -> None:
    done = _launch("time.sleep(0 if rank == 1 else 600); print('no', file=sys.stderr); sys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "no\n")


FEW_FILES = """
import json, resource
import dlio.comm.torchdist, dlio.comm.survival.store_membership
most = max(map(int, os.listdir('/proc/self/fd'))) + {more}
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
from dlio.cli.command_line import guarded
from dlio.launch.command_ranks import run_as_rank
task = {{"ranks": 2, "may_end": False, "command": ["dlio"], "function": "dlio.comm:world"}}
os.environ["DLIO_RECORD"] = json.dumps({{**task, "records": []}})
guarded(run_as_rank)
"""


@pytest.mark.cold
@pytest.mark.parametrize("more", [8, 12])
@pytest.mark.parametrize("survives", [False, True])
def test_ranks_that_may_open_no_more_files_say_so(more: int, survives: bool) -> None:
    least = 1 if survives else None
    done = _launch(FEW_FILES.format(more=more), 2, min_ranks=least)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert "ulimit -n" in done.stderr
    assert "another rank is stopped" not in done.stderr


def test_a_killed_rank_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    done = _launch("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)")
    assert done.returncode == 137
    assert "rank 1 was ended by SIGKILL, and with it the others" in capfd.readouterr().err


def test_ranks_that_survive_others_go_on() -> None:
    text = "os._exit(rank)\n"
    assert _launch(text, min_ranks=1).returncode == 0


def test_a_job_of_which_no_rank_is_left_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert _launch("os._exit(9)", min_ranks=1).returncode == 1
    assert "dlio: error: all ranks were lost before the end" in capfd.readouterr().err


def test_an_error_of_one_rank_ends_those_that_survive_it() -> None:
    text = "open(os.environ['DLIO_DONE'], 'w').write('2') if rank == 0 else time.sleep(600)"
    assert _launch(text, min_ranks=1).returncode == 2


def test_no_rank_outlasts_the_deadline(tmp_path: Path) -> None:
    text = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        _launch(text, timeout_s=1.0)
    assert not any(is_running(int(path.name)) for path in tmp_path.iterdir())


def test_pipes_are_closed_once_a_process_that_outlives_its_rank_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dlio.launch.rank_output._END_TIMEOUT_S", 0.2)
    before = len(os.listdir("/dev/fd"))
    end = tmp_path / "end"
    wait = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)"
    child = f"subprocess.Popen([sys.executable, '-c', {wait!r}], start_new_session=True)"
    assert _launch(f"import subprocess\n{child}", 1).returncode == 0
    assert len(os.listdir("/dev/fd")) > before
    end.touch()
    assert in_time(lambda: len(os.listdir("/dev/fd")) == before)


@pytest.mark.nightly
def test_deaths_are_events_of_the_store() -> None:
    """A rank sees the death of another, in the store to which its environment points."""
    text = (
        "if rank: os._exit(3)\n"
        "from dlio.comm.survival.job_store import EventLog, open_store\n"
        "print(EventLog(open_store()).next())"
    )
    done = _launch(text, 2, min_ranks=1)
    assert done.stdout == "{'dead': 1}\n", done.stderr


@pytest.mark.nightly
def test_process_groups_of_a_script_use_the_same_store() -> None:
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ones = torch.ones(1); dist.all_reduce(ones); print(int(ones))\n"
        "dist.destroy_process_group()"
    )
    done = _launch(text)
    assert done.stdout.split() == ["3"] * 3, done.stderr


@pytest.mark.nightly
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    rank = (
        "import os, time\n"
        "from dlio.comm.launch_environment import watch_launcher; watch_launcher()\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(600)"
    )
    text = (
        "import sys; from dlio.launch.torch_launch import launch\n"
        f"launch([sys.executable, '-c', {rank!r}], 2)"
    )
    with subprocess.Popen([sys.executable, "-c", text]) as launcher:
        assert in_time(lambda: len(list(tmp_path.iterdir())) == 2)
        launcher.kill()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert in_time(lambda: not any(map(is_running, pids)))


def _started(monkeypatch: pytest.MonkeyPatch, backend: str) -> str:
    """Return the launcher that `on_ranks` chooses."""
    chosen: list[str] = []
    for name, module in (("mpi", mpi_launch), ("torch", torch_launch)):

        def launch(*_: object, n: str = name, **__: object) -> subprocess.CompletedProcess[str]:
            chosen.append(n)
            return subprocess.CompletedProcess([], 0)

        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    assert on_ranks(2, _started, backend=backend)
    return chosen[0]


def test_mpi_is_taken_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launch, "find_mpirun", lambda: "mpirun")
    installed = importlib.util.find_spec("mpi4py") is not None
    assert has_mpi() == installed
    assert _started(monkeypatch, "auto") == ("mpi" if installed else "torch")
    assert _started(monkeypatch, "torch") == "torch"

    def missing() -> str:
        raise UsageError("not installed")

    monkeypatch.setattr(mpi_launch, "find_mpirun", missing)
    assert _started(monkeypatch, "auto") == "torch"
    assert _started(monkeypatch, "mpi") == "mpi"


def test_ranks_are_started_within_a_step_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "1")
    assert _started(monkeypatch, "torch") == "torch"
    assert os.environ["PMI_SIZE"] == "1"
