"""What the environment says of this process: a rank, whose, and whether a terminal shows it."""

import os
import select
import signal
import sys
from functools import partial

from dlio.util.threads import Workers

_END_TIMEOUT_S = 10.0
_RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
LAUNCHER = "DLIO_LAUNCHER_PID"
"""Variable: process id of the launcher, for ranks that `dlio.cli.launch` started."""
TERMINAL = "DLIO_TERMINAL"
"""Variable: set for ranks when the launcher's standard output is a terminal."""
_POLL_S = 0.5


def under_mpi() -> bool:
    """Whether mpirun, or srun with an MPI plug-in, started this process as a rank."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def shows_terminal() -> bool:
    """Whether what this process prints is looked at on a terminal.

    A rank's standard output may look like one (mpirun gives ranks a pseudo-terminal) and end in
    a file; `run_ranks` knows, and says so.
    """
    return bool(os.environ.get(TERMINAL)) if under_mpi() else sys.stdout.isatty()


def launched() -> bool:
    """Whether this process is a rank that `run_ranks` started."""
    return LAUNCHER in os.environ and under_mpi()


def watch_launcher() -> None:
    """In a rank that `run_ranks` started: end it when the launcher has died.

    A launcher that is killed cannot end its ranks, and mpirun does not mind the death of its
    parent.
    """
    if not launched():
        return
    launcher = int(os.environ[LAUNCHER])
    stopped, stop = os.pipe()

    def watch(_: int) -> None:
        if not _has_ended(launcher, stopped):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if not select.select([stopped], [], [], _END_TIMEOUT_S)[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    wake = partial(os.write, stop, b"x")
    Workers("dlio-launcher-watch", watch, wake=wake, serves_others=True).start()


def _has_ended(process: int, stopped: int) -> bool:
    """Sleep until a process has ended, which need not be a child of this one; False when the
    descriptor `stopped` became readable before."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        # Linux before 5.3, a Python built for it, or a sandbox.
        while not select.select([stopped], [], [], _POLL_S)[0]:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False
    # Readable when the process has ended, reaped or not.
    return descriptor in select.select([descriptor, stopped], [], [])[0]
