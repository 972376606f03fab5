"""The calls of gloo that communicators of torch.distributed share."""

import json
from collections.abc import Callable
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from dlio.comm.comm_protocol import Buffer, Op

_T = TypeVar("_T")
_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def allgather_json(
    value: _T, size: int, gather: Callable[[list[list[torch.Tensor]], list[torch.Tensor]], object]
) -> list[_T]:
    """Return the values of all ranks, as JSON types; `gather` gathers a tensor of each rank into a
    list, and returns when it is there.
    """
    mine = bytearray(json.dumps(value).encode())
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    gather([lengths], [torch.tensor([len(mine)])])
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(mine + bytearray(longest - len(mine)), dtype=torch.uint8)
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    gather([everyone], [padded])
    return [
        json.loads(text[: int(length)].numpy().tobytes())
        for text, length in zip(everyone, lengths, strict=True)
    ]


def sum_options(op: Op) -> AllreduceOptions:
    """Return gloo's options of a reduction."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(_OPS[op])
    return options


def bytes_of(data: Buffer) -> memoryview:
    """Return a buffer's memory as bytes."""
    return memoryview(data).cast("B")  # type: ignore[arg-type]
