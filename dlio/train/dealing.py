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


@dataclass(frozen=True, slots=True)
class _Switch:
    """The place from which on batches are dealt to the ranks that were left after a loss.

    Ranks may be at different places when one is lost. All go on as before up to the furthest.
    """

    loss: int
    """Number of the recovery."""
    taken: int
    """Batches that a rank takes before, since the run began."""
    steps: int
    """Optimizer steps that it makes before: lost ranks counted up to there."""
    members: tuple[int, ...]


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
        self._taken = self._steps = 0
        """Batches that this rank has taken since the run began, and optimizer steps it has made."""
        self.members = () if recovery is None else recovery.membership.members
        """Numbers of the ranks that share batches now, when the job began."""
        self._switches: list[_Switch] = []
        """Switches ahead, in their order."""
        self.position = 0
        """Position of the epoch's order after the batch that was yielded last."""
        self._samples = self._end = self._step = 0
        self._begun = False
        """True once a batch of the epoch has been dealt."""
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

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's batches."""
        self._epoch, self._step, self._begun, self._final = epoch, 0, False, None
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
            self._switches = []
            self._deal_to(self._recovery.membership.members)

    def batches(self, position: int, samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of an epoch from `position` on; in a later call, those that are left.

        Args:
            samples: number of the epoch's samples.
        """
        if self._begun:
            if not self._more():
                return
        else:
            self.position, self._samples, self._begun = position, samples, True
            self._deal_to(self._pass_switches())
        while True:
            iterator = iter(self._loader)
            deal = self._deal()
            self._end = samples + len(self.again)
            for number, (images, labels) in enumerate(iterator):
                self._taken += 1
                self.position = min(self.position + self._global_batch, self._end)
                if deal is not None:
                    self._open.append(_Batch(deal, number, self._step))
                yield images, labels
                self._step += 1
                if self._switches and self._is_passed(self._switches[0]):
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

    def close_step(self, counted: Sequence[int] | None) -> None:
        """Note that a step of the optimizer has used the batches taken since the last one.

        Args:
            counted: members whose samples are in it; None if a later call settles it.
        """
        if counted is None or not self._open:
            return
        self._steps += 1
        self._closed += [(batch, self._steps, tuple(counted)) for batch in self._open]
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
        return {"taken": [self._taken]}

    def settle(self, reports: Sequence[Report], comm: Communicator) -> None:
        assert self._recovery is not None
        switch = _Switch(
            len(self._recovery.losses),
            max(each["taken"][0] for each in reports),
            max(self._recovery.last_counted.values(), default=0),
            self._recovery.membership.members,
        )
        # A recovery that another loss interrupts settles twice.
        self._switches = [each for each in self._switches if each.loss != switch.loss]
        self._switches.append(switch)

    def close(self) -> None:
        """Take no part in later recoveries."""
        if self._recovery is not None:
            self._recovery.remove(self._part)

    def _deal(self) -> _Deal | None:
        if self._recovery is None:
            return None
        assert self._loader.plan is not None
        return _Deal(self._loader.plan, self.members)

    def _deal_to(self, members: tuple[int, ...]) -> None:
        if members != self.members:
            self.members = members
            for loader in self._loaders:
                loader.regroup(members, self._global_batch)

    def _is_passed(self, switch: _Switch) -> bool:
        return switch.taken <= self._taken and switch.steps <= self._steps

    def _pass_switches(self) -> tuple[int, ...]:
        """Drop switches that lie behind; returns the members that share batches now."""
        members = self.members
        while self._switches and self._is_passed(self._switches[0]):
            members = self._switches.pop(0).members
        return members

    def _more(self) -> bool:
        """Deal the rest of the epoch to those that share it now; False if nothing is left."""
        if self._recovery is None:
            return False
        members = self._pass_switches()
        for batch, step, counted in self._closed:
            for member in batch.deal.members:
                key = (batch.step, member)
                if member in members or key in self._comes_again:
                    continue
                if not self._has_counted(member, step, counted):
                    self._comes_again.add(key)
                    self.again += batch.deal.samples(batch.number, member)
        more = self.position < self._samples + len(self.again)
        if more:
            self._earlier.append(self._loader.stats())
        self._deal_to(members)
        if more:
            self._loader.redeal(self.position, self.again)
        return more

    def _has_counted(self, member: int, step: int, counted: tuple[int, ...]) -> bool:
        """True if a lost member's samples of an optimizer step are in the model."""
        assert self._recovery is not None
        last = self._recovery.last_counted if self._final is None else self._final
        return step <= last[member] if member in last else member in counted
