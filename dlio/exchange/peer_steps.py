"""The steps of other ranks that have reached a rank, where ranks step without waiting for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.comm.survival.recovery import Recovery
from dlio.comm.survival.reports import Report


@dataclass(frozen=True, slots=True)
class PeerReport(Report):
    """The steps of other ranks that a rank has merged."""

    heard: tuple[int, ...]
    """The last step of each member of the job's beginning; see `PeerSteps.report`."""


class PeerSteps:
    """The last step of each member that this rank has taken in; nothing without a `recovery`.

    When a member is lost, its last step that any rank has taken in decides which of its samples
    count; see `Recovery.last_counted`. Others take in all of that with the rank's weights: so
    weights travel with the steps that are in them (`carried`, `take_in`).
    """

    def __init__(self, recovery: Recovery | None) -> None:
        self._recovery = recovery
        self._members = () if recovery is None else recovery.membership.members
        self._heard = dict.fromkeys(self._members, 0)
        self.begun = 0
        """Steps of the run before this exchange was made; notes do not count them."""

    @property
    def heard(self) -> dict[int, int]:
        """The last step of each member, from 1; 0 for none."""
        return dict(self._heard)

    def members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers that some of the present ranks had when the job began."""
        if self._recovery is None:
            return ()
        return tuple(self._recovery.membership.members[rank] for rank in ranks)

    def note(self, members: Sequence[int], step: int) -> None:
        """Note that this rank has taken in the steps of some members up to `step`, from 1."""
        for member in members:
            self._heard[member] = max(step, self._heard[member])

    def carried(self, made: int | None = None) -> npt.NDArray[np.int64]:
        """Return the steps that this rank's weights hold, shape (members,); with its own ones, if
        the number of those that it has `made` is given."""
        carried = np.array(self.report(), np.int64)
        if made is not None and self._recovery is not None:
            carried[self._members.index(self._recovery.membership.me)] = made
        return carried

    def take_in(self, carried: npt.NDArray[np.int64] | Sequence[int]) -> None:
        """Note that this rank has taken in weights that hold these steps; see `carried`."""
        for member, step in zip(self._members, np.asarray(carried).tolist(), strict=True):
            self.note([member], step)

    def report(self) -> tuple[int, ...]:
        """Return the last step of each member, for a `PeerReport`."""
        return tuple(self._heard.values())

    def reconcile(self, reports: Sequence[PeerReport]) -> None:
        """Decide by the reports of all survivors which steps of lost members count."""
        assert self._recovery is not None
        living = frozenset(self._recovery.membership.members)
        heard = [max(steps) for steps in zip(*(each.heard for each in reports), strict=True)]
        for member, step in zip(self._members, heard, strict=True):
            if member not in living:
                # Anew at each loss: if the only rank that had taken in a step is lost, too, then no
                # weights hold it any more, and its samples are requeued.
                self._recovery.last_counted[member] = step
