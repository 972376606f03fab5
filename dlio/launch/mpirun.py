"""One mpirun of a job that may start again, and what it writes to standard error."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from dlio.launch import mpi_launch
from dlio.util.child_processes import end_groups
from dlio.util.live_line import LiveLine
from dlio.util.threads import Workers

_END_TIMEOUT_S: Final = 1.0
_STDERR_TIMEOUT_S: Final = 10.0


class Mpirun:
    """A running mpirun. Its owner calls `end`, then `close`.

    Args:
        environment: of mpirun and its ranks.
        live: draws the progress that ranks tell of.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], live: LiveLine
    ) -> None:
        output = subprocess.PIPE if live.shown else None
        self.process = mpi_launch.started(command, environment, output)
        self._sorter = mpi_launch.ErrorFilter(survives=True)
        self._relay = mpi_launch.relay_output(self.process, self._sorter, live)
        self._ending: Workers | None = None

    def end(self) -> None:
        """End it when its ranks are gone; returns at once."""
        self._ending = Workers(
            "dlio-mpirun-end", lambda _: self._end(), stop_timeout_s=_STDERR_TIMEOUT_S
        ).start()

    def interrupt(self, by_user: bool) -> None:
        """End it together with its ranks, and wait for that."""
        self._sorter.interrupted = by_user
        mpi_launch.end(self.process)

    def close(self) -> None:
        """Wait until it has ended and all that it wrote has been passed on."""
        if self._ending is not None:
            self._ending.close()
        # A remote shell to a lost node may hold the other end for longer.
        self._relay.close()

    def _end(self) -> None:
        end_groups([self.process], _END_TIMEOUT_S)
