"""Communication between ranks: one protocol, one implementation a file.

`world()` is the process's own communicator: MPI when the process was started by mpirun or
srun (or has initialised MPI itself, and is not alone in it), else torch.distributed where that is
initialised (`torchrun`), otherwise one process on its own.
"""

import sys
from typing import Any

from dlio.comm.environment import under_mpi
from dlio.comm.protocol import Communicator

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
