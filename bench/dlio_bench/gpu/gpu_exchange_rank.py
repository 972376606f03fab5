"""Ranks of the exchanges of `dlio bench gpu`."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dlio
from dlio.comm import Communicator
from dlio.exchange.buffer_placement import find_path
from dlio.exchange.exchange_spec import parse_exchange
from dlio_bench.bench_ranks import TaskValue, start_process_group, timed


def step_times(comm: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Seconds of steps with each exchange, and the paths that these take."""
    device = torch.device("cpu")
    if task["device"] == "cuda":
        device = torch.device("cuda", comm.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if task["nccl"]:
        start_process_group("nccl", comm)
    seconds: dict[str, list[float]] = {}
    paths: dict[str, str] = {}
    for name in ["none", *task["exchanges"]]:
        seconds[name] = [_step_s(name, task, device, comm) for _ in range(task["repeats"])]
        paths[name] = name if name == "none" else find_path([device], parse_exchange(name), comm)
    if task["nccl"]:
        dist.destroy_process_group()
    return {"seconds": seconds, "paths": paths}


def _step_s(name: str, task: dict[str, Any], device: torch.device, comm: Communicator) -> float:
    """Seconds of a step of two layers. Collective."""
    torch.manual_seed(comm.rank)
    width = task["features"]
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, width, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with nullcontext() if name == "none" else dlio.distribute(model, optimizer, name):
        timed(step, 2, comm)
        return timed(step, task["steps"], comm)
