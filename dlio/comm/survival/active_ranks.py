"""Which ranks train in the next generation: a decision that all ranks take alike.

Some ranks of a job are active: they train. Others are spares, which wait to be called. Ranks are
lost at any moment; spares are called, and ranks leave on purpose, when all that are active meet
between two batches.
"""

from collections.abc import Sequence
from typing import NamedTuple


class RankRequest(NamedTuple):
    """A number of active ranks that the user asks for; the newest request holds."""

    request: int
    """Number of the request, from 0 for the job's beginning."""
    ranks: int


class MembershipReport(NamedTuple):
    """The facts that a rank reports about itself when a generation ends."""

    member: int
    """Number of the rank when the job began."""
    active: bool
    """False for a spare."""
    leaves: bool
    """True if it is to leave."""
    meets: bool
    """True if it has come between two batches, with all others that are active."""
    wanted: RankRequest


def next_members(standings: Sequence[MembershipReport]) -> tuple[int, ...]:
    """Return the members that are active from now on, ascending, from the standings of all living
    ranks.
    """
    active = [each for each in standings if each.active]
    if not any(each.meets for each in active):
        return tuple(sorted(each.member for each in active))
    wanted = max(each.wanted for each in standings).ranks
    staying = sorted(each.member for each in active if not each.leaves)
    spares = sorted(each.member for each in standings if not each.active and not each.leaves)
    if spares and wanted and not staying:
        # Somebody has to have the model when the others have left: these leave at the next meeting.
        staying = sorted(each.member for each in active)
        return tuple(sorted((*staying, *spares[:wanted])))
    # The lowest numbers stay, so that all ranks choose alike without a message.
    missing = max(0, wanted - len(staying))
    return tuple(sorted((*staying[:wanted], *spares[:missing])))


def leaving_members(standings: Sequence[MembershipReport], members: Sequence[int]) -> set[int]:
    """Return the ranks that end now, not among the `members` that are active from now on; at the
    job's beginning active ones become spares instead.
    """
    begins = max(each.wanted for each in standings).request == 0
    ending = (each for each in standings if each.leaves or (each.active and not begins))
    return {each.member for each in ending} - set(members)


def is_meeting_due(standings: Sequence[MembershipReport]) -> bool:
    """True if others were active if all active ranks met between two batches."""
    then = next_members([each._replace(meets=True) for each in standings])
    return then != tuple(sorted(each.member for each in standings if each.active))
