"""A signal to `dlio train` at any moment: one true line, the code of the guides, nothing left."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SOURCES, in_time

pytestmark = [pytest.mark.mpi, pytest.mark.cold]

UNSAVED = ["dlio: told to end before the first step: there is nothing to save"]
INTERRUPTED = ["dlio: interrupted"]
MOMENTS = {
    "options": ("command", "dlio.cli.train_command"),
    "check": ("command", "dlio.launch.mpi_launch"),
    "python": ("1", "dlio.cli"),
    "order": ("1", "dlio.comm.launch_environment"),
    "torch": ("0", "torch"),
    "import": ("1", "dlio.train.worker"),
    "data": ("0", "dlio.train.checkpoint.checkpoint_store"),
    "step": ("0", "moment_of_step"),
    "exit": ("0", "exit"),
}
"""The process that comes to a moment, and the module that it imports there."""
ALONE = {"options", "torch", "import", "data", "step", "exit"}
"""Moments that one process comes to, too."""
BEFORE_STEPS = {"check", "python", "order", "torch", "import", "data"}
DAILY = {
    ("mpi", "python", signal.SIGTERM, True),
    ("torch", "order", signal.SIGUSR1, True),
    ("torch", "step", signal.SIGHUP, True),
    ("one", "torch", signal.SIGINT, False),
    ("one", "import", signal.SIGUSR1, False),
}


def _cases() -> list[Any]:
    return [
        pytest.param(*case, marks=[] if case in DAILY else pytest.mark.nightly)
        for mode in ("one", "mpi", "torch")
        for moment in MOMENTS
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        for saves in (True, False)
        if (mode != "one" or moment in ALONE) and (moment != "data" or saves)
        for case in [(mode, moment, number, saves)]
    ]


def _left(mark: str) -> list[str]:
    """Return the commands of processes that have a variable of this value."""
    commands = []
    for process in os.listdir("/proc"):
        try:
            folder = Path("/proc", process)
            if process.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            pass
    return commands


@pytest.mark.parametrize(("mode", "moment", "number", "saves"), _cases())
def test_a_signal_ends_a_run_with_one_true_line_and_leaves_nothing(
    mode: str, moment: str, number: int, saves: bool, pictures: Path, here: Path
) -> None:
    own, temporary = here / "own", here / "tmp"
    own.mkdir()
    temporary.mkdir()
    shutil.copy(Path(__file__).with_name("signals_at.py"), own / "sitecustomize.py")
    place, module = MOMENTS[moment]
    if mode == "torch" and moment == "check":
        module = "dlio.launch.torch_launch"
    command = [sys.executable, "-m", "dlio.cli", "train", str(pictures), "--image-size", "32"]
    epochs = "1" if moment == "exit" else "10000"
    command += ["--epochs", epochs, "--batch-size", "4", "--workers", "1", "--model", "nets:mlp"]
    command += ["--callback", "nets:Moment"]
    command += ["-n", "2", "--backend", mode] if mode != "one" else []
    command += ["--checkpoint", "c"] if saves else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(own), SOURCES]),
        "DLIO_CACHE": str(here / "cache"),
        "DLIO_TEST_COLD": "1",
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(here / "torch"),  # It keeps that of TMPDIR.
        "SIGNAL_AT": f"{int(number)} {'command' if mode == 'one' else place} {module}",
        "SIGNAL_SENT": str(here / "sent"),
    }
    with subprocess.Popen(
        command,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:
        shown, errors = run.communicate(timeout=400)
    assert (here / "sent").exists(), "the run did not come to this moment"
    said = [line for line in errors.splitlines() if line.strip()]
    is_order = saves and number != signal.SIGINT
    if moment == "exit" and (is_order or mode == "one"):
        assert run.returncode == 0 or number == signal.SIGINT, errors
    elif is_order and moment == "step":
        assert run.returncode == 75, errors
        assert "go on with --resume" in shown + errors
        assert not said or "--resume" in said[-1]
    elif is_order and moment in BEFORE_STEPS:
        assert (run.returncode, said) == (75, UNSAVED)
    elif moment != "exit":
        assert (run.returncode, said) == (130, INTERRUPTED)
    assert in_time(lambda: not _left(str(here / "sent")), 60), _left(str(here / "sent"))
    assert not list(temporary.iterdir())
