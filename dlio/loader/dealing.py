"""Deals an epoch's batches to the ranks, and again when ranks are lost: each sample exactly once.

A batch that any rank has taken stays dealt as it was; the next one is dealt to those that are left,
by the same formula. What lost ranks had been dealt, and did not bring into a step, comes again at
the end of the epoch.

The trainer deals for its loaders; a loader in a training loop of the user's deals for itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from dlio.comm import Communicator
from dlio.comm.board import computing, end_step
from dlio.comm.recovery import Recovery, Report
from dlio.loader.contract import BatchData
from dlio.loader.feed import LoaderIterator
from dlio.loader.groups import Groups
from dlio.loader.passes import PlannedPass
from dlio.loader.stats import PassStats, joined
from dlio.plan.epoch import EpochPlan, plan_epoch

__all__ = ["Dealing", "DealtIterator"]


class _Loader(Protocol):
    """A loader whose passes are dealt."""

    @property
    def plan(self) -> EpochPlan | None:
        """Plan of the pass that began last; None if the engine needs none."""

    @property
    def planned(self) -> PlannedPass:
        """The pass that began last."""

    def begin(self) -> LoaderIterator:
        """Begin a pass."""

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        """Deal later passes to the ranks that are left."""

    def redeal(self, position: int, again: Sequence[int]) -> None:
        """Have the next pass go on with the epoch at a position."""

    def stats(self) -> PassStats:
        """Return the counts of the pass that began last."""


@dataclass(frozen=True, slots=True, eq=False)
class _Deal:
    """A run of batches that is dealt to the same ranks."""

    batches: PlannedPass
    plan: EpochPlan | None
    """None if positions of the order alone decide who gets which sample."""
    members: tuple[int, ...]
    """Number of each of its ranks when the job began."""

    def samples(self, batch: int, member: int) -> list[int]:
        """Return a member's samples of one of its batches."""
        rank = self.members.index(member)
        if self.plan is None:
            return self.batches.part(batch, rank)
        plan = replace(self.plan, rank=rank)
        dealt: list[int] = plan_epoch(plan).window(range(batch, batch + 1)).samples.tolist()
        return dealt


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """A batch that was taken."""

    deal: _Deal
    number: int
    """Within its deal."""
    step: int
    """Within its epoch."""


