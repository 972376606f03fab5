"""Ranks of `dlio bench shuffle`, started by mpirun: what an exchange of samples reaches, beside an
Alltoallv of the same bytes, and how much of its speed decoding keeps meanwhile.

Usage: python -m dlio_bench.exchange JSON. Rank 0 prints one line of JSON.
"""

import json
import sys
import time
from typing import Any, Final

import numpy as np

from dlio.comm import Communicator

_ROUNDS: Final = 2
"""Untimed passes before: tiers are filled, memory is made."""


def main(text: str) -> None:
    task = json.loads(text)
    from dlio.comm import world

    comm = world()
    found = _exchange(task, comm) if task["case"] == "exchange" else _decode(task, comm)
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def _exchange(task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Epochs in mode `global`, of samples that nobody decodes, and Alltoallv of what each moved, in
    turn."""
    import dlio

    rates: dict[str, list[float]] = {"shuffle": [], "alltoallv": [], "consumed": []}
    with dlio.open(task["source"], tiers=task["tiers"], image_size=None) as data:
        moving = dlio.DataLoader(
            data,
            task["batch_size"],
            shuffle=True,
            mode="global",
            num_workers=1,
            pretend_nodes=task["nodes"],
        )
        counts: dict[str, int] = {}
        with moving:
            for number in range(_ROUNDS + task["repeats"]):
                comm.barrier()
                began = time.perf_counter()
                for _ in moving:
                    pass
                comm.barrier()
                seconds = time.perf_counter() - began
                stats = moving.stats()
                moved = sum(comm.allgather(stats["bytes"]["peer"]))
                late = sum(comm.allgather(stats["late"]))
                counts = {
                    "moved": moved,
                    "messages": sum(comm.allgather(stats["messages"])),
                    "late": late,
                }
                bare = _alltoallv(comm, moved)
                if number >= _ROUNDS:
                    rates["shuffle"].append(moved / seconds)
                    rates["alltoallv"].append(moved / bare)
                    rates["consumed"].append(sum(comm.allgather(stats["samples"])) / seconds)
    return {"rates": rates, **counts}


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


def _decode(task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Images/s of an epoch in mode `local`, which sends nothing, and in `global`, in turn."""
    import dlio

    rates: dict[str, list[float]] = {"local": [], "global": []}
    with dlio.open(task["source"], tiers=task["tiers"], image_size=224) as data:
        loaders = {
            mode: dlio.DataLoader(
                data,
                task["batch_size"],
                shuffle=True,
                mode=mode,
                num_workers=1,
                pretend_nodes=task["nodes"],
            )
            for mode in rates
        }
        for number in range(1 + task["repeats"]):
            for mode, loader in loaders.items():
                comm.barrier()
                began = time.perf_counter()
                for _ in loader:
                    pass
                comm.barrier()
                if number:
                    rates[mode].append(len(data) / (time.perf_counter() - began))
        for loader in loaders.values():
            loader.close()
    return {"rates": rates}


if __name__ == "__main__":
    main(sys.argv[1])
