"""A rank of `dlio bench shuffle --case link`: epochs over a shaped link, as training has them.

It runs in a network namespace, with torchrun's environment.
"""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dlio
from dlio.comm import Communicator
from dlio_bench.bench_ranks import TaskValue, pass_s


def epochs_over_links(everyone: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Figures of this rank's epochs in each of the task's modes, of its links, and of exchanges."""
    with (
        dlio.open(task["source"], tiers=task["tiers"], image_size=None, seed=0) as data,
        ExitStack() as stack,
    ):
        comm = everyone.dup()
        stack.callback(comm.close)

        def loader_of(mode: str) -> dlio.DataLoader:
            return stack.enter_context(
                dlio.DataLoader(data, task["batch_size"], shuffle=True, mode=mode, num_workers=1)
            )

        report: dict[str, Any] = {
            **_measured(comm, task["model_s"]),
            "made_per_s": _made_per_s(loader_of("local"), comm),
            "exchange": _exchange(data, loader_of("global"), task["epochs"], comm),
            "modes": {mode: _epochs(loader_of(mode), task, comm) for mode in task["modes"]},
        }
        assert data.mounted is not None
        report["nodes"] = list(data.mounted.nodes.names)
        comm.barrier()
    return report


def _epochs(
    loader: dlio.DataLoader, task: dict[str, Any], comm: Communicator
) -> list[dict[str, float]]:
    """Figures of epochs after the first, with a model that sleeps."""
    epochs = []
    for epoch in range(1 + task["epochs"]):
        loader.set_epoch(epoch)
        comm.barrier()
        began = time.perf_counter()
        computed = 0.0
        for _ in loader:
            time.sleep(task["model_s"])
            computed += task["model_s"]
            comm.barrier()
        seconds = time.perf_counter() - began
        stats = loader.stats()
        moved = sum(comm.allgather(stats["bytes"]["peer"]))
        counts = {key: sum(comm.allgather(stats[key])) for key in ("messages", "late")}
        figures = {"epoch": epoch, "seconds": seconds, "stall_s": seconds - computed}
        epochs.append({**figures, "moved": moved, **counts})
    return epochs[1:]


def _measured(comm: Communicator, model_s: float) -> dict[str, float]:
    """Bytes a second that a link takes each way, for messages as the shuffle has them: half a
    window to all others together, or to one, after a pause; and seconds of a step without data."""
    everybody = [rank for rank in range(comm.size) if rank != comm.rank]
    figures = {"link_rate": _rate(comm, everybody, everybody)}
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    figures["one_peer_rate"] = _rate(comm, [right], [left])
    began = time.perf_counter()
    for _ in range(50):
        time.sleep(model_s)
        comm.barrier()
    step = (time.perf_counter() - began) / 50
    return {**figures, "step_s": max(comm.allgather(step))}


def _rate(comm: Communicator, dests: list[int], sources: list[int]) -> float:
    part = (8 << 20) // len(dests)
    out = np.ones(part, np.uint8)
    into = [np.ones(part, np.uint8) for _ in sources]
    rates = []
    for _ in range(9):
        time.sleep(0.1)
        comm.barrier()
        began = time.perf_counter()
        requests = [comm.irecv(memory, peer, 1) for memory, peer in zip(into, sources, strict=True)]
        comm.wait([*requests, *(comm.isend(out, peer, 1) for peer in dests)], "a measurement")
        comm.barrier()
        rates.append(part * len(dests) / (time.perf_counter() - began))
    return float(np.median(rates))


def _exchange(
    data: Any, loader: dlio.DataLoader, epochs: int, comm: Communicator
) -> dict[str, list[float]]:
    """Bytes a second that epochs in mode `global` bring to peers, when nothing is computed, and
    that an all-to-all of as many reaches over the same links, in turn."""
    rates: dict[str, list[float]] = {"shuffle": [], "alltoallv": []}
    for number in range(1 + epochs):
        seconds = pass_s(loader, comm)
        moved = sum(comm.allgather(loader.stats()["bytes"]["peer"]))
        nodes = data.mounted.nodes.node_of
        away = nodes != nodes[comm.rank]
        part = moved // comm.size // int(away.sum())
        parts = (part * away).tolist()
        out, into = (torch.ones(sum(parts), dtype=torch.uint8) for _ in range(2))
        comm.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(into, out, parts, parts)
        comm.barrier()
        if number:
            rates["shuffle"].append(moved / seconds)
            rates["alltoallv"].append(moved / (time.perf_counter() - began))
    return rates


def _made_per_s(loader: dlio.DataLoader, comm: Communicator) -> float:
    """Samples per second that a rank makes from its own tier."""
    pass_s(loader, comm)
    seconds = pass_s(loader, comm)
    return float(loader.stats()["samples"] / seconds)
