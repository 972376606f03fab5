"""`--case step`: time and bytes of a step, with and without compression, and of torch's DDP."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dlio.comm import Communicator
from dlio_bench.bench_ranks import LINK, TIMEOUT_S, TaskValue, run, start_process_group, timed
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.overlap_case import fabrics_of
from dlio_bench.exchange_cases.variants import OneBatchTraining
from dlio_bench.results.repeats import ratio, spread, turns
from dlio_bench.results.terminal import steps

_EXCHANGES: Final = (
    "allreduce",
    "allreduce+bf16",
    "allreduce+fp16",
    "allreduce+int8",
    "allreduce+onebit",
    "allreduce+threshold",
    "allreduce+adaptive",
)
_HOOKS: Final = {
    "ddp none": "DDP",
    "ddp fp16": "DDP, fp16 hook",
    "ddp powersgd": "DDP, PowerSGD of rank 4",
}
"""Variants of torch's DDP, and their names in the table."""
_STEPS: Final = 2
_SMALL_BATCH: Final = 32
_SMALL_STEPS: Final = 10
_WARM: Final = 3
"""Steps before those that are timed: DDP orders its buckets anew after the first, and PowerSGD
begins at the third."""
_RANK: Final = 4


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """On 2 ranks of one thread each, in the same processes, in turn: seconds of a step, over those
    of a step of no exchange at all, and bytes that float32 would send over those that were sent."""
    fabrics, lacking = fabrics_of(options)
    small = replace(options, network="small", batch_size=_SMALL_BATCH)
    rows = [
        row
        for each, count in ((small, _SMALL_STEPS), (options, _STEPS))
        for fabric in steps(fabrics)
        for row in _rows(each, count, fabric)
    ]
    return {
        "rows": rows,
        "said": [
            *([] if lacking is None else [f"No link: {lacking}"]),
            "The floor is a step of no exchange. DDP's bytes are gloo's ring's, computed; gloo "
            "takes TCP over the loopback also where MPI's messages go through memory.",
        ],
    }


def _rows(options: ExchangeBenchOptions, steps: int, fabric: str) -> list[dict[str, Any]]:
    task = {
        "network": options.network,
        "batch_size": options.batch_size,
        "steps": steps,
        "repeats": options.repeats,
        "exchanges": options.exchanges or _EXCHANGES,
    }
    # Gloo takes the interface that the host's name stands for; over a link there is but one.
    environment = {"GLOO_SOCKET_IFNAME": "lo"} if fabric == LINK else {}
    report = run(step_times, task, 2, fabric, environment, 3 * TIMEOUT_S)
    bare, whole = report["seconds"]["none"], report["parameter_bytes"]
    rows = []
    for name, seconds in report["seconds"].items():
        sent = report["sent"][name]
        rows.append(
            {
                "network": options.network,
                "fabric": fabric,
                "exchange": _HOOKS.get(name, name),
                "step_s": spread(seconds),
                "over_none": ratio(seconds, bare),
                "sent_MB": sent / 1e6,
                # Of two ranks a ring sends as much as there is.
                "float32_over_sent": whole / sent if sent else None,
            }
        )
    return rows


# The ranks


def step_times(
    comm: Communicator,
    network: str,
    batch_size: int,
    steps: int,
    repeats: int,
    exchanges: list[str],
) -> dict[str, TaskValue]:
    """Seconds and bytes of steps with dlio's exchanges, and with torch's DDP over gloo and its
    hooks, in turn."""
    start_process_group("gloo", comm)
    training = OneBatchTraining(network, batch_size, comm.rank)
    variants = ["none", *exchanges, *_HOOKS]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, float] = {}
    for _, name in turns(variants, repeats):
        with _variant(name, training, comm) as (step, bytes_sent):
            for _ in range(_WARM):
                step()
            before = bytes_sent()
            seconds[name].append(timed(step, steps, comm))
            sent[name] = (bytes_sent() - before) / steps
        gc.collect()  # DDP's reducer goes with its last reference, and its hooks with it.
    comm.barrier()
    dist.destroy_process_group()
    return {"parameter_bytes": training.bytes, "seconds": seconds, "sent": sent}


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
            share = state.total_numel_after_compression / state.total_numel_before_compression

    yield step, lambda: steps * share * ring
