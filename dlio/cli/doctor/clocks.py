"""Differences between the nodes' clocks."""

import time
from typing import Final

from dlio.cli.doctor.findings import Finding, ok, warning
from dlio.comm import Communicator
from dlio.util.units import format_seconds

_ROUNDS: Final = 8
_MOST_S: Final = 0.5
"""Largest difference with which times of files and logs of several nodes still make sense."""


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
    """Return the finding of the offsets of all ranks.

    Args:
        nodes: name of each rank's node.
    """
    spread = max(offsets) - min(offsets)
    text = f"{format_seconds(spread)} apart at most, to within {format_seconds(uncertain)}"
    if spread - uncertain <= _MOST_S:
        return ok("clocks", "nodes", text)
    middle = sorted(offsets)[len(offsets) // 2]
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank] - middle))
    return warning(
        "clocks",
        "nodes",
        f"{text}; {nodes[worst]} differs most",
        "start chronyd (or ntpd) there: --leave-at and times of files and logs depend on clocks",
    )