class Dealing:
    """The batches of this rank. Closed by its owner.

    Args:
        loaders: of the training data, and others; their orders are dlio's own.
        recovery: None if the job ends with any rank.
        global_batch: samples of a batch over all ranks.
        keeps_steps: after a loss, have larger batches and no more of them than before; otherwise
            the global batch stays as it is.
    """

    def __init__(
        self,
        loaders: Sequence[_Loader],
        recovery: Recovery | None,
        global_batch: int,
        keeps_steps: bool = False,
    ) -> None:
        self._loader, self._loaders = loaders[0], loaders
        self._recovery, self.usual_batch = recovery, global_batch
        self._keeps_steps = keeps_steps
        self._global_batch = global_batch
        self._epoch = 0
        self._groups = Groups(recovery)
        self._dealt_to = (self._groups.members, global_batch)
        """Members and global batch of the loaders' passes."""
        self.position = 0
        """Position of the epoch's order after the batch that was yielded last."""
        self._samples = self._end = self._step = 0
        self._begun: PlannedPass | None = None
        """The pass that the epoch has begun with."""
        self.again: list[int] = []
        """Samples of this epoch that come again at its end."""
        self._comes_again: set[tuple[int, int]] = set()
        """(step, member) of the batches that these are of."""
        self._open: list[_Batch] = []
        """Batches whose step is under way, or not settled yet."""
        self._closed: list[tuple[_Batch, int, tuple[int, ...]]] = []
        """Batches of this epoch, the optimizer step of each, and the members that counted."""
        self._final: dict[int, int] | None = None
        """Last steps of lost members when all had trained the epoch; None until then."""
        self._earlier: list[PassStats] = []
        """Counts of this epoch before ranks were lost."""
        if recovery is not None:
            self._part = recovery.add("data", self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share batches now: their numbers when the job began."""
        return self._dealt_to[0]

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's batches."""
        self._epoch, self._step, self._begun, self._final = epoch, 0, None, None
        self.again, self._open, self._closed, self._earlier = [], [], [], []
        self._comes_again = set()

    def end_epoch(self) -> None:
        """Note that all ranks have trained the epoch: nothing of it comes again."""
        if self._recovery is not None:
            self._final = dict(self._recovery.last_counted)

    def regroup(self) -> None:
        """Have later passes of the loaders dealt to the ranks that are left.

        All ranks must have taken the same batches.
        """
        if self._recovery is not None:
            self._groups.meet()
            self._deal_to(self._groups.members, self.usual_batch)

    def batches(self) -> Iterator[BatchData]:
        """Yield the batches of an epoch, from the loader's position on; in a later call, those that
        are left."""
        end_step()
        if self._begun is None:
            self._deal_to(self._groups.members, self.usual_batch)
        elif not self._more():
            return
        while True:
            iterator = self._loader.begin()
            planned = self._loader.planned
            deal = _Deal(planned, self._loader.plan, self.members)
            self.position, self._end = planned.cursor.position, planned.samples
            if self._begun is None:
                self._begun, self._samples = planned, planned.samples
            for number, data in enumerate(iterator):
                self._groups.taken += 1
                self.position = min(self.position + self._global_batch, self._end)
                if self._recovery is not None and torch.is_grad_enabled():
                    self._open.append(_Batch(deal, number, self._step))
                    with computing():
                        yield data
                else:
                    yield data
                self._step += 1
                if self._groups.members != deal.members:
                    break
            if not self._more():
                return

    def left(self) -> int:
        """Return the number of batches after this one that are dealt to the same ranks.

        It is the same on all ranks at the same batch, whatever each knows of later losses.
        """
        return -(-(self._end - self.position) // self._global_batch)

    def stats(self) -> PassStats:
        """Return this rank's counts of the epoch."""
        return joined([*self._earlier, self._loader.stats()])

    def count(self, counted: Sequence[int]) -> None:
        if not self._open:
            return
        self._groups.steps += 1
        self._closed += [(batch, self._groups.steps, tuple(counted)) for batch in self._open]
        self._open = []

    def of_lost(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, member, samples) of lost ranks for the steps that they counted in."""
        if self._recovery is None:
            return
        living = self._recovery.membership.members
        for batch, step, counted in self._closed:
            for member in batch.deal.members:
                if member not in living and self._has_counted(member, step, counted):
                    yield self._epoch, batch.step, member, batch.deal.samples(batch.number, member)

    def tell(self) -> Report:
        return self._groups.tell()

    def settle(self, reports: Sequence[Report], comm: Communicator) -> None:
        self._groups.settle(reports)

    def close(self) -> None:
        """Take no part in later recoveries."""
        if self._recovery is not None:
            self._recovery.remove(self._part)

    def _deal_to(self, members: tuple[int, ...], global_batch: int) -> None:
        self._global_batch = global_batch
        if (members, global_batch) != self._dealt_to:
            self._dealt_to = (members, global_batch)
            for loader in self._loaders:
                loader.regroup(members, self._groups.me, global_batch)

    def _more(self) -> bool:
        """Deal the rest of the epoch to those that share it now; False if nothing is left."""
        if self._recovery is None or self._begun is None:
            return False
        members = self._groups.members
        for batch, step, counted in self._closed:
            for member in batch.deal.members:
                key = (batch.step, member)
                if member in members or key in self._comes_again:
                    continue
                if not self._has_counted(member, step, counted):
                    samples = batch.deal.samples(batch.number, member)
                    self._comes_again.add(key)
                    self.again += samples
                    self._recovery.count_again(member, len(samples))
        rest = self._samples + len(self.again) - self.position
        if rest < (self.usual_batch if self._begun.formula.drop_last else 1):
            self._deal_to(members, self.usual_batch)
            return False
        self._earlier.append(self._loader.stats())
        steps = -(-(self._samples - self.position) // self.usual_batch)
        larger = self._keeps_steps and steps > 0
        self._deal_to(members, -(-rest // steps) if larger else self.usual_batch)
        self._loader.redeal(self.position, self.again)
        return True

    def _has_counted(self, member: int, step: int, counted: tuple[int, ...]) -> bool:
        """True if a lost member's samples of an optimizer step are in the model."""
        assert self._recovery is not None
        last = self._recovery.last_counted if self._final is None else self._final
        return step <= last[member] if member in last else member in counted


class DealtIterator:
    """The iterator of one pass that goes on when ranks are lost.

    Args:
        dealing: of its loader.
        length: batches of the pass if no rank is lost.
    """

    def __init__(self, dealing: Dealing, length: int) -> None:
        dealing.begin_epoch(0)
        self._batches = dealing.batches()
        self._length = length

    def __len__(self) -> int:
        """Batches of the pass if no rank is lost."""
        return self._length

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchData:
        return next(self._batches)
