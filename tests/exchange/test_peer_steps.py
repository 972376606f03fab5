"""Steps of other ranks that have reached a rank, over losses."""

from types import SimpleNamespace
from typing import Any

from dlio.exchange.peer_steps import PeerReport, PeerSteps


def test_a_step_of_a_lost_rank_counts_as_long_as_any_rank_has_taken_it_in() -> None:
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
    # Only rank 1 had the steps of rank 3 after the fourth one: no weights hold them any more.
    assert recovery.last_counted == {3: 4, 1: 0}


def test_others_take_in_with_a_ranks_weights_the_steps_that_these_hold() -> None:
    members: Any = SimpleNamespace(members=(0, 1, 2), me=1)
    recovery: Any = SimpleNamespace(membership=members, last_counted={})
    ranks = [PeerSteps(recovery) for _ in range(3)]
    ranks[1].note([2], 5)
    ranks[0].take_in(ranks[1].carried(made=6))
    assert ranks[0].heard == {0: 0, 1: 6, 2: 5}
    members.members = (0,)  # Both at once: who had told rank 0 is lost with whom it told of.
    _reconcile(ranks[:1])
    assert recovery.last_counted == {1: 6, 2: 5}


def test_where_the_job_ends_with_any_rank_nothing_is_noted() -> None:
    hearing = PeerSteps(None)
    assert hearing.members([0, 1]) == ()
    hearing.note(hearing.members([1]), 3)
    assert hearing.report() == ()


def _reconcile(ranks: list[PeerSteps]) -> None:
    reports = [PeerReport(each.report()) for each in ranks]
    for each in ranks:
        each.reconcile(reports)
