"""One epoch's batches as a function of events: issued, committed, requeued.

`EpochSchedule` does no I/O and knows no loader, thread or communicator. Events go in (a pass
begins, a batch is issued, an exchange commits batches, ranks are lost), and answers come out: which
samples are requeued, how many batches are left, whether the epoch is over. Ranks that are given the
same events hold the same schedule, which is why survivors need no message to agree on the rest of
an epoch.

    issued -> committed         its exchange has succeeded
           -> requeued          its rank was lost before; trained on at the end of the epoch
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dlio.loader.assignment.history import CommittedBatch, IssuedBatch, parts_of_lost
from dlio.loader.passes import PlannedPass


@dataclass(frozen=True, slots=True)
class SurvivorState:
    """The survivors, and how far lost ranks came."""

    members: Sequence[int]
    last_counted: Mapping[int, int]
    """By lost member, its last exchange that a survivor has taken in."""


@dataclass
class EpochState:
    """The part of a schedule that a rank receives which joins in the middle of an epoch."""

    usual_batch: int
    """Samples of a batch over all ranks, unless a pass makes up for lost ranks."""
    epoch: int = 0
    step: int = 0
    """Number of the batch that was issued last, within the epoch."""
    position: int = 0
    """Position of the epoch's order after the batch that was issued last."""
    samples: int = 0
    """Positions of the epoch, without requeued samples."""
    has_begun: bool = False
    """True once a batch of the epoch was issued, to this rank or before it joined."""
    first_batch: int = 0
    first_members: tuple[int, ...] = ()
    """Global batch and ranks of the pass that the epoch began with."""
    is_exact: bool = True
    drops_last: bool = False
    """Facts of the epoch's order."""
    requeued: list[int] = field(default_factory=list)
    """Samples of this epoch that are trained on at its end."""
    requeued_parts: set[tuple[int, int]] = field(default_factory=set)
    """(step, member) of the batches that these are of."""
    final: dict[int, int] | None = None
    """`SurvivorState.last_counted` when all had trained the epoch; None until then."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON types, in the wire format."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(EpochState)},
            "requeued_parts": sorted(self.requeued_parts),
            "final": None if self.final is None else list(self.final.items()),
        }

    def load_json(self, wire: dict[str, Any]) -> None:
        """Take the state that another rank's `to_json` has written."""
        for each in fields(EpochState):
            setattr(self, each.name, wire[each.name])
        self.first_members = tuple(wire["first_members"])
        self.requeued = list(wire["requeued"])
        self.requeued_parts = {(step, member) for step, member in wire["requeued_parts"]}
        self.final = None if wire["final"] is None else dict(map(tuple, wire["final"]))


