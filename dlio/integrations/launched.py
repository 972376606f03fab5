"""Where a launcher has put this process: what a framework asks its cluster for."""

import os
import socket
from dataclasses import dataclass

from dlio.comm import mpi_ranks, world
from dlio.comm.environment import under_mpi

__all__ = ["Launched", "launched"]


@dataclass(frozen=True, slots=True)
class Launched:
    """This process's place."""

    by: str
    """`mpi`, `torchrun`, or `nobody`."""
    rank: int
    ranks: int
    local_rank: int
    """Among the ranks of this machine."""
    machine: int


def launched() -> Launched:
    """Where this process is. Collective under MPI; torch.distributed need not be initialised."""
    if under_mpi() or mpi_ranks() > 1:
        comm = world()
        hosts = comm.allgather(socket.gethostname())
        here = hosts[comm.rank]
        machines = list(dict.fromkeys(hosts))
        return Launched(
            "mpi", comm.rank, comm.size, hosts[: comm.rank].count(here), machines.index(here)
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        machine = int(os.environ.get("GROUP_RANK", 0))
        return Launched("torchrun", rank, int(os.environ["WORLD_SIZE"]), local_rank, machine)
    return Launched("nobody", 0, 1, 0, 0)
