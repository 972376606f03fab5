"""Deals a script's batches to the ranks, and again when ranks are lost: each sample exactly once.

A batch that any rank has taken stays assigned as it was; the next one is assigned to the survivors.
The samples of lost ranks that are in no gradient join the batches that are left of the pass; where
none is left, they are a batch of their own.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import add

from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from dlio.comm import Communicator
from dlio.comm.survival.recovery import Recovery, RecoveryPart, recovery_of
from dlio.integrations.script.pass_use import PassUse
from dlio.loader.assignment.rank_groups import BatchReport, RankGroups
from dlio.plan.rank_shares import RankShares


@dataclass(slots=True, eq=False)
class _ScriptPass:
    """A pass over a script's loader."""

    use: PassUse
    left: deque[list[int]]
    """Batches that no rank has taken yet."""
    again: list[int] = field(default_factory=list)
    """Samples that come again."""
    over: bool = False


@dataclass(slots=True, eq=False)
class ScriptBatch:
    """A batch that the script got this rank's share of."""

    weight: float
    """Number of this rank's samples: the weight of its gradients."""
    of: _ScriptPass
    samples: list[int]
    shares: RankShares
    members: tuple[int, ...]
    """Number of each rank that it was dealt to when the job began."""
    place: range
    """Place of the samples that this rank computes on, in `samples`."""
    divided: bool = True
    """False if every rank got all of it, as it is not known yet whether the script trains on it."""
    used: bool = False
    """True once the script has computed on it."""
    rows: frozenset[int] = frozenset()
    """Numbers of rows of its lists of tensors, such as all boxes of its samples."""

    @property
    def widest(self) -> int:
        """The first rank of those with most samples."""
        counts = [len(self.part(rank)) for rank in range(len(self.shares.counts))]
        return counts.index(max(counts))

    def part(self, rank: int) -> list[int]:
        """Return the samples of one of its ranks."""
        part = self.shares.part(len(self.samples), rank)
        return self.samples[part.start : part.stop]


