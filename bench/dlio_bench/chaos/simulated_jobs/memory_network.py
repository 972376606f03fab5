"""A network in memory, whose ranks are lost at any message.

An operation of all ranks succeeds if all have begun it. If a rank is lost after that, it succeeds
on some ranks and fails on others, as MPI's do. Once a rank asks for the next generation, all
operations of the present one fail, but for those that are complete: these may.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from dlio.comm.comm_protocol import Array, Json
from dlio.errors import PeerLost
from dlio_bench.chaos.simulated_jobs.turns import TaskEnd, Turns

_CHANCE: Final = 0.5


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """A loss of ranks that is to come."""

    at: int
    """Number of the event, a message or a step of any rank, at which it comes."""
    kind: str
    """`one`, `several`, `first`, `node` (consecutive ranks) or `all but one`."""


@dataclass(slots=True, eq=False)
class Cohort:
    """Ranks that are always at the same place."""

    living: list[int]
    """Numbers of its ranks that are left, ascending."""


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation of all ranks of a generation."""

    doomed: bool
    """True if a rank was lost before it began the operation."""
    arrived: int = 0
    """Ranks that have begun it."""
    values: dict[Cohort, object] = field(default_factory=dict)
    result: int | None = None
    decided: bool = False


@dataclass(slots=True, eq=False)
class _Generation:
    number: int
    members: tuple[int, ...]
    operations: dict[int, _Operation] = field(default_factory=dict)
    agreements: dict[int, _Operation] = field(default_factory=dict)
    renewing: dict[Cohort, Json] = field(default_factory=dict)
    """Reports of the cohorts that ask for the next generation."""
    hurt: bool = False
    """True if one of its ranks is lost."""
    following: "tuple[_Generation, list[Json]] | None" = None
    """The next generation, and the reports of its ranks."""


class MemoryNetwork:
    """The ranks, those that are left, and what they have begun together."""

    def __init__(
        self,
        turns: Turns,
        cohorts: Sequence[Cohort],
        losses: Sequence[PlannedLoss],
        rng: random.Random,
    ) -> None:
        self._turns, self.cohorts, self._rng = turns, cohorts, rng
        self._losses = sorted(losses, key=lambda loss: loss.at, reverse=True)
        self.cohort_of = {member: cohort for cohort in cohorts for member in cohort.living}
        self.events = self.recoveries = 0
        """Events so far, and generations that were begun."""
        self.lost: list[int] = []
        """Ranks that are lost, in their order."""
        self.summed: list[tuple[int, ...]] = []
        """By number of a sum, the ranks whose values are in it."""
        self.present = _Generation(0, tuple(sorted(self.cohort_of)))

    def event(self, cohort: Cohort) -> None:
        """Note that something happens on a cohort, at which ranks may be lost.

        Raises TaskEnd if all of its ranks are.
        """
        self.events += 1
        while self._losses and self._losses[-1].at <= self.events:
            self._lose(self._losses.pop())
        if not cohort.living:
            raise TaskEnd

    def pause(self, cohort: Cohort) -> None:
        """Let other ranks run."""
        self.event(cohort)
        self._turns.wait(lambda: True)
        self.event(cohort)

    def gather(
        self, cohort: Cohort, generation: _Generation, number: int, value: object
    ) -> _Operation:
        """Return an operation of a generation that all have begun. Raises PeerLost."""
        self.event(cohort)
        operation = generation.operations.setdefault(number, _Operation(generation.hurt))
        operation.values[cohort] = value
        operation.arrived += len(cohort.living)

        def done() -> bool:
            return operation.arrived == len(generation.members) and not operation.doomed

        self._wait(cohort, lambda: operation.doomed or bool(generation.renewing) or done())
        self.event(cohort)
        if not done() or (generation.hurt and self._rng.random() < _CHANCE):
            raise PeerLost("simulated")
        return operation

    def agree(self, cohort: Cohort, generation: _Generation, number: int, well: bool) -> bool:
        """Return the agreement of all ranks that are left."""
        self.event(cohort)
        agreement = generation.agreements.setdefault(number, _Operation(False))
        agreement.values[cohort] = well
        arrived = agreement.values, generation.renewing
        self._wait(cohort, lambda: agreement.decided or self._all_in(*arrived))
        if cohort.living and not agreement.decided:
            agreement.decided = True
            agreement.result = all(agreement.values.values()) and not (
                generation.hurt or generation.renewing
            )
        self.event(cohort)
        return bool(agreement.result)

    def renew(
        self, cohort: Cohort, generation: _Generation, report: Json
    ) -> tuple[_Generation, list[Json]]:
        """Return the next generation and the reports of its ranks, when all have come."""
        self.event(cohort)
        renewing = generation.renewing
        renewing[cohort] = report
        self._wait(cohort, lambda: generation.following is not None or self._all_in(renewing))
        if cohort.living and generation.following is None:
            members = tuple(sorted(each for other in self.cohorts for each in other.living))
            reports = [renewing[self.cohort_of[member]] for member in members]
            self.present = _Generation(generation.number + 1, members)
            generation.following = (self.present, reports)
            self.recoveries += 1
        self.event(cohort)
        assert generation.following is not None
        return generation.following

    def _wait(self, cohort: Cohort, ready: Callable[[], bool]) -> None:
        """Let other cohorts run until `ready()`, or until all ranks of this one are lost."""
        self._turns.wait(lambda: not cohort.living or ready())

    def _all_in(self, *arrived: Mapping[Cohort, object]) -> bool:
        """True if each cohort with ranks that are left has arrived in one of several places."""
        living = (cohort for cohort in self.cohorts if cohort.living)
        return all(any(cohort in place for place in arrived) for cohort in living)

    def draw(self, count: int) -> int:
        """Return a number from 0 to count - 1."""
        return self._rng.randrange(count)

    def new_sum(self, members: tuple[int, ...]) -> int:
        """Return the number of a new sum of some ranks' values."""
        self.summed.append(members)
        return len(self.summed) - 1

    def _lose(self, loss: PlannedLoss) -> None:
        living = sorted(member for cohort in self.cohorts for member in cohort.living)
        generation = self.present
        for member in self._chosen(loss, living):
            cohort = self.cohort_of[member]
            for operation in generation.operations.values():
                operation.doomed = operation.doomed or cohort not in operation.values
            cohort.living.remove(member)
            self.lost.append(member)
            generation.hurt = True

    def _chosen(self, loss: PlannedLoss, living: list[int]) -> Sequence[int]:
        most = len(living) - 1
        if loss.kind == "all but one" and most <= 64:
            return self._rng.sample(living, most)
        if loss.kind == "first":
            return living[: min(1, most)]
        count = min(most, 1 if loss.kind == "one" else self._rng.randint(2, 8))
        if loss.kind == "node":
            first = self._rng.randrange(len(living) - count + 1)
            return living[first : first + count]
        return self._rng.sample(living, count)


