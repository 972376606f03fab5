"""Which ranks train next: spares join, and ranks leave, only where all active ranks meet."""

import random

import pytest

from dlio.comm.survival.active_ranks import (
    MembershipReport,
    RankRequest,
    is_meeting_due,
    leaving_members,
    next_members,
)


def _ranks(active: int, spares: int, wanted: int, meets: bool = True) -> list[MembershipReport]:
    newest = RankRequest(1, wanted)
    return [
        MembershipReport(member, member < active, False, meets and member < active, newest)
        for member in range(active + spares)
    ]


def _leaving(ranks: list[MembershipReport], *members: int) -> list[MembershipReport]:
    return [each._replace(leaves=each.member in members) for each in ranks]


def test_nobody_joins_or_leaves_where_ranks_have_not_met() -> None:
    ranks = _leaving(_ranks(2, 2, 4, meets=False), 0)
    assert next_members(ranks) == (0, 1)
    assert leaving_members(ranks, (0, 1)) == set()
    assert is_meeting_due(ranks)


@pytest.mark.parametrize(
    ("active", "spares", "wanted", "leaving", "then", "end"),
    [
        (2, 2, 2, (), (0, 1), set()),
        (2, 2, 3, (), (0, 1, 2), set()),
        (2, 2, 9, (), (0, 1, 2, 3), set()),
        (4, 0, 2, (), (0, 1), {2, 3}),
        (3, 1, 3, (0,), (1, 2, 3), {0}),
        (3, 0, 3, (0, 1), (2,), {0, 1}),
        (2, 1, 2, (0, 1), (0, 1, 2), set()),  # Somebody has to have the model.
        (2, 1, 2, (0, 1, 2), (), {0, 1, 2}),
        (2, 2, 2, (3,), (0, 1), {3}),  # A spare leaves, too.
    ],
)
def test_a_meeting_brings_as_many_ranks_as_are_wanted(
    active: int,
    spares: int,
    wanted: int,
    leaving: tuple[int, ...],
    then: tuple[int, ...],
    end: set[int],
) -> None:
    ranks = _leaving(_ranks(active, spares, wanted), *leaving)
    assert next_members(ranks) == then
    assert leaving_members(ranks, then) == end
    assert is_meeting_due(ranks) == (then != tuple(range(active)))


def test_at_the_jobs_beginning_the_last_ranks_become_spares_and_do_not_end() -> None:
    ranks = [each._replace(wanted=RankRequest(0, 2)) for each in _ranks(4, 0, 2)]
    assert next_members(ranks) == (0, 1)
    assert leaving_members(ranks, (0, 1)) == set()


def test_only_the_newest_request_holds() -> None:
    ranks = _ranks(2, 2, 2)
    ranks[3] = ranks[3]._replace(wanted=RankRequest(2, 4))
    assert next_members(ranks) == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(50))
def test_meetings_come_to_rest(seed: int) -> None:
    """Whoever leaves, there is an end of meetings, and nobody is called who is to leave."""
    draw = random.Random(seed)
    ranks = _ranks(draw.randint(1, 4), draw.randint(0, 4), draw.randint(1, 6))
    ranks = _leaving(ranks, *(each.member for each in ranks if draw.random() < 0.3))
    for _ in range(3):
        if not is_meeting_due(ranks):
            break
        members = next_members(ranks)
        ended = leaving_members(ranks, members)
        ranks = [
            each._replace(active=each.member in members, meets=each.member in members)
            for each in ranks
            if each.member not in ended
        ]
    assert not is_meeting_due(ranks)
    assert not any(each.active and each.leaves for each in ranks)
