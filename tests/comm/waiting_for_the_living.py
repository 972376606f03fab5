"""Rank 2 is killed while rank 0 waits for its message, and rank 1 for one of rank 0."""

import os
import signal

from dlio.comm.survival.recovery import recovery_of
from dlio.comm.world import world

comm = world()
recovery = recovery_of(comm)
assert recovery is not None
turns = 0


def act() -> int:
    """Pass a message down; return the ranks that are left."""
    global turns
    turns += 1
    if turns == 1:
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.wait([comm.irecv(bytearray(1), 2 if comm.rank == 0 else 0, 1)], "a message")
    return comm.size


assert recovery.uniform(act) == 2
assert turns == 2
print("went on", flush=True)
os._exit(0)  # After a loss MPI_Finalize waits for ever.
