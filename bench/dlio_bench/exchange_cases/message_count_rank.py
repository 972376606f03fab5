"""Ranks of `dlio bench exchange --case messages`: traffic of each exchange, as reported by
itself and as counted by the MPI library.

Usage: python -m dlio_bench.exchange_cases.message_count_rank JSON. Rank 0 prints one line of JSON.
"""

import json
import sys
from typing import Any

import torch

from dlio.comm import Communicator, world
from dlio.exchange.buckets import in_buckets, trainable
from dlio.exchange.exchange_spec import parse_exchange
from dlio_bench.exchange_cases.monitor import Monitor
from dlio_bench.exchange_cases.variants import OneBatchTraining, nodes_for


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    try:
        monitor, why = Monitor(), None
    except OSError as error:
        monitor, why = None, str(error)
    training = OneBatchTraining(task["network"], task["batch_size"], comm.rank)
    figures: dict[str, Any] = {
        "parameter_bytes": training.bytes,
        "buckets": len(in_buckets(trainable(training.model))),
        "not_counted": why,
        "exchanges": {},
    }
    for name in task["exchanges"]:
        # Whole periods, and at least two steps.
        steps = max(2, parse_exchange(name).period, task["steps"])
        mine = _sent(name, training, steps, task["nodes"], comm, monitor)
        ranks = comm.allgather(mine)
        figures["exchanges"][name] = {"steps": steps, "ranks": ranks}
    if comm.rank == 0:
        print(json.dumps(figures), flush=True)


def _sent(
    name: str,
    training: OneBatchTraining,
    steps: int,
    nodes: int,
    comm: Communicator,
    monitor: Monitor | None,
) -> dict[str, list[float]]:
    """Messages and bytes a step of this rank's: `told` by the exchange, `counted` by MPI."""
    exchange = training.distribute(name, nodes_for(name, nodes, comm.size))
    comm.barrier()
    before = (0, 0) if monitor is None else monitor.read()
    for _ in range(steps):
        training.step(exchange)
    exchange.finish()
    # Counted messages have been handed to MPI: none of a later step is among them.
    after = (0, 0) if monitor is None else monitor.read()
    totals = exchange.statistics()
    comm.barrier()
    exchange.close()
    figures = {"told": [totals["messages"] / steps, totals["bytes"] / steps]}
    if monitor is not None:
        figures["counted"] = [(b - a) / steps for a, b in zip(before, after, strict=True)]
    return figures


if __name__ == "__main__":
    main(sys.argv[1])
