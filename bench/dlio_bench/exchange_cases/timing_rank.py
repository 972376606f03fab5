"""Ranks of `dlio bench exchange --case messages`: seconds of messages, of
additions, and of each exchange alone.

Usage: python -m dlio_bench.exchange_cases.timing_rank JSON. Rank 0 prints one line of JSON.
"""

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from dlio.comm import Communicator, world
from dlio.exchange.buckets import in_buckets, trainable
from dlio_bench.exchange_cases.variants import OneBatchTraining, nodes_for, timed


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    results = (_messages if task["what"] == "messages" else _exchanges)(task, comm)
    if comm.rank == 0:
        print(json.dumps(results), flush=True)


def _messages(task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """By size, medians of a message's seconds between ranks 0 and 1: `crossing`, where both send
    at once, as exchanges do, and `alone`, half of there and back; and seconds to add a byte."""
    other = 1 - comm.rank
    results: dict[str, list[float]] = {"crossing": [], "alone": []}
    for size in task["sizes"]:
        out, into = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def cross(out: Any = out, into: Any = into) -> None:
            comm.wait([comm.irecv(into, other, 1), comm.isend(out, other, 1)], "a message")

        def there_and_back(out: Any = out, into: Any = into) -> None:
            for turn in (0, 1):
                if comm.rank == turn:
                    comm.wait([comm.isend(out, other, 1)], "a message to leave")
                else:
                    comm.wait([comm.irecv(into, other, 1)], "a message")

        for name, work, ways in (("crossing", cross, 1), ("alone", there_and_back, 2)):
            seconds = []
            for _ in range(task["repeats"] + 1):
                comm.barrier()
                began = time.perf_counter()
                work()
                seconds.append((time.perf_counter() - began) / ways)
            results[name].append(statistics.median(seconds[1:]))
    return {**results, "gamma_s": _gamma(task["repeats"])}


def _gamma(repeats: int, entries: int = 1 << 22) -> float:
    there, came = np.ones(entries, np.float32), np.ones(entries, np.float32)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        there += came
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / (4 * entries)


def _exchanges(task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Seconds of each exchange by step, without computing."""
    training = OneBatchTraining(task["network"], 2, comm.rank)
    results: dict[str, Any] = {name: [] for name in task["exchanges"]}
    for _ in range(task["repeats"]):
        for name in task["exchanges"]:
            bare = timed(lambda: training.alone(None), 4, comm)
            exchange = training.distribute(name, nodes_for(name, task["nodes"], comm.size))
            alone = partial(training.alone, exchange)
            timed(alone, 2, comm)
            whole = timed(alone, 4, comm)
            results[name].append(whole - bare)
            exchange.close()
    buckets = len(in_buckets(trainable(training.model)))
    return {"seconds": results, "parameter_bytes": training.bytes, "buckets": buckets}


if __name__ == "__main__":
    main(sys.argv[1])
