"""Rank, local rank and machine of this process, which a framework's cluster environment needs."""

import os
import socket
from dataclasses import dataclass, replace

from dlio.comm import mpi_ranks, world
from dlio.comm.launch_environment import under_mpi
from dlio.comm.survival.recovery import recovery_of, uniform


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """Place of this process among the ranks."""

    by: str
    """The launcher: `mpi`, `torchrun`, or `nobody` for a process started by itself."""
    rank: int
    ranks: int
    local_rank: int
    """Number of this rank among those of its machine."""
    machine: int
    """Number of its machine, in the order of ranks."""

    def now(self) -> "LaunchInfo":
        """Return the place with the present rank and number of ranks, if others have been lost."""
        if self.by == "nobody" or recovery_of(comm := world()) is None:
            return self
        return replace(self, rank=comm.rank, ranks=comm.size)


def launch_info() -> LaunchInfo:
    """Return this process's place. Collective under MPI; torch.distributed need not be set up."""
    if under_mpi() or mpi_ranks() > 1:
        comm = world()
        hosts = uniform(comm, lambda: comm.allgather(socket.gethostname()))
        here = hosts[comm.rank]
        machines = list(dict.fromkeys(hosts))
        return LaunchInfo(
            "mpi", comm.rank, comm.size, hosts[: comm.rank].count(here), machines.index(here)
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        machine = int(os.environ.get("GROUP_RANK", 0))
        return LaunchInfo("torchrun", rank, int(os.environ["WORLD_SIZE"]), local_rank, machine)
    return LaunchInfo("nobody", 0, 1, 0, 0)
