"""A cohort's training as the trainer does it, without a model: all that decides is real."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.survival.recovery import Recovery, RecoveryPart
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.exchange_spec import parse_exchange
from dlio.exchange.peer_steps import PeerReport, PeerSteps
from dlio.exchange.round_commit import RoundCommit
from dlio.loader.assignment.assigner import BatchAssigner
from dlio.loader.passes import FormulaOrder, LoaderPosition, PlannedPass
from dlio.plan.epoch import EpochPlan, plan_epoch
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.plan.rank_shares import RankShares
from dlio.plan.schedule import RankNodes
from dlio_bench.chaos.simulated_jobs.memory_network import (
    Cohort,
    MemoryCommunicator,
    MemoryMembership,
    MemoryNetwork,
)

_BLOCK: Final = 7
"""Samples of a block."""


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job to simulate."""

    ranks: int
    samples: int
    batch_size: int
    epochs: int
    accumulate: int
    buckets: int
    """Sums of a step."""
    heard: bool
    """Ranks step alone and take in the steps of others, as asgd does; otherwise all sum."""
    keeps_steps: bool
    """Have larger batches after a loss, as loops of users do, and no more of them."""
    nodes: int
    """Nodes whose tiers decide who gets which sample; 0 if positions alone do."""
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class CohortBatch:
    """A batch that a cohort took."""

    step: int
    dealt: PlannedPass
    plan: EpochPlan | None
    number: int
    """Within its pass."""
    members: tuple[int, ...]
    """Ranks that it was dealt to."""


@dataclass(slots=True)
class CohortEpoch:
    """An epoch as a cohort made it."""

    batches: list[CohortBatch]
    sums: list[tuple[int, tuple[int, ...]]]
    """By optimizer step, the number of its last batch, and the numbers of its sums; its own
    number where ranks step alone."""
    of_lost: list[tuple[int, int, list[int]]]
    """Step, rank and samples of ranks that were lost."""
    finished: tuple[int, ...] = ()
    """Ranks that had made all of its steps."""
    writers: tuple[int, ...] = ()
    """Ranks that have written their own lines of it."""


def part_of(batch: CohortBatch, member: int) -> list[int]:
    """Return the samples of a batch that were dealt to a rank."""
    rank = batch.members.index(member)
    if batch.plan is None:
        return batch.dealt.part(batch.number, rank)
    steps = range(batch.number, batch.number + 1)
    window = plan_epoch(replace(batch.plan, rank=rank)).window(steps)
    samples: list[int] = window.samples.tolist()
    return samples


class _EmptyLoader:
    """A loader whose passes are real, and whose batches are empty."""

    def __init__(self, job: SimulatedJob, me: int) -> None:
        self._job = job
        self._dealt = (me, RankShares.even(job.batch_size, job.ranks))
        self._place = LoaderPosition()
        self._node_of = np.arange(job.ranks, dtype=np.int32) * max(1, job.nodes) // job.ranks
        self._members: Sequence[int] = range(job.ranks)
        self.plan: EpochPlan | None = None
        self.number = 0
        """Number of the batch that was handed out last, within its pass."""

    @property
    def planned(self) -> PlannedPass:
        return cast(PlannedPass, self._place.current)

    def set_epoch(self, epoch: int) -> None:
        self._place = self._place.chosen(epoch, None)

    def begin(self) -> Iterator[None]:
        rank, shares = self._dealt
        order = FormulaOrder(
            seed=self._job.seed,
            samples=self._job.samples,
            shuffled=True,
            shares=shares,
            drop_last=False,
            rank=rank,
        )
        batches, self._place = self._place.open(order)
        assert isinstance(batches, PlannedPass)
        self.plan = self._plan(batches) if self._job.nodes else None
        return self._handed(batches)

    def regroup(self, members: Sequence[int], me: int, global_batch: int) -> None:
        self._dealt = (members.index(me), RankShares.of(global_batch, len(members)))
        self._members = members

    def resume_at(self, position: int, again: Sequence[int], _: Sequence[int]) -> None:
        self._place = self._place.loaded(self.planned.state_at(position, again))

    def stats(self) -> Any:
        return None

    def _handed(self, batches: PlannedPass) -> Iterator[None]:
        for number in range(batches.steps):
            self.number = number
            batches.consumed()
            self._place = self._place.handed_out(batches)
            yield None
        self._place = self._place.over(batches)

    def _plan(self, batches: PlannedPass) -> EpochPlan:
        samples = self._job.samples
        starts = np.unique(np.append(np.arange(0, samples, _BLOCK), samples))
        layout = Layout(starts, Order(samples, self._job.seed, shuffled=False))
        home = np.arange(layout.blocks, dtype=np.int32) % (self._job.nodes + 1) - 1
        return EpochPlan(
            order=batches.order,
            position=batches.cursor.position,
            shares=batches.shares,
            steps=batches.steps,
            mode="batch",
            ranks=RankNodes(self._node_of[list(self._members)]),
            rank=self._dealt[0],
            home=home,
            layout=layout,
        )


