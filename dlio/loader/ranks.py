"""This process's place among the ranks that share the data."""

import sys
from typing import Any

from dlio.comm import Communicator, world
from dlio.comm.environment import under_mpi
from dlio.errors import UsageError

__all__ = ["communicator", "group_of", "place"]

_DATA_DIMENSIONS = ("dp", "data", "data_parallel", "batch", "replica", "dp_replicate", "dp_shard")


def place(group: Any = None, mesh: Any = None) -> tuple[int, int]:
    """(rank, ranks) of those that share the data; without a message.

    Args:
        group: the data-parallel ranks: a process group of torch.distributed, or a communicator of
            mpi4py. Ranks outside each other's groups, those of one model-parallel group, get the
            same samples.
        mesh: a DeviceMesh of torch, whose data-parallel dimension is taken (`dp`, `data`,
            `data_parallel`, `batch`, or its only one).

    Raises UsageError when neither can be used.
    """
    if group is not None and mesh is not None:
        raise UsageError("group= and mesh= say the same: give one of them")
    if mesh is not None:
        group = group_of(mesh)
    if group is None:
        if _distributed() is not None and not under_mpi() and not _mpi_started():
            distributed = _distributed()
            assert distributed is not None
            return distributed.get_rank(), distributed.get_world_size()
        comm = world()
        return comm.rank, comm.size
    if hasattr(group, "Get_rank"):
        return int(group.Get_rank()), int(group.Get_size())
    distributed = _distributed()
    if distributed is None:
        raise UsageError("group=: torch.distributed is not initialised; do that first")
    rank = distributed.get_rank(group)
    if rank < 0:
        raise UsageError("group=: this rank is not in it; give each rank the group that it is in")
    return rank, distributed.get_world_size(group)


def communicator(group: Any = None, mesh: Any = None) -> Communicator:
    """Of the ranks that share the data. Collective over them; owned by the caller."""
    if mesh is not None:
        group = group_of(mesh)
    if group is None:
        return world().dup()
    if hasattr(group, "Get_rank"):
        from dlio.comm.mpi import MpiCommunicator
        from dlio.comm.single import SingleCommunicator

        return SingleCommunicator() if group.Get_size() == 1 else MpiCommunicator(group.Dup())
    from dlio.comm.torchdist import torch_world

    return torch_world(group)


def group_of(mesh: Any) -> Any:
    """The process group of a mesh's data-parallel dimension. Raises UsageError."""
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1:
        return mesh.get_group()
    found = [name for name in _DATA_DIMENSIONS if name in names]
    if not found:
        raise UsageError(
            f"mesh= with dimensions {names or mesh.ndim}: which one the data are shared over is "
            f"not told; call it {_DATA_DIMENSIONS[0]!r}, or give mesh['its name']"
        )
    return mesh.get_group(found[0])


def _distributed() -> Any:
    """torch.distributed, when somebody has initialised it."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _mpi_started() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.COMM_WORLD.size > 1
