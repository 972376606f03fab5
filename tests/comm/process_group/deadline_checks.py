"""Checks of deadlines of torch.distributed on MPI; run by `process_group_checks`."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlio.errors import CommError, CommTimeout
from tests.comm.process_group.values import RANK, raises

__all__ = ["check_absent", "check_bereaved", "check_member"]


def _set_deadline() -> None:
    """Give the default group a deadline of 2 s, once all ranks have begun."""
    dist.barrier()
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=2))


@contextlib.contextmanager
def _while_rank_1_is_absent() -> Iterator[None]:
    """A block for rank 0; rank 1 goes on after its end."""
    store: Any = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        yield
        store.set("rank 0 has waited", "1")
    else:
        yield
        store.wait(["rank 0 has waited"], timedelta(seconds=60))


def check_absent() -> None:
    """Waiting for an absent rank ends at the deadline; then all further operations fail."""
    _set_deadline()
    with _while_rank_1_is_absent():
        if RANK == 1:
            return
        waiting: Any = dist.all_reduce(torch.ones(50_000, dtype=torch.bfloat16), async_op=True)
        behind: Any = dist.all_reduce(torch.ones(3), async_op=True)
        future = behind.get_future().then(lambda future: future.value())
        raises(CommTimeout, "rank 0 of 2", waiting.wait)
        assert isinstance(waiting.exception(), CommTimeout)
        raises(CommTimeout, "all_reduce", behind.wait)
        raises(CommTimeout, "all_reduce", future.wait)
        raises(CommError, "after a failure", lambda: dist.barrier())


def check_member() -> None:
    """Making a group fails when a member is absent, although it took part before."""
    dist.new_group([0, 1])
    _set_deadline()
    with _while_rank_1_is_absent():
        if RANK == 0:
            raises(CommTimeout, "1 of its 2 ranks did not join", lambda: dist.new_group([0, 1]))


def check_bereaved() -> None:
    """DDP waits for gradients in C++, and its error names the deadline."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    _set_deadline()
    with _while_rank_1_is_absent():
        if RANK == 0:
            loss = model(torch.ones(2, 3)).sum()
            raises(RuntimeError, "waited 2 s for all_reduce", loss.backward)
