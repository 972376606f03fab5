"""Exchanges in a GPU's memory: a world of one rank by NCCL, and compressors next to the CPU's."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.exchange import ExchangeContext, parse_exchange
from dlio.exchange.buckets import Bucket
from dlio.exchange.compress import NAMES
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of
from dlio.exchange.nccl.compressors import make_codec
from dlio.exchange.nccl.device_group import DeviceGroup
from dlio.exchange.nccl.group_paths import GroupMemory, group_path
from dlio.exchange.nccl.tensor_codec import TensorCodec

pytestmark = pytest.mark.gpu
_CYCLES = 20_000_000
_LAYOUT = [("dense", (31, 100)), ("bias", (37,)), ("wide", (70, 1000)), ("odd", (90, 901))]
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


@pytest.mark.parametrize(
    "name", ["allreduce", "tree", "tree+bf16", "allreduce+int8", "allreduce+onebit"]
)
def test_a_sum_of_one_rank_and_its_residual_are_its_values(alone: DeviceGroup, name: str) -> None:
    bucket = Bucket([("weight", nn.Parameter(torch.zeros(40, 900)))], 0, alone.device)
    setting = ExchangeContext(parse_exchange(name), SingleCommunicator(), np.zeros(1, np.int32))
    path = group_path(bucket, setting, GroupMemory.of(alone))
    owed = torch.zeros_like(bucket.flat)
    for number in range(3):
        values = torch.randn(bucket.flat.shape, device=alone.device)
        torch.cuda.synchronize()
        _cuda._sleep(_CYCLES)  # What is summed is written only later.
        with _without_waiting():
            bucket.flat.copy_(values)
            path.start()
            path.begin()
            path.wait()
            summed = bucket.flat.clone()
        left = path.state().get("owed", torch.zeros(bucket.flat.numel())).cuda()
        assert torch.allclose(summed + left, values + owed, atol=1e-5), f"{name}: sum {number}"
        owed = left.clone()
    path.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_compresses_as_the_cpu_and_waits_for_nothing(name: str) -> None:
    places = [torch.device("cuda", 0), torch.device("cpu")]
    pieces = pieces_of(_LAYOUT)
    codecs: list[TensorCodec] = [
        make_codec(name, pieces, ChunkScratch(), place) for place in places
    ]
    entries, room = codecs[0].entries, codecs[0].max_bytes
    owed = [torch.zeros(entries, device=place) for place in places]
    for seed in range(3):
        values = torch.randn(entries, generator=torch.Generator().manual_seed(seed))
        decoded = []
        for codec, place, left in zip(codecs, places, owed, strict=True):
            mine = values.to(place)
            message = torch.zeros(room, dtype=torch.uint8, device=place)
            into = torch.zeros(entries, device=place)
            with _without_waiting():
                assert codec.encode(mine, left, message) == room
                codec.add(message, into)
            decoded.append(into.cpu())
        # Signs of sums near zero and levels may differ by rounding, in few entries.
        apart = (decoded[0] - decoded[1]).abs().mean()
        assert float(apart) < 1e-2 * float(decoded[1].abs().mean())
        owed[0].copy_(owed[1])
