"""The ranks that share each batch of a job whose ranks may be lost.

A batch that any rank has taken stays shared as it was; the survivors share the next one. Ranks may
be at different batches when one is lost: all continue as before up to the one that is furthest
ahead. Batches are counted since the job began, over all passes; all ranks take them in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlio.comm.survival.recovery import Recovery
from dlio.comm.survival.reports import Report


@dataclass(frozen=True, slots=True)
class BatchReport(Report):
    """How far a rank is with the batches of all passes."""

    taken: int
    """Batches that it has taken."""
    steps: int
    """Optimizer steps that it has made with them."""


class _GroupChange(NamedTuple):
    """The batch from which on other ranks share batches than before."""

    recovery: int
    """Number of the recovery, from 0; -1 for the job's beginning."""
    taken: int
    """Batches that a rank takes before."""
    steps: int
    """Optimizer steps that it makes before: lost ranks counted up to there."""
    members: tuple[int, ...]
    meets: bool
    """True if all ranks meet there, because others join or leave."""


class RankGroups:
    """The members that share each batch. `recovery` is None if the job ends with any rank."""

    def __init__(self, recovery: Recovery | None) -> None:
        self._recovery = recovery
        self.taken = self.steps = 0
        """Batches that this rank has taken, and optimizer steps that it has made with them."""
        self.evaluates = False
        """True in passes without optimizer steps: these decide nothing then."""
        everyone = () if recovery is None else recovery.membership.members
        self._changes = [_GroupChange(-1, 0, 0, everyone, False)]
        """The one that was passed last, then those ahead, in their order."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share the next batch: their numbers when the job began, or nothing if
        the job ends with any rank."""
        return self._passed().members

    @property
    def meets(self) -> bool:
        """True if all ranks meet before the next batch, because others join or leave."""
        return self._passed().meets

    def _passed(self) -> _GroupChange:
        # Where ranks do not wait for each other, a lost rank may have counted in steps that this
        # rank has not made yet.
        while len(self._changes) > 1 and self._changes[1].taken <= self.taken:
            if not self.evaluates and self._changes[1].steps > self.steps:
                break
            del self._changes[0]
        return self._changes[0]

    @property
    def me(self) -> int:
        """Number of this rank when the job began; 0 if the job ends with any rank."""
        return 0 if self._recovery is None else self._recovery.membership.me

    def report(self) -> BatchReport:
        """Return how far this rank is."""
        return BatchReport(self.taken, self.steps)

    def adopt(self, report: BatchReport) -> None:
        """Be as far as another rank."""
        self.taken, self.steps = report.taken, report.steps

    def reconcile(self, reports: Sequence[BatchReport]) -> None:
        """Share the samples that no survivor has taken among the survivors."""
        assert self._recovery is not None
        if self._recovery.at_rendezvous:
            self.meet()
            return
        # All changes ahead are kept, not the last one alone: when a second rank is lost within a
        # step of the first, a rank that is behind still has to take the batches between both as the
        # others took them.
        switch = _GroupChange(
            self._recovery.number,
            max(each.taken for each in reports),
            max(self._recovery.last_counted.values(), default=0),
            self._recovery.membership.members,
            self._recovery.membership.due,
        )
        # A recovery that another loss interrupts reconciles twice.
        self._changes = [each for each in self._changes if each.recovery != switch.recovery]
        self._changes.append(switch)

    def meet(self) -> None:
        """Note that all survivors have taken the same batches: they share the next one."""
        assert self._recovery is not None
        membership = self._recovery.membership
        self._changes = [_GroupChange(-1, 0, 0, membership.members, membership.due)]
