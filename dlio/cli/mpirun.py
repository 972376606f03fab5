"""One mpirun of a job that may start again, and what it writes to standard error."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from dlio.cli import launch
from dlio.util.threads import Workers

__all__ = ["Mpirun"]

_END_TIMEOUT_S: Final = 1.0
_STDERR_TIMEOUT_S: Final = 10.0


class Mpirun:
    """A running mpirun. Its owner calls `end`, then `close`.

    Args:
        environment: of mpirun and its ranks.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = launch.started(command, environment, None)
        assert self.process.stderr is not None
        self._errors, self._sorter = self.process.stderr, launch.ErrorFilter(survives=True)
        self._relay = Workers(
            "dlio-stderr",
            lambda _: launch.relay_lines(self._errors, sys.stderr, self._sorter),
            stop_timeout_s=_STDERR_TIMEOUT_S,
        ).start()
        self._ending: Workers | None = None

    def end(self) -> None:
        """End it when its ranks are gone; returns at once."""
        self._ending = Workers(
            "dlio-mpirun-end", lambda _: self._end(), stop_timeout_s=_STDERR_TIMEOUT_S
        ).start()

    def interrupt(self, by_user: bool) -> None:
        """End it together with its ranks, and wait for that."""
        self._sorter.interrupted = by_user
        launch.end(self.process)

    def close(self) -> None:
        """Wait until it has ended and all that it wrote has been passed on."""
        if self._ending is not None:
            self._ending.close()
        # A remote shell to a lost node may hold the other end for longer.
        if not self._relay.close():
            self._errors.close()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_TIMEOUT_S)
                return
        self.process.wait()
