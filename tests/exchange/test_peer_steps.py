"""Steps of other ranks that have reached a rank, over losses."""

from types import SimpleNamespace
from typing import Any

from dlio.exchange.peer_steps import PeerReport, PeerSteps


def test_the_last_step_that_any_rank_has_taken_in_counts_also_after_that_rank_is_lost() -> None:
    members: Any = SimpleNamespace(members=(0, 1, 2, 3))
    recovery: Any = SimpleNamespace(membership=members, last_counted={})
    ranks = [PeerSteps(recovery) for _ in range(4)]
    assert ranks[0].members([1, 3]) == (1, 3)
    ranks[0].note([3], 4)
    ranks[1].note([3, 2], 7)
    ranks[1].note([3], 6)
    members.members = (0, 1, 2)
    _reconcile(ranks[:3])
    assert recovery.last_counted == {3: 7}
    assert ranks[0].members([2]) == (2,)
    members.members = (0, 2)
    _reconcile([ranks[0], ranks[2]])
    assert recovery.last_counted == {3: 7, 1: 0}


def test_where_the_job_ends_with_any_rank_nothing_is_noted() -> None:
    hearing = PeerSteps(None)
    assert hearing.members([0, 1]) == ()
    hearing.note(hearing.members([1]), 3)
    assert hearing.report() == ()


def _reconcile(ranks: list[PeerSteps]) -> None:
    reports = [PeerReport(each.report()) for each in ranks]
    for each in ranks:
        each.reconcile(reports)
