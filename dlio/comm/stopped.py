"""Ranks that are stopped: they are killed, and lost like any other.

MPI tells of a rank that has died, and never of one that is stopped (SIGSTOP, a frozen container):
the others would wait for it until their deadline. Its state is in /proc, so no message is needed,
and a rank that merely computes, or waits for a disk, is never suspected. A rank that a debugger
stops has another state and is left alone.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from dlio.util.threads import Workers

__all__ = ["StoppedRanks", "is_stopped"]

_POLL_S: Final = 0.25
_PATIENCE_S: Final = 1.5
"""Seconds that a rank may be stopped: Ctrl-Z and `fg` stop all of a job at once, this one, too."""


def is_stopped(process: int) -> bool:
    """True if a process is stopped by a signal."""
    return _state(process) == "T"


def _state(process: int) -> str:
    """Return the state of a process, as in /proc; X if there is none."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


class StoppedRanks:
    """A thread that kills ranks of this machine when they are stopped. Closed by its owner.

    Args:
        processes: of the ranks of this machine, by member, this one included.
        me: this rank's own member number.
        members: returns those of this generation; the lowest one of this machine that is neither
            dead nor stopped watches the others.
    """

    def __init__(
        self, processes: Mapping[int, int], me: int, members: Callable[[], tuple[int, ...]]
    ) -> None:
        self._processes, self._me, self._members = dict(processes), me, members
        self._since: dict[int, float] = {}
        self._workers = Workers("dlio-stopped", self._run, serves_others=True)
        if len(self._processes) > 1:
            self._workers.start()

    def close(self) -> None:
        """End the thread."""
        self._workers.close()

    def _run(self, _: int) -> None:
        last = time.monotonic()
        while not self._workers.stopping.wait(_POLL_S):
            now = time.monotonic()
            if now - last > _PATIENCE_S:
                self._since.clear()  # This rank was stopped itself, perhaps with all others.
            last = now
            for member in self._watched():
                self._look_at(member, now)

    def _watched(self) -> list[int]:
        here = [member for member in self._members() if member in self._processes]
        lower = here[: here.index(self._me)] if self._me in here else here
        # A generation lasts until all that are left have met: some of it may be dead.
        if any(_state(self._processes[member]) not in "TZX" for member in lower):
            return []
        return [member for member in here if member != self._me]

    def _look_at(self, member: int, now: float) -> None:
        process = self._processes[member]
        if not is_stopped(process):
            self._since.pop(member, None)
        elif now - self._since.setdefault(member, now) >= _PATIENCE_S:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
