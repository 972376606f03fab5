"""Communication between ranks: one protocol, one implementation a file.

`world()` is the process's own communicator: MPI when the process was started by mpirun or
srun (or has initialised MPI itself, and is not alone in it), else torch.distributed where that is
initialised (`torchrun`), otherwise one process on its own.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlio.comm.launch import under_mpi

Buffer = bytearray | memoryview | npt.NDArray[np.uint8]
Json = Any
"""What json.dumps takes and json.loads gives back."""


class Request(Protocol):
    """A message or reduction under way. Its buffers are not to be touched until it is done."""

    def done(self) -> bool:
        """Whether it has completed; also moves it on."""

    def cancel(self) -> bool:
        """Give up a receive that nobody will answer. False when it is half done and its sender
        has stopped: its buffer must then be kept."""


class Communicator(Protocol):
    """A group of ranks that exchange messages.

    Thread-safe when each thread uses a communicator of its own (`dup`). Collectives
    (`allgather`, `barrier`, `bcast`, `iallreduce`, `dup`, `split`) are called by all ranks in the
    same order; they are for set-up and gradients, never for feeding data.
    """

    rank: int
    size: int

    def allgather(self, value: Json) -> list[Json]:
        """Every rank's value, by rank. Values travel as JSON."""

    def barrier(self) -> None: ...

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        """Overwrite a contiguous array with `root`'s."""

    def isend(self, data: Buffer, dest: int, tag: int) -> Request: ...

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Receive at most len(into) bytes."""

    def iallreduce(self, array: npt.NDArray[Any]) -> Request:
        """Sum a contiguous float32, float64 or int64 array over all ranks, in place."""

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        """Wait for all requests. Raises CommTimeout, naming `what`, after the deadline.

        The default deadline is DLIO_TIMEOUT seconds, 300 when unset.
        """

    def poke(self) -> bool:
        """Have the library move on what is under way, of this communicator and others. False where
        it does so by itself, or where not any thread may ask it to."""

    def dup(self) -> "Communicator":
        """A communicator of the same ranks whose messages never meet this one's. Collective."""

    def split(self, group: int) -> "Communicator":
        """A communicator of the ranks that give the same number, in their order; to be closed as a
        duplicate is. Collective over all ranks."""

    def close(self) -> None:
        """Give a duplicate back. Collective; the world's communicator stays open."""


_world: Communicator | None = None
_torch_world: Any = None
"""The default group of torch.distributed that the world was found in."""


def world() -> Communicator:
    """This process's place among its ranks, found once, and again when torch.distributed is
    initialised anew.

    Raises CommError when the process runs under MPI but no MPI library can be loaded.
    """
    global _world, _torch_world
    if under_mpi() or mpi_ranks() > 1:
        if _world is None:
            from dlio.comm.mpi import mpi_world

            _world = mpi_world()
        return _world
    group = _torch_group()
    if _world is None or group is not _torch_world:
        if _torch_world is not None and _world is not None:
            _world.close()
        if group is not None:
            from dlio.comm.torchdist import torch_world

            _world = torch_world()
        else:
            from dlio.comm.single import SingleCommunicator

            _world = SingleCommunicator()
        _torch_world = group
    return _world


def mpi_ranks() -> int:
    """Of an MPI that somebody has initialised. One that is alone says nothing: libraries look for
    other ranks by initialising it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0
    return int(mpi.COMM_WORLD.size)


def _torch_group() -> Any:
    """The default group of torch.distributed; None when nobody has initialised it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


def abort(code: int) -> None:
    """End the other ranks too, when there are any. Returns otherwise.

    For the top level of a program, after its error has been printed.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(code)
