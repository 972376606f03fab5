"""Sums that all ranks of an exchange take, or none of them, whoever is lost meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.board import blocked
from dlio.comm.survival.recovery import Recovery, RecoveryPart
from dlio.comm.survival.reports import Report
from dlio.errors import PeerLost
from dlio.exchange.exchange_context import ExchangeContext


class RoundSums(Protocol):
    """The sums of one turn, a step or a round, which begin and end together."""

    def sum_all(self) -> None:
        """Return when this rank has all sums of the turn. Raises PeerLost.

        May be called again then; what the sums are made from has not changed.
        """

    def reset(self, undo: bool) -> None:
        """Drop sums that a loss has interrupted; see `dlio.exchange.sums.Sum.reset`."""

    def arrays(self, last: bool) -> Sequence[npt.NDArray[np.generic]]:
        """Return the memory of the sums of the turn that this rank has taken last, or of the one
        after it."""


@dataclass(frozen=True, slots=True)
class RoundReport(Report):
    """The turns that a rank has all sums of."""

    closed: int
    """Number of these turns."""
    contributors: tuple[int, ...]
    """Members whose values are in the sums of the last of them."""
    group: int
    """Number of the group of ranks that sum together, such as a node's."""


class RoundCommit(RecoveryPart[RoundReport]):
    """Counts the turns of which this rank has all sums, and gives sums to ranks that lack them.

    A turn is closed once any of the ranks that are left has all of its sums: it gives them to the
    others. Otherwise those that are left begin the turn's sums again.
    """

    def __init__(self, context: ExchangeContext, sums: RoundSums) -> None:
        self._context, self._sums = context, sums
        self.closed = self._taken = 0
        """Number of turns that this rank has all sums of, and of those that it has taken."""
        self.contributors: tuple[int, ...] = ()
        """Members whose values are in the sums of the last closed turn."""
        if context.recovery is not None:
            context.recovery.register(self)

    def close_turn(self) -> None:
        """Return when this rank has all sums of the next turn."""
        recovery = self._context.recovery
        if recovery is None:
            self._sums.sum_all()
        else:
            with blocked(any_thread=True):  # Autograd's thread of a GPU waits for the main one.
                self._over_losses(recovery)

    def take(self) -> None:
        """Note that the sums of the turn have been taken: the next one begins."""
        self._taken = self.closed

    def remove(self) -> None:
        """Take no part in later recoveries."""
        if self._context.recovery is not None:
            self._context.recovery.unregister(self)

    def _over_losses(self, recovery: Recovery) -> None:
        closed = self.closed + 1
        while self.closed < closed:
            try:
                self._sums.sum_all()
                self.closed, self.contributors = closed, recovery.membership.members
            except PeerLost:
                recovery.recover()

    def report(self) -> RoundReport:
        return RoundReport(self.closed, self.contributors, self._context.group)

    def adopt(self, report: RoundReport) -> None:
        self.closed = self._taken = report.closed
        self.contributors = report.contributors

    def reconcile(self, reports: Sequence[RoundReport], comm: Communicator) -> None:
        ours = [each for each in reports if each.group == self._context.group]
        closed = [each.closed for each in ours]
        newest = max(closed)
        # Sums under way belong to the turn after the last one that this rank has taken.
        self._sums.reset(undo=self._taken == newest)
        if min(closed) == newest:
            return
        # Given, not summed again: a rank that has the sums may have stepped by them, and then has
        # the values no more that they were made from.
        giver = closed.index(newest)
        for array in self._sums.arrays(last=self._taken == newest):
            self._context.comm.bcast(array, giver)
        if self.closed < newest:
            self.closed, self.contributors = newest, ours[giver].contributors
