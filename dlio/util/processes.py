"""Processes: how dlio starts its own, their states as the kernel tells them, and their end."""

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = [
    "STOPPED_S",
    "die",
    "end_with_parent",
    "is_stopped",
    "module_command",
    "process_state",
]

_PR_SET_PDEATHSIG: Final = 1
STOPPED_S: Final = 1.5
"""Seconds that a rank may be stopped: Ctrl-Z and `fg` stop all of a job, its watcher, too."""


def module_command(module: str, *argv: str) -> list[str]:
    """Return the command that runs an installed module in a new process of Python.

    Nothing is imported from the current folder, which may be a data set of anyone's.
    """
    return [sys.executable, "-P", "-m", module, *argv]


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, or now if that is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die() -> None:
    """End this process by a signal, which alone tells other ranks of an MPI job that it is lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


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
