"""The default group of torch.distributed, which the groups of exchanges are parts of."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from dlio.comm import Communicator
from dlio.comm.common_store import common_store
from dlio.comm.deadlines import default_timeout_s
from dlio.comm.survival.recovery import recovery_of
from dlio.comm.world import keep_world
from dlio.errors import CommError
from dlio.util.settings import DEVICE_EXCHANGE, settings


@contextlib.contextmanager
def devices_connected(comm: Communicator, device: torch.device) -> Iterator[None]:
    """Connect the ranks' GPUs by NCCL for the body, if DLIO_NCCL asks for it. Collective.

    Does nothing if a rank has no GPU, if ranks are to survive others, or if there is a group.

    Args:
        comm: all ranks.

    Raises CommError if the ranks do not meet.
    """
    backend = ""
    if device.type == "cuda" and settings().nccl:
        backend = "nccl"
    elif device.type == "cpu" and os.environ.get(DEVICE_EXCHANGE):
        backend = "gloo"
    if dist.is_initialized() or recovery_of(comm) is not None:
        backend = ""
    backends = set(comm.allgather(backend))
    if comm.size == 1 or len(backends) > 1 or not backend:
        yield
        return
    limit_s = default_timeout_s()
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=common_store(comm, limit_s),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=limit_s),
        )
    except RuntimeError as error:
        raise CommError(
            f"the ranks do not meet by {backend} (DLIO_NCCL=0 leaves it out): {error}"
        ) from error
    keep_world()
    try:
        yield
    finally:
        dist.destroy_process_group()
        keep_world()
