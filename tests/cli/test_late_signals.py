"""Signals that come while a command is loaded, or when its processes are ending already."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.train.departure import EndRequests
from dlio.util import signals
from dlio.util.signals import as_command

PROGRAM = """
import atexit, os
from dlio.cli.command_line import guarded
atexit.register(lambda: print("left"))
atexit.register(lambda: os.kill(os.getpid(), {number}))

def run():
    print("done")
    if {code}:
        raise SystemExit({code})

guarded(run)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize("rank", [False, True])
def test_it_does_not_change_the_exit_code(number: int, code: int, rank: bool) -> None:
    program = PROGRAM.format(number=int(number), code=code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **({"OMPI_COMM_WORLD_SIZE": "1"} if rank else {})},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == code, done.stderr
    # SIGTERM ends a process at once, but not a rank of MPI, which takes its time to leave.
    at_once = number == signal.SIGTERM and not rank
    assert done.stdout.split() == (["done"] if at_once else ["done", "left"])
    assert not done.stderr


NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("argv", [["--version"], ["nonsense"]])
def test_a_program_that_calls_a_command_keeps_its_handlers(argv: list[str]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(SystemExit):
        main(argv)
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_no_signal_kills_a_command_between_its_training_and_its_report() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    asked = []
    with as_command():
        with EndRequests() as requests:
            requests.ask = lambda: asked.append(True)
        for number in NUMBERS:
            signal.raise_signal(number)  # Without the handler this test's process would end.
    assert not asked
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_training_in_a_program_gives_signals_their_former_effect() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with EndRequests():
        assert [signal.getsignal(number) for number in NUMBERS] != before
    assert [signal.getsignal(number) for number in NUMBERS] == before


DESTRUCTOR = """
import os, signal, sys, threading, time, weakref
from dlio.cli.command_line import guarded

class Thing:
    pass

class SlowTimer(threading.Timer):
    def start(self):
        super().start()
        time.sleep(0.1)

if "starts" in sys.argv:
    threading.Timer = SlowTimer

def run():
    thing = Thing()
    weak = weakref.ref(thing, lambda _: signal.raise_signal(int(sys.argv[1])))
    del thing
    if "waits" in sys.argv:
        time.sleep(400)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.001)
    print("went on")

guarded(run)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("then", ["runs", "waits", "starts"])
def test_an_interruption_of_a_callback_that_cannot_raise_ends_the_command(
    number: int, then: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESTRUCTOR, str(int(number)), then],
        # A shell's background jobs ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr == "dlio: interrupted\n"


def _interrupted(released: list[int]) -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        released.append(1)


def test_signals_at_once_are_one_and_let_resources_be_released() -> None:
    released: list[int] = []
    for _ in range(2):  # Another command hears its own.
        with as_command(), pytest.raises(KeyboardInterrupt):
            _interrupted(released)
    assert released == [1, 1]


def test_a_later_signal_ends_what_the_first_one_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_S", 0.0)
    with as_command():
        for _ in range(2):
            time.sleep(0.001)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_ends_does_not_look_for_garbage(ends: bool) -> None:
    program = (
        "import atexit, gc\nfrom dlio.cli.command_line import guarded\n"
        "before = gc.get_freeze_count()\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > before))\n"
        f"guarded(lambda: None, ends={ends})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True
    )
    assert done.stdout == f"{ends}\n"


@pytest.mark.mpi
def test_a_process_that_a_script_forks_ends_by_a_signal_as_without_dlio(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(
        """
import multiprocessing, time
def work(ready):
    ready.send("ready")
    time.sleep(600)
receives, sends = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=work, args=(sends,))
child.start()
receives.recv()
child.terminate()
child.join()
print(child.exitcode)
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "run", "-n", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGTERM)]
    assert "Traceback" not in done.stderr, done.stderr


LOADING = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[-1]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

class Errors:
    def write(self, text):
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
        signal.raise_signal(signal.SIGINT)

    def flush(self):
        pass

sys.meta_path.insert(0, Finder())
if "twice" in sys.argv:
    sys.stderr = Errors()
from dlio.cli import main
del sys.argv[3:]
main()
"""


@pytest.mark.cold
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("module", ["dlio.cli.command_line", "cyclopts", "numpy._core", "torch"])
def test_an_interruption_while_a_command_is_loaded_is_one_line(
    module: str, twice: bool, pictures: Path
) -> None:
    program = LOADING.replace("sys.argv[-1]", repr(module))
    done = subprocess.run(
        [sys.executable, "-c", program, "view", str(pictures), *(["twice"] if twice else [])],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "dlio: interrupted\n"


@pytest.mark.cold
def test_little_is_loaded_before_an_interruption_is_one_line() -> None:
    program = (
        "import sys; before = {*sys.modules}; import dlio.cli; print(*{*sys.modules} - before)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert "dlio.util.early_interrupt" in done.stdout.split()
    assert not {"typing", "re", "dataclasses"} & {*done.stdout.split()}
