"""Ranks of `dlio bench exchange --case step`: steps with dlio's exchanges, and with torch's
DDP over gloo and its hooks, in the same processes, in turn.

Usage: python -m dlio_bench.exchange_cases.step_rank JSON. Rank 0 prints one line of JSON.
"""

import contextlib
import copy
import gc
import json
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlio.comm import Communicator, world
from dlio_bench.exchange_cases.variants import OneBatchTraining, timed

_WARM: Final = 3
"""Steps before those that are timed: DDP orders its buckets anew after the first, and PowerSGD
begins at the third."""
_RANK: Final = 4


def main(text: str) -> None:
    """Run this rank's part of the task in `text`, JSON; rank 0 prints the results."""
    task: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    comm = world()
    _start_gloo(comm)
    training = OneBatchTraining(task["network"], task["batch_size"], comm.rank)
    variants = ["none", *task["exchanges"], *(f"ddp {hook}" for hook in task["hooks"])]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, float] = {}
    for repeat in range(task["repeats"]):
        for name in variants if repeat % 2 == 0 else variants[::-1]:
            with _variant(name, training, comm) as (step, bytes_sent):
                for _ in range(_WARM):
                    step()
                before, steps = bytes_sent(), task["steps"]
                seconds[name].append(timed(step, steps, comm))
                sent[name] = (bytes_sent() - before) / steps
            gc.collect()  # DDP's reducer goes with its last reference, and its hooks with it.
    if comm.rank == 0:
        results = {"parameter_bytes": training.bytes, "seconds": seconds, "sent": sent}
        print(json.dumps(results), flush=True)
    comm.barrier()
    dist.destroy_process_group()


def _start_gloo(comm: Communicator) -> None:
    """A gloo group over the loopback, in addition to MPI."""
    port = 0
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    port = comm.tell(port)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
    )


@contextlib.contextmanager
def _variant(
    name: str, training: OneBatchTraining, comm: Communicator
) -> Iterator[tuple[Callable[[], None], Callable[[], float]]]:
    """A step of a variant, and the bytes that this rank has sent, as far as is known."""
    if name == "none":
        yield lambda: training.step(None), lambda: 0.0
    elif name.startswith("ddp "):
        with _ddp(name.removeprefix("ddp "), training, comm) as variant:
            yield variant
    else:
        exchange = training.distribute(name)
        try:
            yield lambda: training.step(exchange), lambda: exchange.statistics()["bytes"]
        finally:
            exchange.close()


@contextlib.contextmanager
def _ddp(
    hook: str, training: OneBatchTraining, comm: Communicator
) -> Iterator[tuple[Callable[[], None], Callable[[], float]]]:
    model = copy.deepcopy(training.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    # Over gloo PowerSGD's messages of one bucket meet another's: it gets all in one.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "powersgd" else None)
    # gloo's allreduce is a ring; PowerSGD's two factors take that way, too.
    ring = 2 * (comm.size - 1) / comm.size * training.bytes
    share = 1.0
    state = None
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        share = 0.5
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=_RANK, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    steps = 0

    def step() -> None:
        nonlocal steps, share
        training.step(None, ddp, optimizer)
        steps += 1
        if state is not None and state.total_numel_before_compression:
            before, after = (
                state.total_numel_before_compression,
                state.total_numel_after_compression,
            )
            share = after / before

    yield step, lambda: steps * share * ring


if __name__ == "__main__":
    main(sys.argv[1])