class _Messages(RecoveryPart[PeerReport]):
    """The exchange of ranks that take in each other's steps one by one."""

    def __init__(self, recovery: Recovery) -> None:
        self.peer_steps = PeerSteps(recovery)
        self.steps = 0
        """Optimizer steps of this rank."""
        recovery.register(self)

    def report(self) -> PeerReport:
        return PeerReport(self.peer_steps.report())

    def reconcile(self, reports: Sequence[PeerReport], comm: Communicator) -> None:
        self.peer_steps.reconcile(reports)


class SimulatedTrainer:
    """One cohort: it makes all epochs of a job, whoever is lost, and hears of the others."""

    def __init__(
        self,
        job: SimulatedJob,
        network: MemoryNetwork,
        cohort: Cohort,
        trainers: "Sequence[SimulatedTrainer]",
    ) -> None:
        self._job, self._network, self.cohort, self._trainers = job, network, cohort, trainers
        self.membership = membership = MemoryMembership(network, cohort)
        comm = cast(Communicator, MemoryCommunicator(network, cohort, membership))
        self.recovery = recovery = Recovery(membership, comm)
        recovery.describe([""] * job.ranks, lambda: (0, -1))
        self._comm = comm
        self._exchange: RoundCommit | _Messages
        if job.heard:
            self._exchange = _Messages(recovery)
        else:
            setting = ExchangeContext(
                spec=parse_exchange("allreduce"),
                comm=comm,
                node_of=np.zeros(job.ranks, np.int32),
                recovery=recovery,
                members=membership.members,
            )
            self._exchange = RoundCommit(setting, self)
        self.loader = _EmptyLoader(job, membership.me)
        loader: Any = self.loader
        self.assigner = BatchAssigner(
            [loader], recovery, job.batch_size * job.ranks, keeps_steps=job.keeps_steps
        )
        self._sums, self._before = np.zeros(job.buckets, np.int64), np.zeros(job.buckets, np.int64)
        self.epochs: list[CohortEpoch] = []
        self._epoch = CohortEpoch([], [], [])
        self.heard: dict[int, int] = {}
        """By rank, its last step that this cohort has taken in."""
        self.given = 0
        """Sums that this cohort had got and others lacked, when ranks were lost."""

    def run(self) -> None:
        """Make all epochs."""
        uniform = self.recovery.uniform
        for number in range(self._job.epochs):
            self._epoch = CohortEpoch([], [], [])
            self.assigner.begin_epoch(number)
            self.loader.set_epoch(number)
            uniform(self._train)
            self._epoch.finished = self.membership.members
            self.assigner.end_epoch()
            self._epoch.of_lost = uniform(self._write)
            self.epochs.append(self._epoch)
            uniform(self._report)
        uniform(self._comm.barrier)

    def sum_all(self) -> None:
        for number in range(self._job.buckets):
            self._sums[number] = self.membership.sum()

    def reset(self, undo: bool) -> None:
        pass

    def arrays(self, last: bool) -> list[npt.NDArray[np.generic]]:
        self.given += 1
        return [self._before if last else self._sums]

    def _train(self) -> None:
        more = True
        while more:
            more = False
            for _ in self.assigner.batches():
                more = True
                self._step()

    def _step(self) -> None:
        step = len(self._epoch.batches)
        loader = self.loader
        batch = CohortBatch(step, loader.planned, loader.plan, loader.number, self.assigner.members)
        self._epoch.batches.append(batch)
        self._network.event(self.cohort)
        if min(-(step + 1) % self._job.accumulate, self.assigner.left()):
            return
        if isinstance(self._exchange, _Messages):
            self._network.pause(self.cohort)
            self._hear(self._exchange)
            self._exchange.steps += 1
            self._epoch.sums.append((step, (self._exchange.steps,)))
            self.recovery.commit_step(self.membership.members)
            return
        self._exchange.close_turn()
        sums = tuple(self._sums.tolist())
        self._sums, self._before = self._before, self._sums
        self._exchange.take()
        self._epoch.sums.append((step, sums))
        self.recovery.commit_step(self._exchange.contributors)

    def _hear(self, mine: "_Messages") -> None:
        for other in self._trainers:
            theirs = other._exchange
            if other is not self and isinstance(theirs, _Messages) and other.cohort.living:
                upto = self._network.draw(theirs.steps + 1)
                mine.peer_steps.note(other.cohort.living, upto)
                for member in other.cohort.living:
                    self.heard[member] = max(upto, self.heard.get(member, 0))

    def _write(self) -> list[tuple[int, int, list[int]]]:
        self._comm.barrier()
        self._epoch.writers = self.membership.members
        return [(step, rank, samples) for _, step, rank, samples in self.assigner.of_lost()]

    def _report(self) -> None:
        self.assigner.regroup()
        self._comm.barrier()
