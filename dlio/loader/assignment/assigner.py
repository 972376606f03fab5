"""Assigns an epoch's batches to the ranks, and again when ranks are lost: each sample once.

A batch that any rank has received stays assigned as it was; the next one is assigned to the
survivors, by the same formula. Samples that lost ranks had been assigned, and did not bring into a
step, are requeued: trained on at the end of the epoch.

`EpochSchedule` decides all of that from events; this module feeds it with those of a loader and of
a `Recovery`. The trainer assigns for its loaders; a loader in a loop of the user's does so for
itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from dlio.comm import Communicator
from dlio.comm.board import computing, end_step
from dlio.comm.survival.recovery import Recovery, RecoveryPart
from dlio.loader.assignment.epoch_schedule import EpochSchedule, SurvivorState
from dlio.loader.assignment.history import (
    AssignmentSpan,
    IssuedBatch,
    SpanSource,
    history_from_json,
    history_to_json,
)
from dlio.loader.assignment.rank_groups import BatchReport, RankGroups
from dlio.loader.batch_stream import LoaderIterator
from dlio.loader.contract import BatchData, State
from dlio.loader.passes import PlannedPass
from dlio.loader.stats import PassStats, joined
from dlio.plan.epoch import EpochPlan

EpochWire: TypeAlias = dict[str, Any]
"""An `EpochState` with passes and history, as JSON types."""


class _AssignedLoader(SpanSource, Protocol):
    """A loader whose passes are assigned; see `dlio.DataLoader`."""

    plan: EpochPlan | None

    @property
    def planned(self) -> PlannedPass: ...

    def begin(self) -> LoaderIterator: ...

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None: ...

    def resume_at(self, position: int, again: Sequence[int], began: Sequence[int]) -> None: ...

    def prepare(self, generation: int | None = None) -> int: ...

    def state_dict(self) -> State: ...

    def stats(self) -> PassStats: ...


class BatchAssigner(RecoveryPart[BatchReport]):
    """The batches of this rank. Closed by its owner. The loaders are those of the training data,
    and others, in orders of dlio's own. Without `recovery` the job ends with any rank. After a
    loss, `keeps_steps` has larger batches and no more of them than before; otherwise batches of all
    ranks stay at `global_batch` samples, or follow the number of ranks at `per_rank` each, if
    given. `updates` returns the number of optimizer steps so far, for `trail`."""

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
        self._recovery, self._per_rank, self._updates = recovery, per_rank, updates
        self._schedule = EpochSchedule(global_batch, keeps_steps)
        self._groups = RankGroups(recovery)
        self._assigned_to = (self._groups.members, global_batch)
        """Members and global batch of the loaders' passes."""
        self.earlier = 0
        """Batches of the next epoch that were issued before it was resumed. Requeued samples make
        them more than its position tells."""
        self._contributors: tuple[Sequence[int], frozenset[int]] = ((), frozenset())
        """The contributors of the last step, and the set of them: it is the same in most steps."""
        self._earlier_stats: list[PassStats] = []
        """Counts of this epoch before ranks were lost."""
        self._adopted = self._has_no_pass = False
        """True on a rank that joins until it begins an epoch; until it begins a pass of it."""
        self.keeps_trail = recovery is not None
        """True to remember which batches were issued, also where the job ends with any rank."""
        if recovery is not None:
            recovery.register(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share batches now: their numbers when the job began."""
        return self._assigned_to[0]

    @property
    def usual_batch(self) -> int:
        """Samples of a batch over all ranks."""
        return self._schedule.usual_batch

    @property
    def position(self) -> int:
        """Position of the epoch's order after the batch that was issued last."""
        return self._schedule.position

    @property
    def made(self) -> int:
        """Number of exchanges that this rank has taken part in since the job began."""
        return self._groups.steps

    @property
    def step(self) -> int:
        """Number of the batch that was issued last, within its epoch."""
        return self._schedule.step

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's batches."""
        if self._adopted:
            self._adopted = False  # `follow_epoch` has set it all.
            return
        self._schedule.begin_epoch(epoch)
        self._earlier_stats = []

    def end_epoch(self) -> None:
        """Note that all ranks have trained the epoch: nothing of it is requeued any more."""
        if self._recovery is not None:
            self._schedule.final = dict(self._recovery.last_counted)

    def regroup(self) -> None:
        """Have later passes of the loaders assigned to the survivors.

        All ranks must have received the same batches.
        """
        if self._recovery is not None:
            self._groups.meet()
            self._assign_to(self._groups.members)

    def batches(self) -> Iterator[BatchData]:
        """Yield the batches of an epoch, from the loader's position on; in a later call, those that
        are left.

        Raises RankLeft on a rank that leaves.
        """
        schedule, groups = self._schedule, self._groups
        end_step()
        groups.evaluates = not torch.is_grad_enabled()
        if schedule.has_begun:
            self._meet()
            if not self._continue_epoch():
                return
        else:
            self._meet()
            self._assign_to(groups.members)
        while True:
            iterator = self._loader.begin()
            span = AssignmentSpan(self._loader.planned, self._loader.plan, self.members)
            goes_on = schedule.has_begun
            schedule.begin_pass(span.batches, span.members, self.earlier)
            self.earlier = self.earlier if goes_on else 0
            for number, data in enumerate(iterator):
                groups.taken += 1
                schedule.issue()
                if self.keeps_trail and torch.is_grad_enabled():
                    schedule.open.append(IssuedBatch(span, number, schedule.step, self._updates()))
                    with computing():
                        yield data
                else:
                    yield data
                schedule.step += 1
                recovery = self._recovery
                # Ranks are to join or leave, and all have to come to one place for it.
                if recovery and recovery.elastic and recovery.elastic.asked:
                    recovery.recover()
                if groups.members != span.members or groups.meets:
                    break
            # After the last batch the exchange is finished before ranks meet: another rank may have
            # been in it already when the meeting was called, and waits there for all others.
            if self._is_over():
                return
            self._meet()
            if not self._continue_epoch():
                return

    def _meet(self) -> None:
        if self._recovery is not None:
            self._recovery.rendezvous(lambda: self._groups.meets)

    def state(self) -> State:
        """Return the loader's state after the batch that was issued last, whose step is over.

        Samples that lost ranks had been assigned are requeued in it.
        """
        schedule = self._schedule
        if self._recovery is None or not schedule.has_begun or self._has_no_pass:
            return self._loader.state_dict()
        if schedule.final is not None:
            return self._loader.planned.next_state()
        # This rank may not have noticed the loss yet: what the survivors will requeue is in the
        # state already, or a run that is resumed from it would miss these samples.
        missing = schedule.missing(self._survivors(), self._groups.steps + 1)
        again = [*schedule.requeued, *(sample for each in missing.values() for sample in each)]
        return self._loader.planned.state_at(schedule.position, again)

    def left(self) -> int:
        """Return the number of batches after this one that are assigned to the same ranks.

        It is the same on all ranks at the same batch, whatever each knows of later losses.
        """
        return self._schedule.left()

    def coming(self) -> int:
        """Return the number of batches that come after this one, whoever shares them.

        It is the same on all ranks, at the beginning of a batch and at the end of its step.
        """
        members = self._groups.members
        return self._schedule.coming(self._survivors(members), members == self.members)

    def stats(self) -> PassStats:
        """Return this rank's counts of the epoch."""
        return joined([*self._earlier_stats, self._loader.stats()])

    # Who trained on which samples, for ledgers and traces

    def of_lost(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, member, samples) of lost ranks for the steps that they counted in."""
        if self._recovery is not None:
            yield from self._schedule.of_lost(self._survivors())

    def trail(self, since: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Yield (step, optimizer steps before it, ranks, member, samples) of the epoch's batches in
        the model, of all ranks, but for the first `since` ones."""
        schedule, survivors = self._schedule, self._survivors()
        for each in schedule.committed[since:]:
            batch, span = each.batch, each.batch.span
            members = span.members or range(span.batches.formula.ranks)
            for member in members:
                if self._recovery is None or schedule.has_contributed(member, each, survivors):
                    samples = span.samples(batch.number, member)
                    yield batch.step, batch.update, len(members), member, samples

    def taken_back(self) -> Iterator[tuple[int, int]]:
        """Yield (step, member) of the epoch's batches of lost ranks that are requeued.

        `trail` may have had them in the model: in exchanges whose ranks do not wait for each other,
        a step of a rank that is lost before another has heard of it is lost, too.
        """
        if self._recovery is not None and self._recovery.last_counted:
            yield from self._schedule.requeued_parts
            yield from self._schedule.missing(self._survivors())

    @property
    def is_settled(self) -> bool:
        """True if all batches that were issued are in the model: between two rounds of exchanges
        that make several steps in one."""
        return not self._schedule.open

    @property
    def closed(self) -> int:
        """Number of the epoch's batches in the model."""
        return len(self._schedule.committed)

    # As a part of Recovery

    def commit_step(self, contributors: Sequence[int]) -> None:
        if not self._schedule.open:
            return
        self._groups.steps += 1
        if contributors is not self._contributors[0]:
            self._contributors = (contributors, frozenset(contributors))
        self._schedule.commit(self._groups.steps, self._contributors[1])

    def report(self) -> BatchReport:
        return self._groups.report()

    def adopt(self, report: BatchReport) -> None:
        self._groups.adopt(report)

    def reconcile(self, reports: Sequence[BatchReport], comm: Communicator) -> None:
        self._groups.reconcile(reports)

    def prepare(self) -> None:
        """Open the tiers of all loaders, before ranks stand by. Collective."""
        for loader in self._loaders:
            loader.prepare()
        self._assigned_to = ((), 0)  # The loaders' own even shares are those of ranks and spares.

    def tell_epoch(self) -> EpochWire:
        """Return all that a rank has to know that joins now."""
        return {
            **self._schedule.to_json(),
            "passes": [loader.prepare() for loader in self._loaders],
            "history": history_to_json(self._schedule.committed, self._schedule.open),
        }

    def follow_epoch(self, place: EpochWire) -> None:
        """Continue where another rank is, as it has told."""
        self._schedule.load_json(place)
        self._adopted, self._has_no_pass = True, self._schedule.has_begun
        for loader, passes in zip(self._loaders, place["passes"], strict=True):
            loader.prepare(passes)
        # After `prepare`: the plans of spans need to know where the open tiers are.
        history = history_from_json(place["history"], self._loader)
        self._schedule.committed, self._schedule.open = history
        self._earlier_stats, self.earlier = [], 0  # That of a checkpoint: this epoch has begun.

    def close(self) -> None:
        """Take no part in later recoveries."""
        if self._recovery is not None:
            self._recovery.unregister(self)

    def _survivors(self, members: Sequence[int] | None = None) -> SurvivorState:
        if self._recovery is None:
            return SurvivorState((), {})
        recovery = self._recovery
        members = recovery.membership.members if members is None else members
        return SurvivorState(members, recovery.last_counted)

    def _assign_to(self, members: tuple[int, ...], global_batch: int | None = None) -> None:
        if self._per_rank is not None and members and global_batch is None:
            self._schedule.usual_batch = self._per_rank * len(members)
        global_batch = self._schedule.global_batch = global_batch or self._schedule.usual_batch
        if (members, global_batch) != self._assigned_to:
            self._assigned_to = (members, global_batch)
            for loader in self._loaders:
                loader.regroup(members, self._groups.me, global_batch)

    def _continue_epoch(self) -> bool:
        """Assign the rest of the epoch to those that share it now; False if nothing is left."""
        if self._is_over():
            self._assign_to(self._groups.members)
            return False
        if self._has_no_pass:
            self._has_no_pass = False  # This rank has made no pass of this epoch.
        else:
            self._earlier_stats.append(self._loader.stats())
        schedule = self._schedule
        self._assign_to(self._groups.members, schedule.next_batch())
        self._loader.resume_at(schedule.position, schedule.requeued, schedule.first_members)
        return True

    def _is_over(self) -> bool:
        """True if no batch of the epoch is left. Samples of lost ranks are requeued first."""
        schedule = self._schedule
        missing = schedule.missing(self._survivors(self._groups.members))
        schedule.requeue(missing)
        if self._recovery is not None:
            for (_, member), samples in missing.items():
                self._recovery.count_requeued(member, len(samples))
        return schedule.is_over()


class ElasticIterator(Iterator[BatchData]):
    """The iterator of one pass that continues when ranks are lost.

    `length` has the batches of the pass if no rank is lost.
    """

    def __init__(self, assigner: BatchAssigner, length: int) -> None:
        assigner.begin_epoch(0)
        self._assigner, self._batches = assigner, assigner.batches()
        self._length = length

    def __len__(self) -> int:
        """Batches of the pass if no rank is lost."""
        return self._length

    def coming(self) -> int:
        """Return the number of batches that come after this one; see `BatchAssigner.coming`."""
        return self._assigner.coming()

    def __next__(self) -> BatchData:
        return next(self._batches)
