"""Sums in a GPU's memory: a world of one rank by NCCL."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlio.comm.single import SingleCommunicator
from dlio.exchange.nccl import DeviceGroup, NcclSum

pytestmark = pytest.mark.gpu
_CYCLES = 20_000_000
_cuda: Any = torch.cuda  # Not all of its calls have types.


@contextmanager
def _without_waiting() -> Iterator[None]:
    """Have torch refuse calls that wait for the device."""
    _cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        _cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def alone() -> Iterator[DeviceGroup]:
    """A group of one rank, by NCCL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    group = DeviceGroup(SingleCommunicator(), torch.device("cuda", 0))
    yield group
    group.close()
    dist.destroy_process_group()


def test_a_sum_of_one_rank_is_its_values(alone: DeviceGroup) -> None:
    total = NcclSum(alone)
    region = torch.zeros(36_000, device=alone.device)
    for number in range(3):
        values = torch.randn(region.shape, device=alone.device)
        torch.cuda.synchronize()
        _cuda._sleep(_CYCLES)  # The summed values are written only later.
        with _without_waiting():
            region.copy_(values)
            total.start(region)
            total.begin()
            total.wait()
            summed = region.clone()
        assert torch.equal(summed, values), f"sum {number}"
    total.close()
