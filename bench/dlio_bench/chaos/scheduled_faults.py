"""Faults, a seeded schedule of them, and the clock by which they are made."""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KINDS: Final = ("kill", "stop", "segv", "exit", "raise", "twice", "first", "hang", "leave")
NODE_KINDS: Final = ("node", "cut")
_TWICE_S: Final = 0.08


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault that is to be made."""

    due_s: float
    """Time at which it is made, in seconds during which jobs make steps, over all jobs."""
    kind: str
    """One of KINDS, or of NODE_KINDS."""
    picks: tuple[float, float]
    """Numbers in [0, 1) that choose among the ranks that are left."""
    gap_s: float
    """Time between the two of `twice`."""

    @property
    def takes(self) -> int:
        """Number of ranks that it takes."""
        return 2 if self.kind == "twice" else 1

    def choose(self, left: Sequence[int]) -> list[int]:
        """Choose the ranks to hurt among those that are left, ascending; at least `takes`."""
        if self.kind == "first":
            return [left[0]]
        pool = list(left)
        return [pool.pop(int(pick * len(pool))) for pick in self.picks[: self.takes]]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was made."""

    fault: ScheduledFault
    at: float
    """Time of the first signal, by the machine's monotonic clock."""
    ranks: tuple[int, ...]
    """Ranks that were hurt, by their numbers when their job began."""


def make_schedule(
    kinds: Sequence[str], count: int, every_s: float, spacing: str, seed: int
) -> list[ScheduledFault]:
    """Draw `count` faults; the same for the same arguments.

    Kinds come equally often, but for the last ones, in random order. The time between two faults
    has a mean; its spacing is `exponential`, or `uniform` between half and one and a half of it.
    """
    rng = random.Random(seed)
    deck: list[str] = []
    faults, due_s = [], 0.0
    for _ in range(count):
        if not deck:
            deck = rng.sample(list(kinds), len(kinds))
        if spacing == "uniform":
            due_s += rng.uniform(0.5, 1.5) * every_s
        else:
            due_s += rng.expovariate(1 / every_s)
        picks = (rng.random(), rng.random())
        faults.append(ScheduledFault(due_s, deck.pop(), picks, rng.uniform(0, _TWICE_S)))
    return faults


class FaultClock:
    """The faults that are still to be made, and the time that counts for them: it stands still
    while no fault can be made."""

    def __init__(self, faults: Sequence[ScheduledFault]) -> None:
        self.faults = deque(faults)
        self._passed_s = 0.0
        self._last: float | None = None

    def due(self, runs: bool) -> ScheduledFault | None:
        """Return the next fault if its time has come, and it can be made now (`runs`)."""
        now = time.monotonic()
        if runs and self._last is not None:
            self._passed_s += now - self._last
            if self.faults:  # Until a fault is made, those after it do not come nearer.
                self._passed_s = min(self._passed_s, self.faults[0].due_s)
        self._last = now if runs else None
        if runs and self.faults and self._passed_s >= self.faults[0].due_s:
            return self.faults[0]
        return None
