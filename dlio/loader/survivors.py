"""The ranks that share a loader's batches once some have been lost."""

from dataclasses import dataclass, replace

from dlio.loader.passes import FormulaOrder
from dlio.plan.rank_shares import RankShares


@dataclass(frozen=True, slots=True)
class Survivors:
    """The ranks that share batches after others were lost."""

    members: tuple[int, ...]
    """Number of each when the data set was mounted."""
    me: int
    """Number of this rank, which is one of them."""
    shares: RankShares
    """Samples of each in a step."""

    @property
    def rank(self) -> int:
        """Place of this rank among them."""
        return self.members.index(self.me)


@dataclass(frozen=True, slots=True)
class InterruptedEpoch:
    """An epoch of an inexact mode in which ranks were lost: it continues as it was planned."""

    order: FormulaOrder
    """Its order as it was before this loss."""
    began: tuple[int, ...]
    """Number of each rank that began it."""

    def shared(self, survivors: Survivors) -> FormulaOrder:
        """Return its order as the survivors share it."""
        numbers = {member: rank for rank, member in enumerate(self.began)}
        return replace(
            self.order,
            rank=numbers.get(survivors.me, -1),
            left=tuple(numbers[each] for each in survivors.members if each in numbers),
            members=self.began,
        )
