"""Facts about this process from its environment: its launcher, and whether a terminal shows it."""

import os
import select
import signal
import sys
from functools import partial

from dlio.comm.launch_detection import launch_variable, under_torchrun, whole_number
from dlio.util.settings import AGENT, DONE, FAILURES, LAUNCHER, STORE, TERMINAL
from dlio.util.threads import Workers

_END_TIMEOUT_S = 10.0
_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMI_RANK",
    "PMIX_RANK",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "PALS_RANKID",
)
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "LOCAL_RANK",
)
_POLL_S = 0.5


def under_mpi() -> bool:
    """True if mpirun, or srun with an MPI plug-in, started this process as a rank."""
    if under_torch() or under_torchrun():
        return False
    return any(launch_variable(name) is not None for name in _RANK_VARIABLES)


def under_torch() -> bool:
    """True if dlio's launcher started this process as a rank of torch.distributed."""
    return STORE in os.environ


def shows_terminal() -> bool:
    """True if standard output ends on a terminal.

    mpirun gives ranks a pseudo-terminal even if their output ends in a file; `mpi_launch.launch`
    knows better and sets DLIO_TERMINAL.
    """
    return bool(os.environ.get(TERMINAL)) if under_mpi() else sys.stdout.isatty()


def local_rank(rank: int) -> int:
    """Return the number of this rank among those of its host, as its launcher says, else `rank`."""
    # Slurm numbers its own tasks: mpirun's daemons, if mpirun has started the ranks.
    names = _LOCAL_RANKS if LAUNCHER in os.environ else (*_LOCAL_RANKS, "SLURM_LOCALID")
    return next((number for name in names if (number := whole_number(name)) >= 0), rank)


def launched() -> bool:
    """True if this process is a rank that `mpi_launch.launch` started."""
    return LAUNCHER in os.environ and (under_mpi() or under_torch())


def job_folder() -> str | None:
    """Return the folder on a disk that the launcher on this machine removes at the job's end,
    however its ranks end; None if there is none."""
    if AGENT in os.environ:
        return None  # An agent's is in shared memory.
    done = os.path.dirname(os.environ.get(DONE, ""))
    folders = (done, os.environ.get(FAILURES, ""), os.environ.get(STORE, ""))
    return next((folder for folder in folders if os.path.isdir(folder)), None)


def watch_launcher() -> None:
    """End this rank when the launcher dies, if `mpi_launch.launch` started it.

    A killed launcher cannot end its ranks, and mpirun survives the death of its parent.
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
    """Sleep until a process has ended, whether or not it is a child of this one.

    Returns False if the descriptor `stopped` became readable first.
    """
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        # Linux before 5.3, a Python built on one, or a sandbox.
        while not select.select([stopped], [], [], _POLL_S)[0]:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False
    # The descriptor becomes readable when the process ends, even before it is reaped.
    return descriptor in select.select([descriptor, stopped], [], [])[0]
