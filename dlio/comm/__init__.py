"""Communication between ranks: one protocol, one implementation per file."""

from dlio.comm.protocol import Buffer, Communicator, Json, Request
from dlio.comm.world import abort, mpi_ranks, world

__all__ = ["Buffer", "Communicator", "Json", "Request", "abort", "mpi_ranks", "world"]
