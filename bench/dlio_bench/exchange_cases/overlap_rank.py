"""Ranks of `dlio bench exchange --case overlap`: steps without an exchange, with each, and each
exchange alone, in turn.

Usage: python -m dlio_bench.exchange_cases.overlap_rank JSON. Rank 0 prints one line of JSON.
"""

import json
import sys
import time
from typing import Any

import torch

import dlio
from dlio.comm import Communicator, world
from dlio_bench.exchange_cases.variants import OneBatchTraining, timed


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    training = OneBatchTraining(task["network"], task["batch_size"], comm.rank)
    results: dict[str, Any] = {"parameter_bytes": training.bytes}
    if comm.size == 1:
        results["overhead"] = _overhead(training, task["repeats"])
    else:
        results["exchanges"] = {name: [] for name in task["exchanges"]}
        for _ in range(task["repeats"]):
            for name in task["exchanges"]:
                report = _once(name, training, task["steps"], task["nodes"], comm)
                results["exchanges"][name].append(report)
    if comm.rank == 0:
        print(json.dumps(results), flush=True)


def _once(
    name: str, training: OneBatchTraining, steps: int, nodes: int, comm: Communicator
) -> dict[str, float]:
    """Seconds of a step without the exchange, before and after; with it; and of it alone."""
    before = timed(lambda: training.step(None), steps, comm)
    exchange = training.distribute(name, nodes)

    # Its memory is touched for the first time. Background work of a later step is under way when
    # the time begins, and when it ends.
    training.step(exchange)
    training.step(exchange)
    within = timed(lambda: training.step(exchange), steps, comm)
    exchange.finish()
    training.alone(exchange)
    alone = timed(lambda: training.alone(exchange), 2 * steps, comm)
    exchange.close()
    alone -= timed(lambda: training.alone(None), 2 * steps, comm)
    after = timed(lambda: training.step(None), steps, comm)
    return {
        "without_s": (before + after) / 2,
        "with_s": within,
        "alone_s": alone,
    }


def _overhead(training: OneBatchTraining, repeats: int) -> list[float]:
    """For one process, seconds of a step under `dlio.distribute` over those of the same loop
    without, less one; of neighbouring steps, each after one that finds out where memory is. Of the
    processor: other processes' do not count."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-4)

    def seconds() -> float:
        training.step(None, optimizer=optimizer)
        began = time.process_time()
        training.step(None, optimizer=optimizer)
        return time.process_time() - began

    results = []
    for number in range(repeats):
        before = seconds() if number % 2 else None
        with dlio.distribute(training.model, optimizer):
            ours = seconds()
        results.append(ours / (before or seconds()) - 1)
    return results


if __name__ == "__main__":
    main(sys.argv[1])
