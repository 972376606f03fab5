"""Which ranks share which batch, when ranks are lost one after another."""

from types import SimpleNamespace
from typing import Any, cast

from dlio.loader.assignment.rank_groups import BatchReport, RankGroups


def _shares(groups: RankGroups) -> tuple[int, ...]:
    return groups.members


def _ranks(count: int) -> tuple[list[RankGroups], SimpleNamespace]:
    membership = SimpleNamespace(members=tuple(range(count)), me=0, due=False)
    recovery = cast(
        Any, SimpleNamespace(membership=membership, number=0, at_rendezvous=False, last_counted={})
    )
    membership.recovery = recovery
    return [RankGroups(recovery) for _ in range(count)], membership


def _lose(groups: list[RankGroups], membership: SimpleNamespace, member: int) -> None:
    membership.members = tuple(each for each in membership.members if each != member)
    reports: list[BatchReport] = [groups[each].report() for each in membership.members]
    for each in membership.members:
        groups[each].reconcile(reports)
    membership.recovery.number += 1


def test_a_batch_that_any_rank_has_taken_stays_shared_as_it_was() -> None:
    groups, membership = _ranks(4)
    for rank, taken in enumerate((5, 6, 5, 6)):
        groups[rank].taken = taken
    _lose(groups, membership, 3)
    assert _shares(groups[0]) == (0, 1, 2, 3)  # Rank 1 has taken batch 5.
    assert _shares(groups[1]) == (0, 1, 2)
    groups[0].taken += 1
    assert _shares(groups[0]) == (0, 1, 2)


def test_a_second_loss_leaves_what_was_shared_between_the_two() -> None:
    """Rank 1 goes ahead after the first loss, by a batch that only three share."""
    groups, membership = _ranks(4)
    for each in groups:
        each.taken = 5
    _lose(groups, membership, 3)
    groups[1].taken = 6
    _lose(groups, membership, 2)
    assert _shares(groups[0]) == (0, 1, 2)
    assert _shares(groups[1]) == (0, 1)
    groups[0].taken = 6
    assert _shares(groups[0]) == (0, 1)


def test_a_loss_before_anything_was_taken_forgets_the_lost() -> None:
    groups, membership = _ranks(3)
    _lose(groups, membership, 1)
    assert _shares(groups[0]) == _shares(groups[2]) == (0, 2)


def test_without_losses_nobody_is_named() -> None:
    assert RankGroups(None).members == ()


def test_ranks_meet_where_the_furthest_is_if_others_are_to_join() -> None:
    groups, membership = _ranks(2)
    groups[0].taken, groups[1].taken = 3, 4
    membership.due = True
    _lose(groups, membership, 9)  # Nobody is lost: a rank has asked the others.
    assert (groups[0].meets, groups[1].meets) == (False, True)
    groups[0].taken += 1
    assert groups[0].meets
    membership.members, membership.due, membership.recovery.at_rendezvous = (0, 1, 2), False, True
    newcomer = RankGroups(membership.recovery)
    newcomer.adopt(groups[0].report())
    for each in (*groups, newcomer):
        each.reconcile([each.report()] * 3)
        assert (each.taken, each.members, each.meets) == (4, (0, 1, 2), False)
