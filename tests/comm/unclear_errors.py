"""A request ends with an error of MPI that names no loss: with no rank lost, and after a loss."""

import os
import signal
from typing import Any

from mpi4py import MPI

import dlio.comm.mpi
from dlio.comm.mpi import MpiRequest
from dlio.comm.survival.recovery import recovery_of
from dlio.comm.world import world
from dlio.errors import PeerLost


class _Failing:
    """A request of MPI."""

    def __init__(self, code: int) -> None:
        self._code = code

    def Test(self) -> bool:  # noqa: N802 # MPI's name
        raise MPI.Exception(self._code)


def raised(code: int) -> type[BaseException] | None:
    """Return the type of the error that dlio makes of one of MPI."""
    request: Any = _Failing(code)
    try:
        MpiRequest(request).done()
    except (MPI.Exception, PeerLost) as error:
        return type(error)
    return None


comm = world()
recovery = recovery_of(comm)
assert recovery is not None
patched: Any = dlio.comm.mpi
patched._TOLD_TIMEOUT_S = 0.1
assert raised(MPI.ERR_OTHER) is MPI.Exception, "nobody is lost"
comm.barrier()
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
patched._TOLD_TIMEOUT_S = 60.0
assert raised(MPI.ERR_OTHER) is PeerLost
assert raised(MPI.ERR_TRUNCATE) is MPI.Exception, "a fault of the caller is not a loss"
recovery.recover()
assert comm.size == 2
print("went on", flush=True)
os._exit(0)  # After a loss MPI_Finalize waits for ever.
