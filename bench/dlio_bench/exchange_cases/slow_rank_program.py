"""Ranks of `dlio bench exchange --case slow-rank`: throughput that an exchange leaves of ranks'
throughput where one of them computes more slowly.

Usage: python -m dlio_bench.exchange_cases.slow_rank_program JSON. Rank 0 prints one line of JSON.
"""

import json
import sys
import time
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.comm import Communicator, world
from dlio.exchange.exchange_spec import parse_exchange

_FEATURES: Final = 64
_BATCH: Final = 8


class SleepingNetwork(nn.Module):
    """A small network whose forward pass takes a given time, most of it asleep, so that
    ranks that share cores do not slow each other."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(_FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        self._forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._forward_s)
        logits: torch.Tensor = self.body(x)
        return logits


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    results: dict[str, Any] = {}
    for name in task["exchanges"]:
        results[name] = []
        for _ in range(task["repeats"]):
            by_factor = {}
            for factor in (1.0, task["factor"]):
                by_factor[str(factor)] = _throughput(name, factor, task, comm)
            results[name].append(by_factor)
    if comm.rank == 0:
        print(json.dumps(results), flush=True)


def _throughput(
    name: str, factor: float, task: dict[str, Any], comm: Communicator
) -> dict[str, list[float]]:
    """Samples a second of each rank, the last of which sleeps `factor` times as long, and seconds
    that giving the exchange back took.

    An asynchronous exchange runs for so many seconds. Of one whose ranks wait for each other all
    make as many steps, about as many as fit.
    """
    slow = comm.rank == comm.size - 1
    torch.manual_seed(0)
    model = SleepingNetwork(task["forward_s"] * (factor if slow else 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(_BATCH, _FEATURES, generator=generator)
    labels = torch.randint(0, 10, (_BATCH,), generator=generator)
    alone = parse_exchange(name).merge == "parzen"
    limit = int(task["seconds"] / task["forward_s"] / factor)
    ranks = dlio.distribute(model, optimizer, name)
    comm.barrier()
    steps, began = 0, time.perf_counter()
    while (time.perf_counter() - began < task["seconds"]) if alone else steps < limit:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        steps += 1
    seconds = time.perf_counter() - began
    ranks.finish()
    comm.barrier()
    began = time.perf_counter()
    ranks.close()
    closed = time.perf_counter() - began
    everyone = comm.allgather([steps * _BATCH / seconds, closed])
    return {"rates": [rate for rate, _ in everyone], "close_s": [each for _, each in everyone]}


if __name__ == "__main__":
    main(sys.argv[1])
