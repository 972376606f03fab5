"""A communicator that passes barriers: the suite must end the program that checks it."""

from dlio.comm import Communicator, world
from dlio.comm.mpi import MpiCommunicator


class Deaf(MpiCommunicator):
    def barrier(self) -> None:
        pass


def make() -> Communicator:
    """The world of MPI with barriers that wait for nobody."""
    comm = world()
    assert isinstance(comm, MpiCommunicator)
    comm.__class__ = Deaf
    return comm
