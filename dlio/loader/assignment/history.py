"""The batches of an epoch that its ranks were issued, and whose samples entered the model.

A rank that joins in the middle of an epoch receives this history: when another rank is lost later,
it has to know, as the others do, which samples that rank had been assigned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from dlio.loader.passes import FormulaOrder, PlannedPass
from dlio.plan.epoch import EpochPlan, WindowPlan, plan_epoch
from dlio.plan.rank_shares import RankShares
from dlio.plan.sample_mask import SampleMask

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class AssignmentSpan:
    """A run of batches that are assigned to the same ranks."""

    batches: PlannedPass
    plan: EpochPlan | None
    """None if positions of the order alone decide which rank gets which sample."""
    members: tuple[int, ...]
    """Number of each of its ranks when the job began."""
    planners: dict[int, WindowPlan] = field(default_factory=dict)
    """By member; filled on demand: only the shares of lost ranks are ever asked for."""

    def samples(self, batch: int, member: int) -> list[int]:
        """Return a member's samples of one of the span's batches."""
        rank = self.members.index(member) if self.members else member
        if self.plan is None:
            return self.batches.part(batch, rank)
        if member not in self.planners:
            if self.plan.left is not None:
                began = self.batches.formula.members
                rank = began.index(member) if member in began else -1
            self.planners[member] = plan_epoch(replace(self.plan, rank=rank))
        window = self.planners[member].window(range(batch, batch + 1))
        samples: list[int] = window.samples.tolist()
        return samples


@dataclass(frozen=True, slots=True, eq=False)
class IssuedBatch:
    """A batch that the training loop has received."""

    span: AssignmentSpan
    number: int
    """Within its span."""
    step: int
    """Within its epoch."""
    update: int
    """Number of the optimizer step that uses it, since the run began."""


@dataclass(frozen=True, slots=True, eq=False)
class CommittedBatch:
    """A batch whose gradients, or the weights trained on it, entered the model."""

    batch: IssuedBatch
    exchange: int
    """Number of the exchange of gradients or weights that brought it into the model."""
    contributors: frozenset[int]
    """Members whose part entered."""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """An `AssignmentSpan` as JSON types; the names are those of the wire format."""

    members: Sequence[int]
    state: dict[str, Any]
    """State that the pass began with."""
    shares: Sequence[int]
    left: Sequence[int] | None
    began: Sequence[int]
    node_of: Sequence[int] | None
    """Node of each rank; None for a span without a plan."""

    @classmethod
    def of(cls, span: AssignmentSpan) -> "SpanRecord":
        batches, formula = span.batches, span.batches.formula
        return cls(
            members=span.members,
            state=batches.state_at(batches.cursor.position, batches.requeued),
            shares=batches.shares.counts,
            left=formula.left,
            began=formula.members,
            node_of=None if span.plan is None else span.plan.ranks.node_of.tolist(),
        )

    def planned(self, formula: FormulaOrder, mask: tuple[int, SampleMask] | None) -> PlannedPass:
        """Return the pass; `formula` is this rank's order, of which all but the ranks' shares is
        the same."""
        order = replace(
            formula,
            rank=0,
            shares=RankShares(tuple(self.shares), formula.shares.fewest),
            left=None if self.left is None else tuple(self.left),
            members=tuple(self.began),
        )
        return PlannedPass(self.state, order, mask)


class SpanSource(Protocol):
    """A loader that can make a span which other ranks began."""

    def recall_span(self, record: SpanRecord) -> AssignmentSpan: ...


def history_to_json(
    committed: Sequence[CommittedBatch], issued: Sequence[IssuedBatch] = ()
) -> dict[str, Any]:
    """Return the batches of an epoch as JSON types, each span and set of members once. The last
    ones are `issued`, and not committed yet: batches that accumulate, or of a round."""
    # An epoch has thousands of batches, and a handful of spans and sets of contributors.
    batches = [*committed, *(CommittedBatch(each, 0, frozenset()) for each in issued)]
    spans = _numbered(each.batch.span for each in batches)
    contributors = _numbered(each.contributors for each in batches)
    return {
        "deals": [asdict(SpanRecord.of(span)) for span in spans],
        "counted": [sorted(members) for members in contributors],
        "batches": [
            [
                spans[each.batch.span],
                each.batch.number,
                each.batch.step,
                each.batch.update,
                each.exchange,
                contributors[each.contributors],
            ]
            for each in batches
        ],
        "issued": len(issued),
    }


def history_from_json(
    history: dict[str, Any], loader: SpanSource
) -> tuple[list[CommittedBatch], list[IssuedBatch]]:
    """Return the committed and the issued batches that another rank has described by
    `history_to_json`."""
    spans = [loader.recall_span(SpanRecord(**each)) for each in history["deals"]]
    contributors = [frozenset(members) for members in history["counted"]]
    batches = [
        CommittedBatch(
            IssuedBatch(spans[span], number, step, update), exchange, contributors[members]
        )
        for span, number, step, update, exchange, members in history["batches"]
    ]
    committed = len(batches) - history["issued"]
    return batches[:committed], [each.batch for each in batches[committed:]]


def parts_of_lost(
    survivors: Iterable[int], batches: Iterable[CommittedBatch]
) -> Iterator[tuple[CommittedBatch, int]]:
    """Yield each batch with each member that it was assigned to and that has been lost since."""
    living = frozenset(survivors)
    # By span: an epoch has thousands of batches and a handful of spans.
    lost: dict[AssignmentSpan, list[int]] = {}
    for each in batches:
        span = each.batch.span
        if span not in lost:
            lost[span] = [member for member in span.members if member not in living]
        for member in lost[span]:
            yield each, member


def _numbered(values: Iterable[_T]) -> dict[_T, int]:
    """Return the different values, each with its number."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}