class EpochSchedule(EpochState):
    """The batches of one epoch. With `keeps_steps`, batches are larger after a loss, and no more
    than before; otherwise the global batch stays, and there are more batches."""

    def __init__(self, usual_batch: int, keeps_steps: bool) -> None:
        super().__init__(usual_batch, first_batch=usual_batch)
        self.keeps_steps, self.global_batch = keeps_steps, usual_batch
        """`global_batch` has the samples of a batch of the current pass."""
        self.pass_end = 0
        """Position at which the current pass ends."""
        self.open: list[IssuedBatch] = []
        """Batches whose exchange is under way."""
        self.committed: list[CommittedBatch] = []
        """Batches of this epoch whose exchange has ended, whoever contributed."""

    # Events

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch."""
        self.epoch, self.step, self.has_begun, self.final = epoch, 0, False, None
        self.requeued, self.open, self.committed = [], [], []
        self.requeued_parts = set()

    def begin_pass(self, planned: PlannedPass, members: tuple[int, ...], earlier: int) -> None:
        """Note that a pass begins, of which an epoch has several if ranks are lost.

        `earlier` batches of the epoch, at least, came before it was resumed from a checkpoint.
        """
        self.position, self.pass_end = planned.cursor.position, planned.samples
        if self.has_begun:
            return
        self.has_begun = True
        self.first_batch, self.first_members = planned.global_batch, members
        self.is_exact, self.drops_last = planned.formula.exact, planned.formula.drop_last
        self.requeued, self.samples = list(planned.requeued), planned.whole
        self.step = max(self.position // self.global_batch, earlier)

    def issue(self) -> None:
        """Note that the training loop receives the next batch."""
        self.position = min(self.position + self.global_batch, self.pass_end)

    def commit(self, exchange: int, contributors: frozenset[int]) -> None:
        """Note that an exchange has ended, and whose part of the open batches it has."""
        self.committed += [CommittedBatch(batch, exchange, contributors) for batch in self.open]
        self.open = []

    def requeue(self, missing: Mapping[tuple[int, int], list[int]]) -> None:
        """Add samples of lost ranks to the end of the epoch; see `missing`."""
        for part, samples in missing.items():
            self.requeued_parts.add(part)
            self.requeued += samples

    # Questions

    def missing(
        self, survivors: SurvivorState, open_exchange: int | None = None
    ) -> dict[tuple[int, int], list[int]]:
        """Return samples that lost ranks were assigned, that no exchange has, and that are not
        requeued yet; by (step, member).

        `open_exchange` is the exchange under way, for its batches too; None leaves these out.
        """
        batches = self.committed
        if open_exchange is not None:
            # Nobody has contributed to it yet, unless `last_counted` says so.
            following = (CommittedBatch(each, open_exchange, frozenset()) for each in self.open)
            batches = [*batches, *following]
        return {
            (each.batch.step, member): each.batch.span.samples(each.batch.number, member)
            for each, member in parts_of_lost(survivors.members, batches)
            if (each.batch.step, member) not in self.requeued_parts
            and not self.has_contributed(member, each, survivors)
        }

    def has_contributed(
        self, member: int, committed: CommittedBatch, survivors: SurvivorState
    ) -> bool:
        """True if a member's samples of a batch are in the model."""
        # Exchanges whose ranks don't wait for each other know of a lost rank only its last step
        # that somebody took in; those in which all ranks sum together know the contributors.
        last = survivors.last_counted if self.final is None else self.final
        if member in last:
            return committed.exchange <= last[member]
        return member in committed.contributors

    def of_lost(self, survivors: SurvivorState) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, member, samples) of lost ranks for what of them is in the model."""
        for each, member in parts_of_lost(survivors.members, self.committed):
            if self.has_contributed(member, each, survivors):
                batch = each.batch
                yield self.epoch, batch.step, member, batch.span.samples(batch.number, member)

    def is_over(self) -> bool:
        """True if no batch of the epoch is left, with those that are requeued so far."""
        return self._remaining < (self.usual_batch if self.drops_last else 1)

    def next_batch(self) -> int | None:
        """Return the global batch of the pass that continues the epoch; None for the usual one."""
        steps = _ceildiv(self.samples - self.position, self.usual_batch)
        if not self.is_exact and steps > 0:
            # Positions of an inexact mode belong to nodes: only the same batches reach all of them.
            return self.first_batch
        larger = _ceildiv(self._remaining, steps) if self.keeps_steps and steps > 0 else 0
        return larger if larger > self.usual_batch else None

    def left(self) -> int:
        """Return the number of batches after this one in the current pass."""
        return _ceildiv(self.pass_end - self.position, self.global_batch)

    def coming(self, survivors: SurvivorState, pass_goes_on: bool) -> int:
        """Return the number of batches of the epoch after this one, whoever shares them.
        `pass_goes_on` is true if the same ranks share the next batch, too."""
        whole = operator.floordiv if self.drops_last else _ceildiv
        requeued = len(self.requeued) + sum(map(len, self.missing(survivors).values()))
        rest = self.samples - self.position
        if pass_goes_on:
            of_pass = self.pass_end - self.position
            in_pass = whole(of_pass, self.global_batch)
            return in_pass + whole(rest + requeued - of_pass, self.usual_batch)
        steps = _ceildiv(rest, self.usual_batch)
        if not self.is_exact and steps > 0:
            return whole(rest, self.first_batch) + whole(requeued, self.usual_batch)
        larger = _ceildiv(rest + requeued, steps) if self.keeps_steps and steps > 0 else 0
        return whole(rest + requeued, max(larger, self.usual_batch))

    @property
    def _remaining(self) -> int:
        return self.samples + len(self.requeued) - self.position


def _ceildiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
