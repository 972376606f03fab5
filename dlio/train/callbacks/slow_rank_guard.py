"""Name ranks that compute at less than a fifth of the others' speed, and leave them out on request.

At the end of each epoch, by its measurements. Where ranks survive others, the ranks of one node are
compared while they train; see `dlio.comm.survival.suspicion`.
"""

import statistics
from collections.abc import Sequence
from typing import Final

from dlio.comm.survival.node_watch import watch_policy
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.callbacks.rank_roster import RankRoster
from dlio.train.report import EpochReport
from dlio.util.child_processes import die

_SLOWER: Final = 5.0
_LEAST_STEPS: Final = 20
"""Optimizer steps of an epoch from which on it is judged."""


def slow_ranks(rates: Sequence[float | None]) -> list[tuple[int, float]]:
    """Return the ranks whose rate is less than a fifth of the others' median, and how many times
    slower they are. Rates are samples per second, None for a rank that was not measured."""
    known = {rank: rate for rank, rate in enumerate(rates) if rate}
    slow = []
    for rank, rate in known.items():
        others = [each for other, each in known.items() if other != rank]
        if others and _SLOWER * rate < (usual := statistics.median(others)):
            slow.append((rank, usual / rate))
    return slow


class SlowRankGuard(Callback):
    """Compares the ranks' speeds after each epoch, if no watch of a node compares them all; has
    slow ones leave, if it `evicts`, as far as `min_ranks` allows."""

    def __init__(self) -> None:
        self._members: RankRoster | None = None
        self._told: set[int] = set()
        self._updates = 0
        """Optimizer steps at the end of the epoch before."""

    def begins(self, run: Run) -> None:
        self._members, self._updates = RankRoster(run), run.updates

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        assert self._members is not None
        members, survival = self._members.present(), run.config.survival
        steps, self._updates = run.updates - self._updates, run.updates
        if steps < _LEAST_STEPS:
            return
        if watch_policy().compared.issuperset(members):
            return
        if len(members) != len(report.rank_samples_per_s):
            return  # A rank was lost in between.
        for rank, times in slow_ranks(report.rank_samples_per_s):
            member = members[rank]
            last = report.epoch + 1 == run.config.optimizer.epochs
            leaves = survival.evict_slow and not last and run.comm.size > survival.min_ranks
            if run.comm.rank == 0 and (member not in self._told or leaves):
                end = ": it leaves (--evict-slow)" if leaves else ""
                what = f"computed {times:.0f} times slower than the others in epoch"
                who = f"rank {self._members.name(member)}"
                print(f"{who} {what} {report.epoch + 1}{end}", flush=True)
            self._told.add(member)
            if leaves and rank == run.comm.rank:
                die()
