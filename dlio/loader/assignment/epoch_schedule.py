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
from dataclasses import dataclass
from typing import Any, Self

from dlio.loader.assignment.history import (
    CommittedBatch,
    IssuedBatch,
    SpanSource,
    history_from_json,
    history_to_json,
    parts_of_lost,
)
from dlio.loader.passes import PlannedPass


@dataclass(frozen=True, slots=True)
class SurvivorState:
    """The ranks that are left, and how far lost ones came."""

    members: Sequence[int]
    last_counted: Mapping[int, int]
    """By lost member, its last exchange that a survivor has taken in."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The schedule and the loaders' passes, for a rank that joins in the middle of an epoch."""

    epoch: int
    step: int
    position: int
    samples: int
    has_begun: bool
    first_batch: int
    first_members: tuple[int, ...]
    usual_batch: int
    is_exact: bool
    drops_last: bool
    requeued: list[int]
    requeued_parts: frozenset[tuple[int, int]]
    final: dict[int, int] | None
    passes: list[int]
    """Passes of each loader so far."""
    history: dict[str, Any]
    """See `history_to_json`."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types, in the wire format."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "position": self.position,
            "samples": self.samples,
            "has_begun": self.has_begun,
            "begun": [self.first_batch, self.first_members, self.usual_batch],
            "order": [self.is_exact, self.drops_last],
            "again": self.requeued,
            "comes_again": sorted(self.requeued_parts),
            "final": None if self.final is None else list(self.final.items()),
            "passes": self.passes,
            "history": self.history,
        }

    @classmethod
    def from_json(cls, wire: dict[str, Any]) -> Self:
        """Return the record that `to_json` has written."""
        first_batch, first_members, usual_batch = wire["begun"]
        is_exact, drops_last = wire["order"]
        return cls(
            epoch=wire["epoch"],
            step=wire["step"],
            position=wire["position"],
            samples=wire["samples"],
            has_begun=wire["has_begun"],
            first_batch=first_batch,
            first_members=tuple(first_members),
            usual_batch=usual_batch,
            is_exact=is_exact,
            drops_last=drops_last,
            requeued=list(wire["again"]),
            requeued_parts=frozenset((step, member) for step, member in wire["comes_again"]),
            final=None if wire["final"] is None else dict(map(tuple, wire["final"])),
            passes=wire["passes"],
            history=wire["history"],
        )


class EpochSchedule:
    """The batches of one epoch.

    Args:
        usual_batch: samples of a batch over all ranks, unless `keeps_steps` makes it larger.
        keeps_steps: after a loss, have larger batches and no more of them than before; otherwise
            the global batch stays, and there are more batches.
    """

    def __init__(self, usual_batch: int, keeps_steps: bool) -> None:
        self.usual_batch, self.keeps_steps = usual_batch, keeps_steps
        self.global_batch = usual_batch
        """Samples of a batch of the current pass."""
        self.epoch = 0
        self.position = 0
        """Position of the epoch's order after the batch that was issued last."""
        self.step = 0
        """Number of the batch that was issued last, within the epoch."""
        self.samples = self.pass_end = 0
        """Positions of the epoch without requeued samples; position at which the pass ends."""
        self.has_begun = False
        """True once a batch of the epoch was issued, to this rank or before it joined."""
        self.first_batch, self.first_members = usual_batch, tuple[int, ...]()
        """Global batch and ranks of the pass that the epoch began with."""
        self.is_exact, self.drops_last = True, False
        """Facts of the epoch's order."""
        self.requeued: list[int] = []
        """Samples of this epoch that are trained on at its end."""
        self.requeued_parts: set[tuple[int, int]] = set()
        """(step, member) of the batches that these are of."""
        self.open: list[IssuedBatch] = []
        """Batches whose exchange is under way."""
        self.committed: list[CommittedBatch] = []
        """Batches of this epoch whose exchange has ended, whoever contributed."""
        self.final: dict[int, int] | None = None
        """`SurvivorState.last_counted` when all had trained the epoch; None until then."""

    # Events

    def begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch."""
        self.epoch, self.step, self.has_begun, self.final = epoch, 0, False, None
        self.requeued, self.open, self.committed = [], [], []
        self.requeued_parts = set()

    def begin_pass(self, planned: PlannedPass, members: tuple[int, ...], earlier: int) -> None:
        """Note that a pass begins, of which an epoch has several if ranks are lost.

        Args:
            members: ranks that share it.
            earlier: batches of the epoch before it was resumed from a checkpoint, at least.
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

    def adopt(self, record: EpochRecord, loader: SpanSource) -> None:
        """Be where another rank is."""
        self.epoch, self.step, self.position = record.epoch, record.step, record.position
        self.samples, self.has_begun = record.samples, record.has_begun
        self.first_batch, self.first_members = record.first_batch, record.first_members
        self.usual_batch = record.usual_batch
        self.is_exact, self.drops_last = record.is_exact, record.drops_last
        self.requeued, self.requeued_parts = list(record.requeued), set(record.requeued_parts)
        self.final = record.final
        self.committed = history_from_json(record.history, loader)
        self.open = []

    # Questions

    def record(self, passes: list[int]) -> EpochRecord:
        """Return what a rank has to know that joins now."""
        return EpochRecord(
            epoch=self.epoch,
            step=self.step,
            position=self.position,
            samples=self.samples,
            has_begun=self.has_begun,
            first_batch=self.first_batch,
            first_members=self.first_members,
            usual_batch=self.usual_batch,
            is_exact=self.is_exact,
            drops_last=self.drops_last,
            requeued=self.requeued,
            requeued_parts=frozenset(self.requeued_parts),
            final=self.final,
            passes=passes,
            history=history_to_json(self.committed),
        )

    def missing(
        self, survivors: SurvivorState, open_exchange: int | None = None
    ) -> dict[tuple[int, int], list[int]]:
        """Return samples that lost ranks were assigned, that no exchange has, and that are not
        requeued yet; by (step, member).

        Args:
            open_exchange: number of the exchange under way, for its batches too; None to leave
                these out.
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

        Args:
            pass_goes_on: True if the same ranks share the next batch, too.
        """
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
