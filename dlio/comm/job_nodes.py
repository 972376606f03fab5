"""The nodes of a job and the ranks on each."""

import socket
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.comm.comm_protocol import Communicator
from dlio.errors import UsageError
from dlio.util.settings import settings
from dlio.util.units import counted


@dataclass(frozen=True, slots=True)
class JobNodes:
    """The nodes of a job, numbered by first appearance among the ranks."""

    names: tuple[str, ...]
    node_of: npt.NDArray[np.int32]
    """Node number of each rank; shape (ranks,)."""
    here: int
    """Node number of this rank."""
    machines: int
    """Number of hosts: fewer than nodes when nodes are pretended."""

    @property
    def per_machine(self) -> int:
        """Nodes per host, rounded up."""
        return -(-len(self.names) // self.machines)


def find_nodes(comm: Communicator, pretend: int | None = None) -> JobNodes:
    """Ask every rank for its node. Collective.

    A rank's node is its host, unless DLIO_NODE in its environment names another. With `pretend`,
    consecutive ranks are divided into that many equal nodes instead.

    Raises UsageError when `pretend` exceeds the number of ranks, or for a DLIO_NODE that cannot be
    a folder's name.
    """
    if pretend is not None and not 1 <= pretend <= comm.size:
        raise UsageError(
            f"cannot pretend {counted(pretend, 'node')} with {counted(comm.size, 'rank')}: a node "
            "has at least one "
            "rank (start more ranks with -n)"
        )
    host = socket.gethostname()
    name = settings().node or host
    if pretend is not None and pretend > 1:
        name = f"{name}.{comm.rank * pretend // comm.size}"
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"node name {name!r} (DLIO_NODE) must be usable as a folder's name")
    everyone = comm.allgather([name, host])
    names = tuple(dict.fromkeys(each[0] for each in everyone))
    node_of = np.array([names.index(each[0]) for each in everyone], np.int32)
    return JobNodes(names, node_of, names.index(name), len({each[1] for each in everyone}))
