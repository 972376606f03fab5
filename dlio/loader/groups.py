"""The ranks that share each batch of a job whose ranks may be lost.

A batch that any rank has taken stays shared as it was; the next one is shared by those that are
left. Batches are counted since the job began, over all passes; all ranks take them in one order.
"""

from collections.abc import Sequence

from dlio.comm.recovery import Recovery, Report

__all__ = ["Groups"]


class Groups:
    """The members that share each batch.

    Args:
        recovery: None if the job ends with any rank.
    """

    def __init__(self, recovery: Recovery | None) -> None:
        self._recovery = recovery
        self.taken = 0
        """Batches that this rank has taken."""
        everyone = () if recovery is None else recovery.membership.members
        self._groups = [(0, everyone)]
        """(first batch, members that share from it on), ascending."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share the next batch: their numbers when the job began, or nothing if
        the job ends with any rank."""
        return next(members for first, members in reversed(self._groups) if first <= self.taken)

    @property
    def me(self) -> int:
        """Number of this rank when the job began; 0 if the job ends with any rank."""
        return 0 if self._recovery is None else self._recovery.membership.me

    def tell(self) -> Report:
        """Return how far this rank is."""
        return {"taken": [self.taken]}

    def settle(self, reports: Sequence[Report]) -> None:
        """Have the ranks that are left share what none of them has taken.

        Args:
            reports: of each rank that is left.
        """
        assert self._recovery is not None
        switch = max(each["taken"][0] for each in reports)
        self._groups = [each for each in self._groups if each[0] < switch]
        self._groups.append((switch, self._recovery.membership.members))
