"""Deals an epoch's batches to the ranks, and again when ranks are lost: each sample exactly once.

A batch that any rank has taken stays dealt as it was; the next one is dealt to those that are left,
by the same formula. What lost ranks had been dealt, and did not bring into a step, comes again at
the end of the epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dlio.comm import Communicator
from dlio.loader.dataloader import DataLoader
from dlio.loader.stats import PassStats, joined
from dlio.plan.epoch import EpochPlan, plan_epoch
from dlio.train.recovery import Recovery, Report

__all__ = ["Dealing"]


@dataclass(frozen=True, slots=True, eq=False)
class _Deal:
    """A run of batches that is dealt to the same ranks."""

    plan: EpochPlan
    members: tuple[int, ...]
    """Number of each of its ranks when the job began."""

    def samples(self, batch: int, member: int) -> list[int]:
        """Return a member's samples of one of its batches."""
        plan = replace(self.plan, rank=self.members.index(member))
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
        global_batch: samples of a batch over all ranks; it stays as it is.
    """

    def __init__(
        self, loaders: Sequence[DataLoader], recovery: Recovery | None, global_batch: int
    ) -> None:
        self._loader, self._loaders = loaders[0], loaders
        self._recovery, self._global_batch = recovery, global_batch
        self._epoch = 0
        self._taken = 0
        """Batches that this rank has taken since the run began."""
        self._switch: int | None = None
        """Batch from which on the living ranks share."""
        self._generation = 0
        self.position = 0
        """Position of the epoch's order after the batch that was yielded last."""
        self._samples = self._end = 0
        self.again: list[int] = []
        """Samples of this epoch that come again at its end."""
        self._open: list[_Batch] = []
        """Batches of the step that is under way."""
        self._closed: list[tuple[_Batch, tuple[int, ...]]] = []
        """Batches of this epoch, and the members that counted."""
        self._earlier: list[PassStats] = []
        """Counts of this epoch before ranks were lost."""
        if recovery is not None:
            self._part = recovery.add("data", self)

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's batches."""
        self._epoch = epoch
        self.again, self._open, self._closed, self._earlier = [], [], [], []
        self.regroup()

    def regroup(self) -> None:
        """Have later passes of the loaders dealt to the ranks that are left."""
        self._switch = None
        if self._recovery is not None:
            membership = self._recovery.membership
            if membership.number != self._generation:
                self._generation = membership.number
                for loader in self._loaders:
                    loader.regroup(membership.members, self._global_batch)

    def batches(self, position: int, samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of an epoch from `position` on.

        Args:
            samples: number of the epoch's samples.
        """
        self.position, self._samples = position, samples
        step = 0
        while True:
            iterator = iter(self._loader)
            deal = self._deal()
            self._end = samples + len(self.again)
            for number, (images, labels) in enumerate(iterator):
                self._taken += 1
                self.position = min(self.position + self._global_batch, self._end)
                if deal is not None:
                    self._open.append(_Batch(deal, number, step))
                yield images, labels
                step += 1
                if self._switch is not None and self._taken >= self._switch:
                    break
            if self._recovery is None or self.position >= samples + len(self.again):
                return
            self._earlier.append(self._loader.stats())
            self.regroup()
            self._loader.redeal(self.position, self.again)

    def left(self) -> int:
        """Return the number of batches after this one, as far as is known."""
        batch, later = self._global_batch, self._samples + len(self.again)
        return -(-(self._end - self.position) // batch) - (-(later - self._end) // batch)

    def stats(self) -> PassStats:
        """Return this rank's counts of the epoch."""
        return joined([*self._earlier, self._loader.stats()])

    def close_step(self, counted: Sequence[int]) -> None:
        """Note that a step of the optimizer has used the batches taken since the last one.

        Args:
            counted: members whose samples are in it.
        """
        for batch in self._open:
            for member in batch.deal.members:
                if member not in counted:
                    samples = batch.deal.samples(batch.number, member)
                    self.again += samples
                    if self._recovery is not None:
                        self._recovery.count_again(member, len(samples))
            self._closed.append((batch, tuple(counted)))
        self._open = []

    def of_lost(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, member, samples) of lost ranks for the steps that they counted in."""
        if self._recovery is None:
            return
        living = self._recovery.membership.members
        for batch, counted in self._closed:
            for member in batch.deal.members:
                if member in counted and member not in living:
                    yield self._epoch, batch.step, member, batch.deal.samples(batch.number, member)

    def tell(self) -> Report:
        return {"taken": [self._taken]}

    def settle(self, reports: Sequence[Report], comm: Communicator) -> None:
        self._switch = max(each["taken"][0] for each in reports)

    def close(self) -> None:
        """Take no part in later recoveries."""
        if self._recovery is not None:
            self._recovery.remove(self._part)

    def _deal(self) -> _Deal | None:
        if self._recovery is None:
            return None
        assert self._loader.plan is not None
        return _Deal(self._loader.plan, self._recovery.membership.members)
