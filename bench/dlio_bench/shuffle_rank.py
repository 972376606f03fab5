"""Ranks of `dlio bench shuffle`, started by mpirun: throughput of an exchange of samples,
compared with an Alltoallv of the same bytes, and the speed that decoding keeps meanwhile.
"""

import contextlib
import os
import time
from typing import Any, Final

import numpy as np

import dlio
from dlio.comm import Communicator
from dlio.plan.epoch import WINDOW_BYTES
from dlio_bench.bench_ranks import TaskValue, pass_s

_ROUNDS: Final = 2
"""Untimed passes before: tiers are filled, memory is made."""


def _loader(data: dlio.Dataset, task: dict[str, Any], mode: str) -> dlio.DataLoader:
    return dlio.DataLoader(
        data,
        task["batch_size"],
        shuffle=True,
        mode=mode,
        num_workers=1,
        pretend_nodes=task["nodes"],
    )


def exchange_rates(comm: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Epochs in mode `global`, of samples that nobody decodes, and in turn Alltoallv of the
    bytes that each moved."""
    rates: dict[str, list[float]] = {"shuffle": [], "alltoallv": [], "fed_alltoallv": []}
    counts: dict[str, int] = {}
    with (
        dlio.open(task["source"], tiers=task["tiers"], image_size=None) as data,
        _loader(data, task, "global") as moving,
    ):
        for number in range(_ROUNDS + task["repeats"]):
            seconds = pass_s(moving, comm)
            stats = moving.stats()
            moved = sum(comm.allgather(stats["bytes"]["peer"]))
            counts = {key: sum(comm.allgather(stats[key])) for key in ("messages", "late")}
            bare = _alltoallv(comm, moved)
            fed = _fed_alltoallv(comm, data, task["nodes"], task["batch_size"])
            if number >= _ROUNDS:
                rates["fed_alltoallv"].append(fed)
                rates["shuffle"].append(moved / seconds)
                rates["alltoallv"].append(moved / bare)
    return {"rates": rates, "moved": moved, **counts}


def _alltoallv(comm: Communicator, moved: int) -> float:
    """Seconds that MPI takes to send as many bytes, evenly, from memory to memory."""
    from mpi4py import MPI

    peers = comm.size - 1
    part = moved // comm.size // peers
    counts = [0 if peer == comm.rank else part for peer in range(comm.size)]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
    out = np.full(part * peers, comm.rank, np.uint8)
    into = np.ones(part * peers, np.uint8)  # Its pages are there before.
    comm.barrier()
    began = time.perf_counter()
    MPI.COMM_WORLD.Alltoallv([out, (counts, starts), MPI.BYTE], [into, (counts, starts), MPI.BYTE])
    comm.barrier()
    return time.perf_counter() - began


def _fed_alltoallv(comm: Communicator, data: Any, nodes: int, batch_size: int) -> float:
    """Bytes a second that an Alltoallv a window brings to peers where a sample is read from a tier
    into the buffers that are sent, and copied from those that came into its batch; without
    checksums, and nothing of a window overlaps the next."""
    from mpi4py import MPI

    assert data.mounted is not None
    tier, layout = data.mounted.hierarchy.tiers[0], data.reader.layout
    blocks = sorted(tier.blocks())
    size = int(data.reader.sizes[0])
    window = batch_size * max(1, WINDOW_BYTES // (batch_size * size))
    each = comm.size // nodes
    peers = [rank for rank in range(comm.size) if rank // each != comm.rank // each]
    part = window // (len(peers) + each)
    there = [rank in peers for rank in range(comm.size)]
    counts = [part * size * one for one in there]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
    out, into = (np.ones(part * len(peers) * size, np.uint8) for _ in range(2))
    batch = np.ones((window, size), np.uint8)
    chosen = np.random.default_rng(comm.rank)
    files = {block: os.open(os.path.join(tier.path, f"{block:08d}.blk"), 0) for block in blocks}
    windows = max(1, len(data) // comm.size // window)

    stride = size + -size % 8

    def read(into: memoryview) -> None:
        block = blocks[chosen.integers(len(blocks))]
        count = int(layout.starts[block + 1] - layout.starts[block])
        first = os.fstat(files[block]).st_size - count * stride
        os.preadv(files[block], [into], first + int(chosen.integers(count)) * stride)

    comm.barrier()
    began = time.perf_counter()
    for _ in range(windows):
        for k in range(part * len(peers)):
            read(out.data[k * size : (k + 1) * size])
        MPI.COMM_WORLD.Alltoallv(
            [out, (counts, starts), MPI.BYTE], [into, (counts, starts), MPI.BYTE]
        )
        for k in range(part * len(peers)):
            batch[k] = into[k * size : (k + 1) * size]
        for k in range(part * len(peers), window):
            read(batch[k].data)
    comm.barrier()
    seconds = time.perf_counter() - began
    for descriptor in files.values():
        os.close(descriptor)
    return windows * part * len(peers) * size * comm.size / seconds


def decode_rates(comm: Communicator, **task: TaskValue) -> dict[str, TaskValue]:
    """Images/s of an epoch in mode `local`, which sends nothing, and in `global`, in turn."""
    rates: dict[str, list[float]] = {"local": [], "global": []}
    with (
        dlio.open(task["source"], tiers=task["tiers"], image_size=224) as data,
        contextlib.ExitStack() as stack,
    ):
        loaders = {mode: stack.enter_context(_loader(data, task, mode)) for mode in rates}
        for number in range(1 + task["repeats"]):
            for mode, loader in loaders.items():
                seconds = pass_s(loader, comm)
                if number:
                    rates[mode].append(len(data) / seconds)
    return {"rates": rates}
