"""The stand-in for Python that tests start is a fork, and ends as an interpreter does."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dlio.util.child_processes import module_command
from tests.conftest import in_time

PROGRAMS = {
    "output": "print('said', end='')",
    "code": "import sys; print(1); sys.exit(3)",
    "large code": "import sys; sys.exit(259)",
    "text": "import sys; sys.exit('why')",
    "exception": "import atexit; atexit.register(print, 'last'); 1 / 0",
    "exit handlers": "import atexit; atexit.register(print, 'last'); print('first')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('joined'))).start()",
    "daemon": "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('left')",
    "closed output": "import sys; sys.stdout.close(); sys.exit(4)",
    "safe path": "import sys; print(sys.flags.safe_path, sys.flags.utf8_mode, '' in sys.path)",
}


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """Wait for a server; skip where there is none."""
    if request.config.getoption("--cold"):
        pytest.skip("--cold")
    folder = Path(sys.executable).parent
    assert in_time(lambda: any(folder.glob("*.socket")), 120)


def _run(command: list[str], program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_processes_that_dlio_starts_are_forks() -> None:
    command = module_command("dlio.cli.rank_main")
    assert command[-2:] == ["-m", "dlio.cli.rank_main"]
    done = _run(command[:-2], "import sys; print('dlio.train.trainer' in sys.modules)")
    assert done.stdout == "True\n", done.stderr


def test_the_server_outlives_clients_that_are_killed() -> None:
    for k in range(30):
        client = subprocess.Popen([sys.executable, "-P", "-c", "import time; time.sleep(600)"])
        with suppress(subprocess.TimeoutExpired):
            client.wait(0.002 * k)
        client.kill()
        client.wait(60)
    test_processes_that_dlio_starts_are_forks()


def test_a_server_whose_session_has_ended_before_it_answers_ends_without_a_word(
    tmp_path: Path,
) -> None:
    server = Path(__file__).parents[1] / "warm" / "server.py"
    done = subprocess.run(
        [sys.executable, str(server), str(tmp_path / "gone" / "0.socket")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_ends_as_an_interpreter_does(name: str) -> None:
    fork, fresh = (
        _run([sys.executable, "-P"], PROGRAMS[name], **more)
        for more in ({}, {"DLIO_TEST_COLD": "1"})
    )
    assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
    assert fork.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_output_of_a_fork_is_written_at_once_on_request() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", "print(1, end=''); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.read(1) == b"1"
        program.communicate(b"\n", timeout=60)


def test_a_fork_imports_dlio_from_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "dlio").mkdir()
    (tmp_path / "dlio" / "__init__.py").write_text("mine = True\n", encoding="utf-8")
    program = "import dlio, sys; print(dlio.mine, 'torch' in sys.modules)"

    def forked() -> bool:
        # On a busy machine a server may not answer in time, and a new interpreter runs it.
        done = _run([sys.executable, "-P"], program, PYTHONPATH=str(tmp_path))
        assert done.stdout in ("True True\n", "True False\n"), done.stderr
        return done.stdout == "True True\n"

    assert in_time(forked, 120)
