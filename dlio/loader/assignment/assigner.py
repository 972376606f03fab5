"""Deals an epoch's batches to the ranks, and again when ranks are lost: each sample exactly once.

A batch that any rank has taken stays dealt as it was; the next one is dealt to those that are left,
by the same formula. What lost ranks had been dealt, and did not bring into a step, comes again at
the end of the epoch.

The trainer deals for its loaders; a loader in a training loop of the user's deals for itself.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeAlias

import torch

from dlio.comm import Communicator
from dlio.comm.board import computing, end_step
from dlio.comm.survival.recovery import Recovery, RecoveryPart
from dlio.loader.assignment.history import (
    AssignmentSpan,
    CommittedBatch,
    IssuedBatch,
    described,
    recalled,
)
from dlio.loader.assignment.rank_groups import BatchReport, RankGroups
from dlio.loader.batch_stream import LoaderIterator
from dlio.loader.contract import BatchData, State
from dlio.loader.dataset import Dataset
from dlio.loader.passes import FormulaOrder, PlannedPass
from dlio.loader.stats import PassStats, joined
from dlio.plan.epoch import EpochPlan
from dlio.plan.sample_mask import SampleMask

EpochWire: TypeAlias = dict[str, Any]
"""Where a rank is in an epoch, as JSON types; see `BatchAssigner.tell_epoch`."""


class _AssignedLoader(Protocol):
    """A loader whose passes are dealt."""

    @property
    def plan(self) -> EpochPlan | None:
        """Plan of the pass that began last; None if the engine needs none."""

    @property
    def planned(self) -> PlannedPass:
        """The pass that began last."""

    @property
    def formula(self) -> FormulaOrder:
        """The order of the next pass."""

    @property
    def mask(self) -> tuple[int, SampleMask] | None:
        """An epoch, and the samples that it uses; None for all."""

    @property
    def data(self) -> Dataset:
        """The data set."""

    mode: str

    def prepare(self, generation: int | None = None) -> int:
        """Open the tiers; returns the number of passes so far."""

    def begin(self) -> LoaderIterator:
        """Begin a pass."""

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        """Deal later passes to the ranks that are left."""

    def redeal(self, position: int, again: Sequence[int], begun: Sequence[int]) -> None:
        """Have the next pass go on with the epoch at a position."""

    def state_dict(self) -> State:
        """Return the loader's place."""

    def stats(self) -> PassStats:
        """Return the counts of the pass that began last."""


