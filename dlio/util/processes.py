"""The states of processes, as the kernel tells them."""

from typing import Final

__all__ = ["STOPPED_S", "is_stopped", "process_state"]

STOPPED_S: Final = 1.5
"""Seconds that a rank may be stopped: Ctrl-Z and `fg` stop all of a job, its watcher, too."""


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
