"""Ranks as launchers started them, the cores and GPUs of each, and the clocks of their nodes."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.cli.doctor.findings import Finding, FindingTopic
from dlio.comm import Communicator
from dlio.util.units import counted, format_seconds

_TOPIC: Final = FindingTopic("ranks")
_CLOCKS: Final = FindingTopic("clocks")
_ROUNDS: Final = 8
_MOST_S: Final = 0.5
"""Largest difference with which times of files and logs of several nodes still make sense."""

_FEW_CORES: Final = 2
"""A rank decodes while it computes."""


@dataclass(frozen=True, slots=True)
class RankHardware:
    """Cores and GPUs of one rank."""

    rank: int
    node: str
    cores: tuple[int, ...]
    """Numbers of the cores that it may use."""
    machine_cores: int
    gpus: int
    """GPUs that it sees."""
    visible: str
    """CUDA_VISIBLE_DEVICES, empty if unset."""
    device: str
    """The device that `dlio train` would give it."""


def rank_facts(rank: int, node: str, device: str) -> RankHardware:
    """Return the facts of this process; `device` is as for `dlio train --device`."""
    try:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except ImportError:
        gpus = 0
    kind, _, number = device.partition(":")
    chosen = "cpu"
    if gpus and kind in ("auto", "cuda"):
        chosen = f"cuda:{number or rank % gpus}"
    return RankHardware(
        rank,
        node,
        tuple(sorted(os.sched_getaffinity(0))),
        os.cpu_count() or 1,
        gpus,
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        chosen,
    )


def check_ranks(facts: Sequence[RankHardware]) -> Iterator[Finding]:
    """Yield how all ranks share nodes, cores and GPUs."""
    by_node: dict[str, list[RankHardware]] = {}
    for each in facts:
        by_node.setdefault(each.node, []).append(each)
    counts = sorted({len(ranks) for ranks in by_node.values()})
    per_node = " or ".join(map(str, counts))
    yield _TOPIC.ok("ranks", f"{len(facts)} on {counted(len(by_node), 'node')}, {per_node} on each")
    if len(counts) > 1:
        listed = ", ".join(f"{node} {len(ranks)}" for node, ranks in sorted(by_node.items()))
        yield _TOPIC.warning(
            "ranks of nodes",
            listed,
            "give each node as many: --ntasks-per-node of srun, or --map-by ppr:N:node of mpirun",
        )
    for node, ranks in sorted(by_node.items()):
        yield from _cores(node, ranks)
        yield from _gpus(node, ranks)


def _cores(node: str, ranks: Sequence[RankHardware]) -> Iterator[Finding]:
    used = sorted({core for each in ranks for core in each.cores})
    shares = [len(each.cores) for each in ranks]
    own = sum(shares) == len(used)
    each_has = min(shares) if own else len(used) // len(ranks)
    subject = f"cores of {node}"
    text = f"{len(used)} of {ranks[0].machine_cores} for {counted(len(ranks), 'rank')}"
    if len(set(ranks)) and len(used) < min(ranks[0].machine_cores, _FEW_CORES * len(ranks)):
        yield _TOPIC.warning(
            subject,
            text,
            "the launcher binds ranks to few cores: --bind-to none of mpirun, --cpus-per-task of "
            "srun",
        )
    elif each_has < 1:
        yield _TOPIC.warning(subject, text, "start fewer ranks: they take turns on the cores")
    else:
        yield _TOPIC.ok(subject, text)


def _gpus(node: str, ranks: Sequence[RankHardware]) -> Iterator[Finding]:
    """GPUs are told apart by their number among those that are visible."""
    if not any(each.gpus for each in ranks):
        return
    subject = f"GPUs of {node}"
    taken = [_gpu_of(each) for each in ranks]
    without = [each.rank for each, gpu in zip(ranks, taken, strict=True) if gpu is None]
    if without:
        yield _TOPIC.warning(
            subject,
            f"no GPU, or computing on the CPU: rank {', '.join(map(str, without))}",
            "give all ranks of a node the same: --gpus-per-node, and no CUDA_VISIBLE_DEVICES",
        )
    shared = sorted({gpu for gpu in taken if gpu is not None and taken.count(gpu) > 1})
    if shared:
        yield _TOPIC.warning(
            subject,
            f"{len(ranks)} ranks share {', '.join(shared)}",
            "start as many ranks on a node as it has GPUs",
        )
    elif not without:
        yield _TOPIC.ok(subject, ", ".join(f"rank {r.rank}: {r.device}" for r in ranks))


def _gpu_of(facts: RankHardware) -> str | None:
    kind, _, number = facts.device.partition(":")
    if kind != "cuda":
        return None
    visible = [name for name in facts.visible.split(",") if name]
    place = int(number)
    return visible[place] if place < len(visible) else number


def allocation(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the batch system's allocation that this process is in, if any."""
    if job := environment.get("SLURM_JOB_ID"):
        nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "?"))
        tasks = environment.get("SLURM_NTASKS", "?")
        yield _TOPIC.ok("Slurm", f"job {job}: nodes: {nodes}, tasks: {tasks}")
    elif job := environment.get("PBS_JOBID"):
        yield _TOPIC.ok("PBS", f"job {job}, nodes in {environment.get('PBS_NODEFILE', '?')}")
    elif job := environment.get("LSB_JOBID"):
        yield _TOPIC.ok("LSF", f"job {job}: {environment.get('LSB_MCPU_HOSTS', '?')}")


def lost_ranks(problem: str) -> Finding:
    """Return the finding of ranks that a launcher started and that do not find each other, from the
    error's text, which ends with a remedy.
    """
    said, _, remedy = problem.partition(": ")
    return _TOPIC.error("ranks", said, remedy or "start them with the mpirun of that MPI library")


def clock_offsets(comm: Communicator) -> tuple[list[float], float]:
    """Return each rank's clock minus rank 0's in seconds, and how uncertain that is. Collective.

    Each round begins with a barrier. The time that it took bounds how far apart ranks have left it;
    the shortest round counts.
    """
    best: tuple[list[float], float] | None = None
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        comm.barrier()
        now = time.time()
        rounds = comm.allgather([now, time.perf_counter() - began])
        comm.barrier()
        uncertain = max(seconds for _, seconds in rounds)
        if best is None or uncertain < best[1]:
            best = ([clock - rounds[0][0] for clock, _ in rounds], uncertain)
    assert best is not None
    return best


def check_clocks(offsets: list[float], uncertain: float, nodes: list[str]) -> Finding:
    """Return the finding of all ranks' offsets; `nodes` are the names of their nodes."""
    spread = max(offsets) - min(offsets)
    text = f"{format_seconds(spread)} apart at most, to within {format_seconds(uncertain)}"
    if spread - uncertain <= _MOST_S:
        return _CLOCKS.ok("nodes", text)
    middle = sorted(offsets)[len(offsets) // 2]
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank] - middle))
    return _CLOCKS.warning(
        "nodes",
        f"{text}; {nodes[worst]} differs most",
        "start chronyd (or ntpd) there: --leave-at and times of files and logs depend on clocks",
    )
