"""One rank of `dlio bench train`: `python -m dlio_bench.training.rank JSON`.

The task names runs, each of a network, a batch size and exchanges; rank 0 prints one line of JSON.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch

from dlio.comm import Communicator, world
from dlio.train.exchange.buckets import in_buckets, trainable
from dlio.train.exchange.distribute import Distributed, distribute
from dlio.train.exchange_spec import parse_exchange
from dlio_bench.exchange.variants import nodes_for
from dlio_bench.training.networks.registry import NETWORKS, make_batch, make_network
from dlio_bench.training.stepping import Batches, Loop, Pass

__all__ = ["NONE", "exchange_of", "main"]

NONE: Final = "none"
"""Steps without any exchange."""
_WARM: Final = 2
_LEAST_S: Final = 0.5
"""Of a pass: on shared cores, ranks take turns of some milliseconds."""


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    runs = [_measured(run, task, comm) for run in task["runs"]]
    if comm.rank == 0:
        print(json.dumps({"runs": runs}), flush=True)


def _measured(run: dict[str, Any], task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return the times of a network's steps by exchange, and its size."""
    name, side = run["network"], run["side"]
    with ExitStack() as stack:
        batches = _batches(run, task["data"], comm, stack)
        loop = Loop(make_network(name, side, run["seed"]), batches)
        loop.steps(_WARM, None)
        steps = {each: _pass(each, loop, task, comm) for each in run["exchanges"]}
    return {
        **run,
        "bytes": loop.bytes,
        "buckets": len(in_buckets(trainable(loop.model))),
        "steps": steps,
    }


def exchange_of(name: str, loop: Loop, comm: Communicator) -> Distributed:
    """Return the exchange of a loop's steps; the caller closes it. Collective.

    Args:
        name: as for `--exchange`.
    """
    nodes = nodes_for(name, 1, comm.size)
    return distribute(loop.model, loop.optimizer, name, pretend_nodes=nodes, follow_steps=False)


def _pass(name: str, loop: Loop, task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return the times of steps with an exchange: of each step the mean over the ranks."""
    if name == NONE:
        count = _enough(loop.steps(_WARM, None), task["steps"], comm)
        comm.barrier()
        return _gathered(loop.steps(count, None), 1, comm)
    period = parse_exchange(name).period
    exchange = exchange_of(name, loop, comm)
    try:
        # Whole periods before and in what is timed: each period ends with an exchange.
        warm = loop.steps(period if period > 1 else _WARM, exchange)
        count = -(-_enough(warm, task["steps"], comm) // period) * period
        comm.barrier()
        times = loop.steps(count, exchange)
    finally:
        exchange.close()
    return _gathered(times, period, comm)


def _enough(warm: Pass, steps: int, comm: Communicator) -> int:
    """Return the number of steps that take half a second at least, the same on all ranks."""
    step_s = sum(warm.steps_s) / len(warm.steps_s)
    return max(comm.allgather(max(steps, math.ceil(_LEAST_S / step_s))))


def _gathered(times: Pass, period: int, comm: Communicator) -> dict[str, Any]:
    everywhere = comm.allgather((times.steps_s, times.cpu_s, list(times.parts_s.values())))
    count = len(times.steps_s)
    parts = np.mean([parts for _, _, parts in everywhere], axis=0).tolist()
    return {
        "period": period,
        "steps_s": np.mean([steps for steps, _, _ in everywhere], axis=0).tolist(),
        "slowest_s": max(sum(steps) for steps, _, _ in everywhere) / count,
        "cpu_s": sum(cpu for _, cpu, _ in everywhere) / count,
        "parts_s": dict(zip(times.parts_s, parts, strict=True)),
    }


def _batches(
    run: dict[str, Any], data: str | None, comm: Communicator, stack: ExitStack
) -> Batches:
    """Return a source of batches: one of random samples again and again, or pictures of a data set
    through dlio's loader."""
    name, side, count = run["network"], run["side"], run["batch_size"]
    if data is None:
        batch = make_batch(name, count, side, seed=run["seed"] + comm.rank)

        def again() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            while True:
                yield batch

        return again
    return _pictures(data, side, count, NETWORKS[name].channels, stack)


def _pictures(data: str, side: int, count: int, channels: int, stack: ExitStack) -> Batches:
    import dlio
    from dlio.train.model import normalised

    dataset = stack.enter_context(dlio.open(data, tiers="ram:1GiB", image_size=side))
    loader = stack.enter_context(
        dlio.DataLoader(dataset, batch_size=count, shuffle=True, drop_last=True, num_workers=1)
    )
    epoch = iter(range(sys.maxsize))

    def one_epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader.set_epoch(next(epoch))
        for images, labels in loader:
            inputs = normalised(images, torch.device("cpu"))
            yield inputs[:, :channels], labels.long()

    return one_epoch


if __name__ == "__main__":
    main(sys.argv[1])
