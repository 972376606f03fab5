"""A communicator whose barriers return at once: the conformance suite must fail for it."""

from dlio.comm import Communicator, world
from dlio.comm.mpi import MpiCommunicator


class Deaf(MpiCommunicator):
    def barrier(self) -> None:
        pass


def make() -> Communicator:
    """Make the world of MPI, with barriers that do not wait."""
    comm = world()
    assert isinstance(comm, MpiCommunicator)
    comm.__class__ = Deaf
    return comm
