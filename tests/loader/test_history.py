"""The batches of an epoch, as a rank gets them that joins in its midst."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from dlio.loader.assignment.history import (
    AssignmentSpan,
    CommittedBatch,
    IssuedBatch,
    SpanRecord,
    history_from_json,
    history_to_json,
    parts_of_lost,
)


class _Batches:
    """A pass whose state is a number."""

    def __init__(self, number: int) -> None:
        self.number, self.requeued = number, ()
        self.cursor = SimpleNamespace(position=number)
        self.shares = SimpleNamespace(counts=(2, 2))
        self.formula = SimpleNamespace(left=None, members=())

    def state_at(self, position: int, _: object) -> Mapping[str, int]:
        return {"position": position}


class _Loader:
    def recall_span(self, record: SpanRecord) -> AssignmentSpan:
        batches: Any = _Batches(record.state["position"])
        return AssignmentSpan(batches, None, tuple(record.members))


def test_a_rank_that_joins_between_accumulated_batches_knows_those_that_are_not_committed() -> None:
    """A rank that is lost in their step later brings none of them in: all requeue its samples."""
    of_both: Any = _Batches(0)
    span = AssignmentSpan(of_both, None, (0, 1))
    committed = [CommittedBatch(IssuedBatch(span, 0, 0, 0), 1, frozenset({0, 1}))]
    issued = [IssuedBatch(span, 1, 1, 1)]
    wire = history_to_json(committed, issued)
    known, under_way = history_from_json(wire, _Loader())
    assert [(each.batch.step, each.exchange, each.contributors) for each in known] == [
        (0, 1, frozenset({0, 1}))
    ]
    assert [(each.step, each.number, each.update) for each in under_way] == [(1, 1, 1)]
    whole = [*known, *(CommittedBatch(each, 2, frozenset({0})) for each in under_way)]
    assert [(each.batch.step, member) for each, member in parts_of_lost((0,), whole)] == [
        (0, 1),
        (1, 1),
    ]
