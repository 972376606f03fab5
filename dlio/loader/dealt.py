"""The ranks that share a loader's batches once some have been lost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlio.loader.passes import FormulaOrder
from dlio.plan.shares import Shares, checked_shares

__all__ = ["Dealt", "Torn", "shared_by"]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The ranks that are left."""

    members: tuple[int, ...]
    """Number of each when the data set was mounted."""
    me: int
    """Number of this rank, which is one of them."""
    shares: Shares
    """Samples of each in a step."""

    @property
    def rank(self) -> int:
        """Place of this rank among them."""
        return self.members.index(self.me)


def shared_by(
    dealt: Dealt | None, place: tuple[int, int], batch_size: int, chosen: Sequence[int] | None
) -> tuple[int, int, Shares | None]:
    """Return (this rank's number, the number of ranks, their shares; None if these are even).

    Args:
        dealt: the ranks that are left; None if none was lost.
        place: (rank, ranks) otherwise.
        chosen: samples of each rank in a step, if they are given.

    Raises UsageError if these do not fit the ranks.
    """
    (rank, ranks), shares = place, None
    global_batch = batch_size * ranks
    if dealt is not None:
        rank, ranks, shares = dealt.rank, len(dealt.members), dealt.shares
        global_batch = shares.global_batch
    if chosen is not None:
        shares = checked_shares(chosen, global_batch, ranks)
    return rank, ranks, shares


@dataclass(frozen=True, slots=True)
class Torn:
    """An epoch of an inexact mode in which ranks were lost: it goes on as it was planned."""

    order: FormulaOrder
    """Its order as it was before this loss."""
    begun: tuple[int, ...]
    """Number of each rank that began it."""

    def shared(self, dealt: Dealt) -> FormulaOrder:
        """Return its order as the ranks share it that are left."""
        numbers = {member: rank for rank, member in enumerate(self.begun)}
        return replace(
            self.order,
            rank=numbers.get(dealt.me, -1),
            left=tuple(numbers[each] for each in dealt.members if each in numbers),
            members=self.begun,
        )
