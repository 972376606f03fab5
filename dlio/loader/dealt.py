"""The ranks that share a loader's batches once some have been lost."""

from dataclasses import dataclass, replace

from dlio.comm.data_ranks import place
from dlio.loader.options import LoaderOptions
from dlio.loader.passes import FormulaOrder
from dlio.plan.epoch import is_exact
from dlio.plan.layout import Layout
from dlio.plan.shares import Shares, checked_shares

__all__ = ["Dealt", "Torn", "formula_order"]


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


def formula_order(
    options: LoaderOptions, seed: int, samples: int, layout: Layout | None, dealt: Dealt | None
) -> FormulaOrder:
    """Return the order of a pass that is dlio's own, and this rank's part of it.

    Args:
        samples: number of samples in the data set.
        layout: of the data set's blocks; None where the order does not follow them.
        dealt: the ranks that are left; None if none was lost.

    Raises UsageError if chosen shares do not fit the ranks.
    """
    assert options.batch_size is not None
    (rank, ranks), shares = place(options.group, options.mesh), None
    global_batch = options.batch_size * ranks
    if dealt is not None:
        rank, ranks, shares = dealt.rank, len(dealt.members), dealt.shares
        global_batch = shares.global_batch
    if options.shares is not None:
        shares = checked_shares(options.shares, global_batch, ranks)
    return FormulaOrder(
        seed=seed,
        samples=samples,
        shuffled=bool(options.shuffle),
        batch_size=options.batch_size,
        drop_last=options.drop_last,
        rank=rank,
        ranks=ranks,
        source_order=options.source_order,
        layout=layout,
        shares=shares,
        exact=is_exact(options.mode),
    )


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
