"""Which ranks of a node hang, or are slow: decisions from what is seen of them, and a clock.

A rank is suspected only while it computes a step and all other ranks of its node wait for others:
in vain, as it is the one that does not come. A rank that waits for the source, evaluates or writes
a checkpoint is unwatched, and never suspected; nor is one of two that both compute.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dlio.comm.board import WINDOW, RankPhase, RankRow

HANG_AFTER_S: Final = 30.0
_STEPS_TO_HANG: Final = 20
"""Median steps without progress after which a rank hangs."""
FIRST_STEPS: Final = 5
"""Steps in which nobody is suspected: models are compiled, and caches filled."""
_HELD_S: Final = 5.0
"""Further seconds that a rank may be silent: there are calls that hold Python's lock for long."""
_SILENT_S: Final = 2.0
"""Time without a beat that a busy machine explains."""
_SLOWER: Final = 5.0
_LEAST_BUSY_S: Final = 0.02
"""Seconds of computing per step below which no rank is slow: it would gain nothing."""


@dataclass(frozen=True, slots=True)
class RankView:
    """Outside view of a rank."""

    state: str
    """Of its main thread, as in /proc: T is stopped, D waits for a device, Z and X are dead."""
    row: RankRow | None


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A rank that hangs, and why."""

    member: int
    why: str


def hung_ranks(
    seen: Mapping[int, RankView], now: float, watching_since: float, hang_after_s: float | None
) -> list[Suspicion]:
    """Return the rank among the members of this node that hangs, if there is one.

    The watcher has run without a gap since `watching_since`. A rank hangs after `hang_after_s`
    without progress; None for the longer of 30 seconds and 20 median steps, infinite for never.
    """
    living = {member: each for member, each in seen.items() if each.state not in "ZXT"}
    rows = {member: each.row for member, each in living.items() if each.row is not None}
    # A rank without a row may be the one that the others wait for: better to wait than to guess.
    if len(rows) < len(living):
        return []
    working = [member for member, row in rows.items() if row.phase is not RankPhase.BLOCKED]
    # With two that compute, neither has made the other wait; it may simply be a long step.
    if len(working) != 1 or len(rows) < 2:
        return []
    (member,) = working
    row = rows[member]
    if row.phase is not RankPhase.COMPUTING or row.step <= FIRST_STEPS:
        return []
    limit_s = hang_after_s
    if limit_s is None:
        median_s = statistics.median(row.seconds) if row.seconds else math.inf
        limit_s = max(HANG_AFTER_S, _STEPS_TO_HANG * median_s)
    vain_s = now - max(watching_since, *(each.since for each in rows.values()))
    silent_s = now - max(watching_since, row.beat)
    if silent_s > min(_SILENT_S, limit_s / 2):
        if min(vain_s, silent_s) < limit_s + _HELD_S:
            return []
        why = "no thread of it has run: a call into C holds Python's lock"
    elif vain_s < limit_s:
        return []
    # Not a reason by itself: a rank that writes a large file to a slow disk is in D for as long.
    # Only the log differs.
    elif living[member].state == "D":
        why = "it waits for a device or a file system that does not answer"
    else:
        why = "it runs, and does not come to the end of its step"
    return [
        Suspicion(member, f"all others of its node have waited {vain_s:.0f} s for it, and {why}")
    ]


class SlowRanks:
    """Finds ranks that compute at less than a fifth of the others' speed."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        """Step at which each rank was first seen to be slow."""
        self._told: set[int] = set()

    def look(self, rows: Mapping[int, RankRow]) -> list[tuple[int, float]]:
        """Return ranks that have become slow, each once, and how many times slower they are.

        A rank is slow if its median of 20 steps is, and still is 20 steps later.
        """
        busy = {
            member: statistics.median(row.busy)
            for member, row in rows.items()
            if len(row.busy) >= WINDOW
        }
        slow = []
        for member, own in busy.items():
            others = [each for other, each in busy.items() if other != member]
            usual = statistics.median(others) if others else math.inf
            if own < _LEAST_BUSY_S or own <= _SLOWER * usual:
                self._since.pop(member, None)
                continue
            step = rows[member].step
            if step >= self._since.setdefault(member, step) + WINDOW and member not in self._told:
                self._told.add(member)
                slow.append((member, own / max(usual, 1e-3)))
        return slow
