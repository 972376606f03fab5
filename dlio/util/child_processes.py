"""Processes: how dlio starts its own, their states as the kernel tells them, and their end."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import AnyStr, Final

_PR_SET_PDEATHSIG: Final = 1
STOPPED_S: Final = 1.5
"""Seconds that a rank may be stopped: Ctrl-Z and `fg` stop all of a job, its watcher, too."""


def module_command(module: str, *argv: str) -> list[str]:
    """Return the command that runs an installed module in a new process of Python.

    Nothing is imported from the current folder, which may be a data set of anyone's.
    """
    return [sys.executable, "-P", "-m", module, *argv]


def printed_by(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Return the output and the errors of a command; empty if it cannot run or does not end."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return done.stdout, done.stderr


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Have an environment variable meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, or now if that is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die() -> None:
    """End this process by a signal, which alone tells other ranks of an MPI job that it is lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def end_groups(processes: Sequence["subprocess.Popen[AnyStr]"], patience_s: float) -> None:
    """End processes that lead groups, with all of these, and wait for that.

    They get SIGTERM, and those that have not ended after `patience_s` SIGKILL. Groups of processes
    whose end is known already are left alone: their numbers may belong to others.
    """
    left = [process for process in processes if process.returncode is None]
    for process in left:
        _signal_group(process, signal.SIGTERM)
    kill_groups_after(left, patience_s)


def kill_groups_after(processes: Sequence["subprocess.Popen[AnyStr]"], patience_s: float) -> None:
    """Wait for the end of processes that lead groups, and kill the groups of those that have not
    ended after `patience_s`."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    left = [process for process in processes if process.returncode is None]
    for process in left:
        _signal_group(process, signal.SIGKILL)
    for process in left:
        process.wait()


def _signal_group(process: "subprocess.Popen[AnyStr]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def process_state(process: int) -> str:
    """Return the state of a process, as in /proc; X if there is none."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_stopped(process: int) -> bool:
    """True if a process is stopped by a signal."""
    return process_state(process) == "T"
