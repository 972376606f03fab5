"""Checks of the nodes that ranks detect; each rank runs this file under mpirun."""

from dlio.comm import Communicator, world
from dlio.comm.job_nodes import find_nodes
from dlio.errors import UsageError


def check(comm: Communicator) -> None:
    """One machine is one node, or as many as are pretended, up to the number of ranks."""
    assert len(find_nodes(comm).names) == 1
    pretended = find_nodes(comm, comm.size)
    assert pretended.node_of.tolist() == list(range(comm.size))
    assert pretended.here == comm.rank
    assert pretended.per_machine == comm.size
    try:
        find_nodes(comm, comm.size + 1)
    except UsageError:
        pass
    else:
        raise AssertionError("more nodes than ranks")


if __name__ == "__main__":
    check(world())
    print("nodes are known", flush=True)