class ScriptAssigner(RecoveryPart[BatchReport]):
    """The batches of this rank in all passes of a script. Closed by its owner."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._recovery: Recovery | None = recovery_of(comm)
        self.groups = RankGroups(self._recovery)
        """Knows the ranks that share the next batch, and counts those that the script gets."""
        self._open: list[ScriptBatch] = []
        """Batches that the script has computed on, and whose gradients are not summed yet."""
        self.missed = 0
        """Samples of lost ranks that no pass could repeat, as it had ended."""
        self._fewest = 0
        self._watch = register_module_buffer_registration_hook(self._registered)
        if self._recovery is not None:
            self._recovery.register(self)

    def deals(
        self, batches: list[list[int]], shares: RankShares, use: PassUse
    ) -> "Iterator[ScriptAssignment]":
        """Yield the runs of a pass over batches that are dealt to the same ranks: one if none is
        lost. Shares of the ranks become even after a loss. Until `use` tells that the pass trains,
        every rank gets whole batches.
        """
        largest = max(map(len, batches), default=1)
        shares = replace(shares, fewest=self._fewest)
        whole = _ScriptPass(use, deque(batches))
        while whole.left or whole.again:
            again, whole.again = whole.again, []
            if not whole.left:
                whole.left.extend(again[k : k + largest] for k in range(0, len(again), largest))
            elif again:
                # The number of batches stays: a schedule of learning rates may count on it.
                cuts = [len(again) * k // len(whole.left) for k in range(len(whole.left) + 1)]
                more = (again[first:last] for first, last in pairwise(cuts))
                whole.left = deque(map(add, whole.left, more))
            members, rank = self.groups.members, self._comm.rank
            if self._recovery is not None:
                rank = members.index(self.groups.me)
                if len(shares.counts) != len(members):
                    shares = RankShares((1,) * len(members), self._fewest)
            yield ScriptAssignment(self, whole, shares, members, rank, largest)
        whole.over = True

    def use(self, batch: ScriptBatch) -> None:
        """Note that the script computes on a batch."""
        if not batch.used and batch.divided and self._recovery is not None:
            batch.used = True
            self._open.append(batch)

    def report(self) -> BatchReport:
        return self.groups.report()

    def reconcile(self, reports: Sequence[BatchReport], comm: Communicator) -> None:
        self.groups.reconcile(reports)

    def commit_step(self, contributors: Sequence[int]) -> None:
        for batch in self._open:
            for rank, member in enumerate(batch.members):
                if member not in contributors:
                    lost = batch.part(rank)
                    batch.of.again += lost
                    self.missed += len(lost) if batch.of.over else 0
                    if self._recovery is not None:
                        self._recovery.count_requeued(member, len(lost))
        self._open = []

    def _registered(self, module: nn.Module, name: str, buffer: object) -> None:
        # Of a single sample it has no statistics, and raises: with fewer than two for each rank the
        # first ones alone share a batch.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            self._fewest = 2

    def close(self) -> None:
        """Take no part in later recoveries."""
        self._watch.remove()
        if self._recovery is not None:
            self._recovery.unregister(self)


class ScriptAssignment:
    """Batches that are dealt to the same ranks; until one of these is lost."""

    def __init__(
        self,
        assigner: ScriptAssigner,
        whole: _ScriptPass,
        shares: RankShares,
        members: tuple[int, ...],
        rank: int,
        largest: int,
    ) -> None:
        self._assigner, self._whole, self._members = assigner, whole, members
        self.divided = whole.use.trains
        """False if every rank gets all of each batch."""
        self._places: deque[range] = deque()
        self._shares: deque[RankShares] = deque()
        """Shares of each batch."""
        self.mine: list[list[int]] = []
        """This rank's samples of each batch; some of others where it has none."""
        self.weights: list[float] = []
        """Number of this rank's samples in each batch: the weight of its gradients."""
        first: Sequence[RankShares] = ()
        if self.divided and not whole.use.plans.begun:
            whole.use.plans.begun = True
            first = _uneven(shares, [len(batch) for batch in islice(whole.left, 2)])
        # A last batch is not dealt as single samples where others are not: of one sample,
        # `squeeze()` takes the dimension away.
        last = replace(shares, fewest=2) if largest >= 2 * len(shares.counts) else shares
        for number, batch in enumerate(whole.left):
            of_ranks = first[number] if number < len(first) else shares
            of_ranks = last if len(batch) < largest else of_ranks
            self._shares.append(of_ranks)
            part = of_ranks.part(len(batch), rank) if self.divided else range(len(batch))
            self.weights.append(float(len(part)) if self.divided else 1.0)
            # A rank without a sample computes on some of weight 0.
            place = part if len(part) else range(len(batch))[: max(1, of_ranks.fewest)]
            self._places.append(place)
            self.mine.append(batch[place.start : place.stop])

    def take(self, weight: float) -> ScriptBatch:
        """Note that the script gets this rank's share of the next batch."""
        self._assigner.groups.taken += 1
        batch = self._whole.left.popleft()
        place = self._places.popleft()
        shares = self._shares.popleft()
        return ScriptBatch(weight, self._whole, batch, shares, self._members, place, self.divided)

    def is_over(self) -> bool:
        """True if the next batch is to be dealt to other ranks."""
        return (
            self._assigner.groups.members != self._members or self._whole.use.trains != self.divided
        )


def _uneven(shares: RankShares, counts: Sequence[int]) -> list[RankShares]:
    """Return shares of the first batches, of `counts` samples, that differ among the ranks: a
    number that equals the size of each rank's part is then known for a constant of the script, or
    not. The second batch balances the first one, so that the sums of all parts are even. Parts of
    even sizes stay even: scripts that mix the samples of a batch in pairs need them so."""
    parts = [len(shares.part(counts[0], rank)) for rank in range(len(shares.counts))]
    if len(parts) == 1 or parts[0] != parts[-1] or parts[0] <= max(1, shares.fewest):
        return []
    first, inner, last = parts[0], parts[1:-1], parts[-1]
    more = 2 if last % 2 == 0 and last > max(2, shares.fewest + 1) else 1
    uneven = [RankShares((first + more, *inner, last - more), shares.fewest)]
    if counts[1:] == counts[:1]:
        uneven.append(RankShares((first - more, *inner, last + more), shares.fewest))
    return uneven
