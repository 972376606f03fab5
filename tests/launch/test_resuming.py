"""Which ranks of a lost node are told of, when some of them were lost before the others."""

from dlio.comm.survival.recovery import MeasuredLoss
from dlio.launch.node.job_starts import Incident
from dlio.train.memory_snapshot.job_restart import unreported_ranks

_INCIDENT = Incident((2, 3), ("b", "b"), 0.0)


def _loss(kind: str, *ranks: int) -> MeasuredLoss:
    nodes = ("b",) * len(ranks)
    return MeasuredLoss(ranks, nodes, 0, 0, 0, left=2, seconds=0, renew_s=0, settle_s=0, kind=kind)


def test_all_ranks_of_the_node_are_told_of() -> None:
    assert unreported_ranks(_INCIDENT, []) == [(2, "b"), (3, "b")]


def test_a_rank_that_was_lost_just_before_is_not_told_of_twice() -> None:
    assert unreported_ranks(_INCIDENT, [_loss("lost", 3)]) == [(2, "b")]
    assert unreported_ranks(_INCIDENT, [_loss("lost", 3), _loss("lost", 2)]) == []


def test_a_rank_that_had_been_started_again_is_told_of() -> None:
    before = [_loss("lost", 3), _loss("restart")]
    assert unreported_ranks(_INCIDENT, before) == [(2, "b"), (3, "b")]