class BatchAssigner(RecoveryPart[BatchReport]):
    """The batches of this rank. Closed by its owner.

    Args:
        loaders: of the training data, and others; their orders are dlio's own.
        recovery: None if the job ends with any rank.
        global_batch: samples of a batch over all ranks.
        keeps_steps: after a loss, have larger batches and no more of them than before; otherwise
            the global batch stays as it is.
        per_rank: samples of a batch on each rank: the global batch follows the number of ranks;
            None to keep it.
        updates: returns the number of optimizer steps so far, for `trail`.
    """

    def __init__(
        self,
        loaders: Sequence[_AssignedLoader],
        recovery: Recovery | None,
        global_batch: int,
        keeps_steps: bool = False,
        per_rank: int | None = None,
        updates: Callable[[], int] = int,
    ) -> None:
        self._loader, self._loaders = loaders[0], loaders
        self._recovery, self.usual_batch = recovery, global_batch
        self._keeps_steps, self._per_rank, self._updates = keeps_steps, per_rank, updates
        self._global_batch = global_batch
        self._epoch = 0
        self._groups = RankGroups(recovery)
        self._dealt_to = (self._groups.members, global_batch)
        """Members and global batch of the loaders' passes."""
        self.position = 0
        """Position of the epoch's order after the batch that was yielded last."""
        self.step = 0
        """Number of the batch that was yielded last, within its epoch."""
        self.earlier = 0
        """Batches of the next epoch that were taken before it was resumed. Samples that come again
        make them more than its position tells."""
        self._samples = self._end = 0
        self._has_begun = False
        """True once a batch of the epoch was dealt, to this rank or before it joined."""
        self._begun_with = global_batch
        """Samples of a batch of the pass that the epoch has begun with."""
        self._is_exact, self._drops_last = True, False
        """Facts of its order."""
        self._begun_by: tuple[int, ...] = ()
        """The ranks that shared it."""
        self.again: list[int] = []
        """Samples of this epoch that come again at its end."""
        self._comes_again: set[tuple[int, int]] = set()
        """(step, member) of the batches that these are of."""
        self._open: list[IssuedBatch] = []
        """Batches whose step is under way, or not settled yet."""
        self._closed: list[CommittedBatch] = []
        """Batches of this epoch whose step is settled."""
        self._counted: tuple[Sequence[int], frozenset[int]] = ((), frozenset())
        """The members that counted last, and the set of them: it is the same in most steps."""
        self._final: dict[int, int] | None = None
        """Last steps of lost members when all had trained the epoch; None until then."""
        self._earlier: list[PassStats] = []
        """Counts of this epoch before ranks were lost."""
        self._joins = self._joined = False
        """True on a rank that joins until it begins an epoch; until it begins a pass of it."""
        self.keeps_trail = recovery is not None
        """True to remember which batches were taken, also where the job ends with any rank."""
        if recovery is not None:
            recovery.register(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share batches now: their numbers when the job began."""
        return self._dealt_to[0]

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's batches."""
        if self._joins:
            self._joins = False  # `follow_epoch` has set it all.
            return
        self._epoch, self.step, self._has_begun, self._final = epoch, 0, False, None
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
            self._deal_to(self._groups.members)

    def batches(self) -> Iterator[BatchData]:
        """Yield the batches of an epoch, from the loader's position on; in a later call, those that
        are left.

        Raises RankLeft on a rank that leaves.
        """
        end_step()
        self._groups.evaluates = not torch.is_grad_enabled()
        if self._has_begun:
            if not self._more():
                return
        else:
            self._meet()
            self._deal_to(self._groups.members)
        while True:
            iterator = self._loader.begin()
            planned = self._loader.planned
            deal = AssignmentSpan(planned, self._loader.plan, self.members)
            self.position, self._end = planned.cursor.position, planned.samples
            if not self._has_begun:
                self._has_begun, self._begun_with = True, planned.global_batch
                self._begun_by = deal.members
                self._is_exact = planned.formula.exact
                self._drops_last = planned.formula.drop_last
                self.again, self._samples = list(planned.requeued), planned.whole
                self.step = max(self.position // self._global_batch, self.earlier)
                self.earlier = 0
            for number, data in enumerate(iterator):
                self._groups.taken += 1
                self.position = min(self.position + self._global_batch, self._end)
                if self.keeps_trail and torch.is_grad_enabled():
                    self._open.append(IssuedBatch(deal, number, self.step, self._updates()))
                    with computing():
                        yield data
                else:
                    yield data
                self.step += 1
                if self._is_asked():
                    assert self._recovery is not None
                    self._recovery.recover()
                if self._groups.members != deal.members or self._groups.meets:
                    break
            if not self._more():
                return

    def _is_asked(self) -> bool:
        """True if ranks are to join or leave, and all have to come to one place for it."""
        elastic = None if self._recovery is None else self._recovery.elastic
        return elastic is not None and elastic.asked

    def _meet(self) -> None:
        if self._recovery is not None:
            self._recovery.rendezvous(lambda: self._groups.meets)

    def state(self) -> State:
        """Return the loader's state after the batch that was yielded last, whose step is over.

        What ranks were dealt that are lost by now comes again in it.
        """
        if self._recovery is None or not self._has_begun or self._joined:
            return self._loader.state_dict()
        if self._final is not None:
            return self._loader.planned.next_state()
        following = self._groups.steps + 1
        batches = [*self._closed, *((batch, following, frozenset()) for batch in self._open)]
        missing = self._missing(self._recovery.membership.members, batches).values()
        again = [*self.again, *itertools.chain.from_iterable(missing)]
        return self._loader.planned.state_at(self.position, again)

    def left(self) -> int:
        """Return the number of batches after this one that are dealt to the same ranks.

        It is the same on all ranks at the same batch, whatever each knows of later losses.
        """
        return -(-(self._end - self.position) // self._global_batch)

    def coming(self) -> int:
        """Return the number of batches that come after this one, whoever shares them.

        It is the same on all ranks, at the beginning of a batch and at the end of its step.
        """
        whole = operator.floordiv if self._drops_last else _ceildiv
        members, usual = self._groups.members, self.usual_batch
        missing = self._missing(members, self._closed).values()
        again = len(self.again) + sum(map(len, missing))
        rest = self._samples - self.position
        if members == self.members:
            of_pass = self._end - self.position
            return whole(of_pass, self._global_batch) + whole(rest + again - of_pass, usual)
        steps = _ceildiv(rest, usual)
        if not self._is_exact and steps > 0:
            return whole(rest, self._begun_with) + whole(again, usual)
        larger = _ceildiv(rest + again, steps) if self._keeps_steps and steps > 0 else 0
        return whole(rest + again, max(larger, usual))

    def stats(self) -> PassStats:
        """Return this rank's counts of the epoch."""
        return joined([*self._earlier, self._loader.stats()])

    def commit_step(self, contributors: Sequence[int]) -> None:
        if not self._open:
            return
        self._groups.steps += 1
        if contributors is not self._counted[0]:
            self._counted = (contributors, frozenset(contributors))
        self._closed += [(batch, self._groups.steps, self._counted[1]) for batch in self._open]
        self._open = []

    def of_lost(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, member, samples) of lost ranks for the steps that they counted in."""
        if self._recovery is None:
            return
        for batch, step, counted, member in _parts_of_lost(
            self._recovery.membership.members, self._closed
        ):
            if self._has_counted(member, step, counted):
                yield self._epoch, batch.step, member, batch.deal.samples(batch.number, member)

    def trail(self, since: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Yield (step, optimizer steps before it, ranks, member, samples) of the epoch's batches
        in the model, of all ranks.

        Args:
            since: number of batches to leave out.
        """
        for batch, step, counted in self._closed[since:]:
            members = batch.deal.members or range(batch.deal.batches.formula.ranks)
            for member in members:
                if self._recovery is None or self._has_counted(member, step, counted):
                    samples = batch.deal.samples(batch.number, member)
                    yield batch.step, batch.update, len(members), member, samples

    def taken_back(self) -> Iterator[tuple[int, int]]:
        """Yield (step, member) of the epoch's batches of lost ranks that come again.

        `trail` may have had them in the model: in exchanges whose ranks do not wait for each other,
        a step of a rank that is lost before another has heard of it is lost, too.
        """
        if self._recovery is not None and self._recovery.last_counted:
            yield from self._comes_again
            yield from self._missing(self._recovery.membership.members, self._closed)

    @property
    def is_settled(self) -> bool:
        """True if all batches that were taken are in the model: between two rounds of exchanges
        that make several steps in one."""
        return not self._open

    @property
    def closed(self) -> int:
        """Number of the epoch's batches in the model."""
        return len(self._closed)

    def report(self) -> BatchReport:
        return self._groups.report()

    def adopt(self, report: BatchReport) -> None:
        self._groups.adopt(report)

    def reconcile(self, reports: Sequence[BatchReport], comm: Communicator) -> None:
        self._groups.reconcile(reports)

    def prepare(self) -> None:
        """Open the tiers of all loaders, before ranks rest. Collective."""
        for loader in self._loaders:
            loader.prepare()
        self._dealt_to = ((), 0)  # The loaders' own even shares are those of ranks and spares.

    def tell_epoch(self) -> EpochWire:
        """Return all that a rank has to know that joins now, as JSON types."""
        return {
            "epoch": self._epoch,
            "step": self.step,
            "position": self.position,
            "samples": self._samples,
            "has_begun": self._has_begun,
            "begun": [self._begun_with, self._begun_by, self.usual_batch],
            "order": [self._is_exact, self._drops_last],
            "again": self.again,
            "comes_again": sorted(self._comes_again),
            "final": None if self._final is None else list(self._final.items()),
            "passes": [loader.prepare() for loader in self._loaders],
            "history": described(self._closed),
        }

    def follow_epoch(self, place: EpochWire) -> None:
        """Go on where another rank is, as it has told."""
        self._joins, self._joined = True, place["has_begun"]
        self._epoch, self.step, self.position = place["epoch"], place["step"], place["position"]
        self._samples, self._has_begun = place["samples"], place["has_begun"]
        self._begun_with, begun_by, self.usual_batch = place["begun"]
        self._begun_by = tuple(begun_by)
        self._is_exact, self._drops_last = place["order"]
        self.again = list(place["again"])
        self._comes_again = {(step, member) for step, member in place["comes_again"]}
        self._final = None if place["final"] is None else dict(map(tuple, place["final"]))
        for loader, passes in zip(self._loaders, place["passes"], strict=True):
            loader.prepare(passes)
        self._closed = recalled(place["history"], self._loader)
        self._open, self._earlier = [], []

    def close(self) -> None:
        """Take no part in later recoveries."""
        if self._recovery is not None:
            self._recovery.unregister(self)

    def _deal_to(self, members: tuple[int, ...], global_batch: int | None = None) -> None:
        if self._per_rank is not None and members and global_batch is None:
            self.usual_batch = self._per_rank * len(members)
        global_batch = self._global_batch = global_batch or self.usual_batch
        if (members, global_batch) != self._dealt_to:
            self._dealt_to = (members, global_batch)
            for loader in self._loaders:
                loader.regroup(members, self._groups.me, global_batch)

    def _more(self) -> bool:
        """Deal the rest of the epoch to those that share it now; False if nothing is left."""
        self._meet()
        members = self._groups.members
        for key, samples in self._missing(members, self._closed).items():
            self._comes_again.add(key)
            self.again += samples
            if self._recovery is not None:
                self._recovery.count_requeued(key[1], len(samples))
        rest = self._samples + len(self.again) - self.position
        if rest < (self.usual_batch if self._drops_last else 1):
            self._deal_to(members)
            return False
        if self._joined:
            self._joined = False  # This rank has made no pass of this epoch.
        else:
            self._earlier.append(self._loader.stats())
        steps = -(-(self._samples - self.position) // self.usual_batch)
        if not self._is_exact and steps > 0:
            self._deal_to(members, self._begun_with)
        else:
            larger = -(-rest // steps) if self._keeps_steps and steps > 0 else 0
            self._deal_to(members, larger if larger > self.usual_batch else None)
        self._loader.redeal(self.position, self.again, self._begun_by)
        return True

    def _missing(
        self, left: Sequence[int], batches: Sequence[CommittedBatch]
    ) -> dict[tuple[int, int], list[int]]:
        """Return the samples that lost ranks were dealt and have not brought into a step, and that
        are not among those that come again yet; by (step, member)."""
        return {
            (batch.step, member): batch.deal.samples(batch.number, member)
            for batch, step, counted, member in _parts_of_lost(left, batches)
            if (batch.step, member) not in self._comes_again
            and not self._has_counted(member, step, counted)
        }

    def _has_counted(self, member: int, step: int, counted: frozenset[int]) -> bool:
        """True if a lost member's samples of an optimizer step are in the model."""
        assert self._recovery is not None
        last = self._recovery.last_counted if self._final is None else self._final
        return step <= last[member] if member in last else member in counted


def _ceildiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _parts_of_lost(
    left: Sequence[int], batches: Iterable[CommittedBatch]
) -> Iterator[tuple[IssuedBatch, int, frozenset[int], int]]:
    """Yield each batch, its optimizer step and who counted in it, with each member that it was
    dealt to and that is not left."""
    living = frozenset(left)
    lost: dict[AssignmentSpan, list[int]] = {}
    for batch, step, counted in batches:
        if batch.deal not in lost:
            lost[batch.deal] = [each for each in batch.deal.members if each not in living]
        for member in lost[batch.deal]:
            yield batch, step, counted, member


class ElasticIterator:
    """The iterator of one pass that goes on when ranks are lost.

    Args:
        dealing: of its loader.
        length: batches of the pass if no rank is lost.
    """

    def __init__(self, dealing: BatchAssigner, length: int) -> None:
        dealing.begin_epoch(0)
        self._dealing, self._batches = dealing, dealing.batches()
        self._length = length

    def __len__(self) -> int:
        """Batches of the pass if no rank is lost."""
        return self._length

    def coming(self) -> int:
        """Return the number of batches that come after this one; see `BatchAssigner.coming`."""
        return self._dealing.coming()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchData:
        return next(self._batches)
