"""The starts of one job: which ranks run where, and whether another start makes sense. Pure."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.util.settings import START

_MOST_IDLE: Final = 3


@dataclass(frozen=True, slots=True)
class Incident:
    """An end of all ranks, after which they were started again: those that were left, or others."""

    ranks: tuple[int, ...]
    """Numbers of the ranks that are gone for good, or have joined; none if the same ranks were
    started again."""
    nodes: tuple[str, ...]
    """Node of each of them."""
    noticed: float
    """Time when the launcher learned of it, or when all ranks had paused, in seconds since the
    epoch."""
    kind: str = "restart"
    """`restart`; `joined`: ranks of other nodes; `left`: nodes on purpose; as in `MeasuredLoss`."""


@dataclass(frozen=True, slots=True)
class JobStart:
    """One start of a job's ranks, as these get it."""

    number: int
    """From 0."""
    token: str
    """Name of the job."""
    begun: int
    """Number of ranks when the job began."""
    ranks: tuple[int, ...]
    """Number of each rank of this start when the job began."""
    incidents: tuple[Incident, ...] = ()
    launched: float = 0.0
    """Time when the launcher started mpirun, in seconds since the epoch."""


def start_of(environment: Mapping[str, str] = os.environ) -> JobStart | None:
    """Return the record that the launcher has given this rank; None if it does not start again."""
    text = environment.get(START)
    if text is None:
        return None
    fields = json.loads(text)
    incidents = tuple(
        Incident(tuple(each["ranks"]), tuple(each["nodes"]), each["noticed"], each["kind"])
        for each in fields["incidents"]
    )
    return JobStart(**{**fields, "ranks": tuple(fields["ranks"]), "incidents": incidents})


def spread(ranks: int, nodes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each node's ranks: even to one, consecutive, in the nodes' order."""
    bounds = [-(-ranks * number // len(nodes)) for number in range(len(nodes) + 1)]
    return {
        node: tuple(range(first, last))
        for node, first, last in zip(nodes, bounds, bounds[1:], strict=False)
    }


def living(placed: Mapping[str, Sequence[int]], lost: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the ranks whose nodes are not lost."""
    return tuple(n for node, numbers in placed.items() if node not in lost for n in numbers)


class Patience:
    """Counts starts that came no further than the one before."""

    def __init__(self) -> None:
        self._best = -1
        self._idle = 0

    def allows(self, progress: int) -> bool:
        """True if another start makes sense; `progress` grows as the training does."""
        self._idle = 0 if progress > self._best else self._idle + 1
        self._best = max(self._best, progress)
        return self._idle < _MOST_IDLE
