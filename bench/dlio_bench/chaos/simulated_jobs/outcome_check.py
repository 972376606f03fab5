"""The run of a schedule, and the rules that hold after it."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

import numpy as np

from dlio.util.units import counted
from dlio_bench.chaos.simulated_jobs.memory_network import Cohort, MemoryNetwork
from dlio_bench.chaos.simulated_jobs.schedule_draws import FaultSchedule
from dlio_bench.chaos.simulated_jobs.simulated_ranks import (
    CohortBatch,
    CohortEpoch,
    SimulatedJob,
    SimulatedTrainer,
    part_of,
)
from dlio_bench.chaos.simulated_jobs.turns import Deadlock, Turns

_MOST_WHOLE = 16
"""Ranks of a job up to which the part of each rank is counted; else of those that were lost."""


@dataclass(slots=True)
class ScheduleOutcome:
    """The outcome of one schedule, or the sum of several."""

    losses: int = 0
    """Ranks that were lost."""
    recoveries: int = 0
    interrupted: int = 0
    """Generations that began and ended within one recovery."""
    given: int = 0
    """Times that ranks had sums and others lacked them."""
    events: int = 0
    samples_lost: int = 0
    samples_doubled: int = 0
    disagreements: list[str] = field(default_factory=list)
    """Hangs, errors, and whatever ranks that are left see differently."""

    @property
    def wrong(self) -> bool:
        """True if not every sample was trained on once, with the same result on all ranks."""
        return bool(self.samples_lost or self.samples_doubled or self.disagreements)

    def add(self, other: "ScheduleOutcome") -> None:
        """Add another one's counts to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def run_schedule(schedule: FaultSchedule, turns: Turns) -> ScheduleOutcome:
    """Run a schedule to its end, in at least as many threads as it has cohorts, and check it."""
    rng = random.Random(schedule.seed)
    cohorts = [Cohort(list(ranks)) for ranks in schedule.cohorts]
    network = MemoryNetwork(turns, cohorts, schedule.losses, rng)
    trainers: list[SimulatedTrainer] = []
    trainers += (SimulatedTrainer(schedule.job, network, cohort, trainers) for cohort in cohorts)
    outcome = ScheduleOutcome()
    try:
        turns.run([trainer.run for trainer in trainers], rng)
    except Deadlock as error:
        outcome.disagreements.append(str(error))
    except Exception as error:
        outcome.disagreements.append(f"{type(error).__name__}: {error}")
    left = [trainer for trainer in trainers if trainer.cohort.living]
    outcome.losses, outcome.events = len(network.lost), network.events
    outcome.recoveries = network.recoveries
    outcome.interrupted = network.recoveries - max(len(each.recovery.losses) for each in left)
    outcome.given = sum(each.given for each in left)
    if not outcome.disagreements:
        _check(schedule.job, network, left, trainers, outcome)
    return outcome


def _check(
    job: SimulatedJob,
    network: MemoryNetwork,
    left: Sequence[SimulatedTrainer],
    everyone: Sequence[SimulatedTrainer],
    outcome: ScheduleOutcome,
) -> None:
    first = left[0]
    for other in left[1:]:
        if _seen(first) != _seen(other):
            outcome.disagreements.append("ranks that are left have other batches, sums or losses")
            return
    for epoch in first.epochs:
        if job.heard:
            _check_heard(epoch, _heard(left), _heard(everyone), outcome)
        else:
            _check_sums(epoch, network, outcome)
        times = _times(job, epoch)
        outcome.samples_lost += int((times == 0).sum())
        outcome.samples_doubled += int((times - 1).clip(min=0).sum())


def _seen(trainer: SimulatedTrainer) -> object:
    """Return what all ranks have to have alike: batches, sums, the steps of lost ranks."""
    return [
        (
            [(each.step, each.number, each.members, each.dealt.cursor) for each in epoch.batches],
            epoch.sums,
            epoch.of_lost,
        )
        for epoch in trainer.epochs
    ]


def _optimizer_steps(
    epoch: CohortEpoch,
) -> Iterator[tuple[int, tuple[int, ...], list[CohortBatch]]]:
    """Yield the number of each step's last batch, the numbers of its sums, and its batches."""
    begin = 0
    for last, sums in epoch.sums:
        yield last, sums, epoch.batches[begin : last + 1]
        begin = last + 1


def _check_sums(epoch: CohortEpoch, network: MemoryNetwork, outcome: ScheduleOutcome) -> None:
    """Compare who counts with whose values are in the sums that were taken."""
    expected: set[tuple[int, int]] = set()
    for last, sums, batches in _optimizer_steps(epoch):
        contributors = {network.summed[number] for number in sums}
        if len(contributors) != 1:
            outcome.disagreements.append(
                f"step {last} has sums of {counted(len(contributors), 'generation')}"
            )
        lost = set(next(iter(contributors))) - set(epoch.writers)
        expected.update((batch.step, rank) for batch in batches for rank in lost)
    if expected != {(step, rank) for step, rank, _ in epoch.of_lost}:
        outcome.disagreements.append("the steps that lost ranks counted in are others than noted")


def _heard(trainers: Sequence[SimulatedTrainer]) -> dict[int, int]:
    """Return the last step of each rank that one of some has taken in."""
    heard = Counter[int]()
    for trainer in trainers:
        heard |= Counter(trainer.heard)
    return heard


def _check_heard(
    epoch: CohortEpoch, surely: dict[int, int], ever: dict[int, int], outcome: ScheduleOutcome
) -> None:
    """Compare who counts with whose steps others have taken in: by rank, the last one that a rank
    that is left has taken in, `surely`, and that any rank has, `ever`, which may be lost, too."""
    noted = {(step, rank) for step, rank, _ in epoch.of_lost}
    for _, (number,), batches in _optimizer_steps(epoch):
        for batch in batches:
            for rank in set(batch.members) - set(epoch.writers):
                counts = (batch.step, rank) in noted
                wrong = number <= surely.get(rank, 0) and not counts
                if rank not in epoch.finished:
                    wrong = wrong or (number > ever.get(rank, 0) and counts)
                if wrong:
                    outcome.disagreements.append(f"step {batch.step} of rank {rank}: {counts=}")


def _times(job: SimulatedJob, epoch: CohortEpoch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how often each sample was trained on, by the lines of ranks left and lost."""
    whole = job.ranks <= _MOST_WHOLE
    writers = set(epoch.writers)
    times = np.zeros(job.samples, np.int64)
    added: list[list[int]] = [samples for _, _, samples in epoch.of_lost]
    missing: list[list[int]] = []
    for batch in epoch.batches:
        if whole:
            added += (part_of(batch, each) for each in batch.members if each in writers)
        else:
            dealt = batch.dealt
            begin = dealt.cursor.position + batch.number * dealt.global_batch
            end = min(begin + dealt.global_batch, dealt.samples)
            times[dealt.order.samples(np.arange(begin, end, dtype=np.int64))] += 1
            missing += (part_of(batch, each) for each in batch.members if each not in writers)
    np.add.at(times, np.fromiter(chain.from_iterable(added), np.int64), 1)
    np.add.at(times, np.fromiter(chain.from_iterable(missing), np.int64), -1)
    return times
