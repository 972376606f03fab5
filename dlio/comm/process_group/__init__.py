"""torch.distributed over MPI, with torch's ordinary wheel (which is built without MPI).

`init_process_group()` makes MPI's ranks the default group of torch.distributed: DDP, FSDP,
DeviceMesh and torch.distributed.checkpoint then run on MPI. Importing this module is enough for
torch to know the backend "dlio-mpi".
"""

import zlib
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from dlio.comm.common_store import common_store
from dlio.comm.deadlines import default_timeout_s
from dlio.comm.mpi import one_at_a_time
from dlio.comm.process_group.collectives import MpiProcessGroup
from dlio.comm.process_group.mpi_group import BACKEND, CHECKED_STEPS, STEPS, devices
from dlio.comm.world import world
from dlio.errors import CommError, CommTimeout, UsageError
from dlio.util.extras import how_to_install
from dlio.util.settings import settings
from dlio.util.units import counted

_LEAST_TAG_UB: Final = 32767
"""Largest tag that every MPI library accepts."""


def init_process_group(backend: str = BACKEND, timeout_s: float | None = None) -> None:
    """Initialise torch.distributed's default group on all ranks of MPI. Collective.

    Needs no environment variables: rank 0 serves the store and broadcasts its address over MPI.
    `torch.distributed.destroy_process_group()` ends the group and its threads. With
    TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks check before each operation that they all called it.

    Args:
        backend: "dlio-mpi", or one of torch's, such as "nccl" or "cpu:gloo,cuda:nccl".
        timeout_s: deadline of each operation; DLIO_TIMEOUT, or 300 when unset, for None.

    Raises UsageError if a default group exists, for "dlio-mpi" combined with another backend,
    which torch does not support, or for ranks that are to survive others (DLIO_MIN_RANKS), which a
    process group does not; CommError if MPI cannot serve threads.
    """
    if settings().min_ranks is not None:
        raise UsageError(
            "DLIO_MIN_RANKS: torch.distributed's groups end with any rank; use dlio.distribute, or "
            "unset DLIO_MIN_RANKS and resume from checkpoints"
        )
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: call destroy_process_group()")
    if BACKEND in backend and backend != BACKEND:
        raise UsageError(
            f"backend {backend!r}: torch takes {BACKEND} for all devices or none; make the other "
            "group with torch.distributed.new_group(backend=...)"
        )
    limit_s = default_timeout_s() if timeout_s is None else timeout_s
    dist.init_process_group(
        backend,
        store=common_store(world(), limit_s),
        rank=MPI.COMM_WORLD.rank,
        world_size=MPI.COMM_WORLD.size,
        timeout=timedelta(seconds=limit_s),
    )


def _create(options: Any, _: Any) -> MpiProcessGroup:
    """Create a group, as torch calls it. Collective over its members."""
    check_threads()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    here = MPI.COMM_WORLD.rank
    if options.group_size > MPI.COMM_WORLD.size or ranks[options.group_rank] != here:
        raise UsageError(
            f"torch says rank {options.group_rank} of {options.group_size}, MPI says rank {here} "
            f"of {MPI.COMM_WORLD.size}: start the ranks with mpirun or srun and call "
            "dlio.init_process_group()"
        )
    timeout_s = options.timeout.total_seconds()
    if options.timeout == dist.distributed_c10d.default_pg_timeout:
        # The caller gave no timeout, and torch filled in its default.
        whole = dist.group.WORLD
        timeout_s = whole.timeout_s if isinstance(whole, MpiProcessGroup) else default_timeout_s()
    steps = CHECKED_STEPS if get_debug_level() == DebugLevel.DETAIL else STEPS
    store, name = _meeting_place(options, ranks)
    _meet(store, name, len(ranks), timeout_s)
    with one_at_a_time:
        group = MPI.COMM_WORLD.group.Incl(ranks)
        # The tag keeps apart groups that share members and are created at the same time.
        comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name.encode()) % _LEAST_TAG_UB)
        comms = [comm, *(comm.Dup() for _ in range(2 * steps - 1))]
        group.Free()
    return MpiProcessGroup(comms, options.store, timeout_s, options.group_id)


def _meeting_place(options: Any, ranks: list[int]) -> tuple[Store, str]:
    """Return the store and a key prefix for a new group, the same on all of its members.

    torch's own name of a group that only its members create differs between ranks, because it
    counts the groups that a rank is in. The prefix counts the groups of exactly these ranks.
    """
    whole = dist.group.WORLD if options.global_ranks_in_group else None
    if not isinstance(whole, MpiProcessGroup):
        return options.store, options.group_id
    key = ",".join(map(str, ranks))
    whole.made[key] += 1
    return whole.get_group_store(), f"{zlib.crc32(key.encode())}/{len(ranks)}/{whole.made[key]}"


def _meet(store: Store, name: str, size: int, timeout_s: float) -> None:
    """Wait until all members have called this; MPI itself would wait without a deadline.

    Raises CommTimeout after the deadline.
    """
    arrived, everyone = f"dlio/{name}/arrived", f"dlio/{name}/all"
    if store.add(arrived, 1) == size:
        store.set(everyone, "1")
        return
    try:
        store.wait([everyone], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CommTimeout(
            f"rank {MPI.COMM_WORLD.rank} waited {timeout_s:.0f} s to create a process group: "
            f"{size - store.add(arrived, 0)} of its {counted(size, 'rank')} did not join "
            "(DLIO_TIMEOUT sets the deadline)"
        ) from error


def check_threads() -> None:
    """Raise CommError if MPI does not support the thread of a process group."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise CommError(
            "this MPI library lets only one thread call it (it gives less than "
            "MPI_THREAD_SERIALIZED), but a process group needs a thread of its own: use Open MPI 5 "
            f"({how_to_install('mpi')}) or an MPI built with thread support"
        )


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices())
