"""Makes generations without a loss, and prints how memory grows; for ranks that mpirun starts."""

import sys

import numpy as np

from dlio.comm import world
from dlio.comm.mpi import MpiCommunicator

_WARM_UP = 200


def _resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4


def main(generations: int) -> None:
    """Make generations, of three communicators each, with a request under way."""
    comm = world()
    assert isinstance(comm, MpiCommunicator)
    assert comm.membership is not None
    others = [comm.dup(), comm.split(comm.rank % 2)]
    before = 0
    for number in range(1, generations + 1):
        if comm.rank:
            comm.iallreduce(np.ones(1000, np.float32))
        comm.membership.renew(None)  # type: ignore[attr-defined]
        if number == _WARM_UP:
            before = _resident_kib()
    grown = max(comm.allgather(_resident_kib() - before))
    for each in others:
        each.barrier()
    if comm.rank == 0:
        print(grown / (generations - _WARM_UP) * 1000)


if __name__ == "__main__":
    main(int(sys.argv[1]))