class MemoryMembership:
    """The ranks that are left, as one cohort sees them: a `Membership`."""

    lost = due = False
    left: tuple[int, ...] = ()

    def __init__(self, network: MemoryNetwork, cohort: Cohort) -> None:
        self._network, self._cohort = network, cohort
        self._generation = network.present
        self._operations = self._agreements = 0
        self.number, self.members = 0, network.present.members

    @property
    def me(self) -> int:
        """Number of the cohort's first rank that is left."""
        return self._cohort.living[0]

    @me.setter
    def me(self, _: int) -> None:
        raise NotImplementedError

    def renew(self, report: Json, meets: bool = False) -> list[Json]:
        self._generation, reports = self._network.renew(self._cohort, self._generation, report)
        self._operations = self._agreements = 0
        self.number, self.members = self._generation.number, self._generation.members
        return list(reports)

    def interrupt(self) -> None:
        # A loss ends the waits of all.
        pass

    def agree(self, well: bool) -> bool:
        self._agreements += 1
        return self._network.agree(self._cohort, self._generation, self._agreements, well)

    def gather(self, value: object) -> dict[Cohort, object]:
        """Return the values of all cohorts. Raises PeerLost."""
        return self._operate(value).values

    def _operate(self, value: object) -> _Operation:
        self._operations += 1
        return self._network.gather(self._cohort, self._generation, self._operations, value)

    def sum(self) -> int:
        """Return the number of the sum of all ranks' values. Raises PeerLost."""
        operation = self._operate(None)
        if operation.result is None:
            operation.result = self._network.new_sum(self.members)
        return int(operation.result)


class MemoryCommunicator:
    """All ranks that are left, as one cohort sees them: the part of a `Communicator` that
    decisions use."""

    def __init__(
        self, network: MemoryNetwork, cohort: Cohort, membership: MemoryMembership
    ) -> None:
        self._network, self._cohort, self._membership = network, cohort, membership

    @property
    def rank(self) -> int:
        """Rank of the cohort's first rank that is left."""
        return self._membership.members.index(self._cohort.living[0])

    @property
    def size(self) -> int:
        """Number of ranks of this generation."""
        return len(self._membership.members)

    def barrier(self) -> None:
        self._membership.gather(None)

    def bcast(self, array: Array, root: int = 0) -> None:
        giver = self._network.cohort_of[self._membership.members[root]]
        values = self._membership.gather(np.array(array))
        array[...] = cast(Array, values[giver])
