"""The ranks that share the data: this process's place among them, and their communicator."""

from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

from typing_extensions import TypeIs

from dlio.comm.comm_protocol import Communicator
from dlio.comm.launch_detection import check_launch, torchrun_place
from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.comm.world import mpi_ranks, torch_distributed, world
from dlio.errors import UsageError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | Intracomm
_DATA_DIMENSIONS = ("dp", "data", "data_parallel", "batch", "replica", "dp_replicate", "dp_shard")


class RankMesh(Protocol):
    """A mesh of dlio's own communicators: `dlio.Mesh`."""

    def data_ranks(self) -> Communicator:
        """Return the communicator of the ranks that share the data; owned by the mesh."""


if TYPE_CHECKING:
    AnyMesh = DeviceMesh | RankMesh


def place(group: "Group | None" = None, mesh: "AnyMesh | None" = None) -> tuple[int, int]:
    """Return (rank, ranks) among those that share the data, without communication.

    Args:
        group: the data-parallel ranks: a process group of torch.distributed, or a communicator of
            mpi4py; all ranks for None. Ranks of one model-parallel group are in different groups
            and get the same samples.
        mesh: a `dlio.Mesh`; or a DeviceMesh of torch, whose data-parallel dimension is taken (`dp`,
            `data`, `data_parallel`, `batch`, or its only one).

    Raises UsageError when neither can be used.
    """
    if group is not None and mesh is not None:
        raise UsageError("group= and mesh= both choose the ranks: give one of them")
    if _is_own(mesh):
        comm = mesh.data_ranks()
        return comm.rank, comm.size
    if mesh is not None:
        if not hasattr(mesh, "get_group"):
            raise UsageError(f"mesh={mesh!r}: give a dlio.Mesh, or a DeviceMesh of torch")
        group = group_of(mesh)
    if group is None:
        distributed = torch_distributed()
        launched = under_mpi() or under_torch() or mpi_ranks() > 1
        if not launched:
            if distributed is not None:
                check_launch(distributed.get_world_size())
                return distributed.get_rank(), distributed.get_world_size()
            if (there := torchrun_place()) is not None:
                check_launch(there[1])
                return there
        comm = world()
        return comm.rank, comm.size
    if _is_mpi(group):
        return int(group.Get_rank()), int(group.Get_size())
    distributed = torch_distributed()
    if distributed is None:
        raise UsageError("group=: torch.distributed is not initialised; do that first")
    rank = distributed.get_rank(group)
    if rank < 0:
        raise UsageError("group=: this rank is not in it; give each rank the group that it is in")
    return rank, distributed.get_world_size(group)


def communicator(group: "Group | None" = None, mesh: "AnyMesh | None" = None) -> Communicator:
    """Make a communicator of the ranks that share the data; arguments as for `place`.

    Collective over them. Owned by the caller, who closes it.
    """
    if _is_own(mesh):
        return mesh.data_ranks().dup()
    if mesh is not None:
        group = group_of(mesh)
    if group is None:
        return world().dup()
    if _is_mpi(group):
        from dlio.comm.mpi import MpiCommunicator
        from dlio.comm.single import SingleCommunicator

        return SingleCommunicator() if group.Get_size() == 1 else MpiCommunicator(group.Dup())
    from dlio.comm.torchdist import torch_world

    return torch_world(cast("ProcessGroup", group))


def covers_world(mesh: "AnyMesh") -> bool:
    """True if all ranks of the job are in a mesh."""
    sizes = getattr(mesh, "ranks", None)  # dlio's own; a DeviceMesh has a tensor of ranks.
    return (cast("DeviceMesh", mesh).mesh.numel() if sizes is None else sizes) == world().size


def group_of(mesh: "DeviceMesh") -> "ProcessGroup":
    """Return the process group of a mesh's data-parallel dimension. Raises UsageError."""
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1:
        return mesh.get_group()
    name = next((name for name in _DATA_DIMENSIONS if name in names), None)
    if name is None:
        raise UsageError(
            f"mesh= with dimensions {names or mesh.ndim}: none of them is known to be the "
            f"data-parallel one; call it {_DATA_DIMENSIONS[0]!r}, or give mesh['its name']"
        )
    return mesh.get_group(name)


def _is_own(mesh: "AnyMesh | None") -> TypeIs[RankMesh]:
    return hasattr(mesh, "data_ranks")


def _is_mpi(group: "Group") -> TypeGuard["Intracomm"]:
    return hasattr(group, "Get_rank")
