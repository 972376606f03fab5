"""Sums in hops: every rank's share of every part is added once, in few messages, of few bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.plan.sum_grid import SumHop, dimensions, hops, most_messages, owners


def _messages(mine: list[SumHop]) -> int:
    return sum(len(hop.shares) + len(hop.sources) for hop in mine)


def _parts_sent(mine: list[SumHop]) -> int:
    shares = sum(len(parts) for hop in mine for _, parts in hop.shares)
    return shares + sum(len(hop.parts) * len(hop.sources) for hop in mine)


@given(st.integers(1, 150))
def test_each_part_gets_the_share_of_every_rank_once(ranks: int) -> None:
    plans = [hops(ranks, rank) for rank in range(ranks)]
    held = [{part: {rank} for part in range(ranks)} for rank in range(ranks)]
    met = set()
    for number in range(max(map(len, plans))):
        before = [dict(each) for each in held]
        for rank, plan in enumerate(plans):
            if number >= len(plan):
                continue
            hop = plan[number]
            held[rank] = {part: set(before[rank][part]) for part in hop.parts}
            for source in hop.sources:
                assert (rank, hop.parts) in plans[source][number].shares
                assert (source, rank) not in met, "two messages between two ranks"
                met.add((source, rank))
                for part in hop.parts:
                    assert not held[rank][part] & before[source][part], "a share is added twice"
                    held[rank][part] |= before[source][part]
        for rank, plan in enumerate(plans):
            for peer, parts in plan[number].shares if number < len(plan) else ():
                assert rank in plans[peer][number].sources
                assert parts == plans[peer][number].parts
    owned = [part for each in held for part in each]
    assert sorted(owned) == list(range(ranks))
    assert all(len(shares) == ranks for each in held for shares in each.values())


@given(st.integers(2, 150))
def test_no_rank_sends_more_than_told_nor_half_as_many_bytes_again(ranks: int) -> None:
    plans = [hops(ranks, rank) for rank in range(ranks)]
    assert max(map(_messages, plans)) <= most_messages(ranks)
    assert max(map(_parts_sent, plans)) <= 1.25 * 2 * (ranks - 1)
    assert sum(map(_parts_sent, plans)) == ranks * 2 * (ranks - 1)


@pytest.mark.parametrize(
    ("ranks", "messages"),
    [(1, 0), (3, 4), (4, 6), (5, 6), (6, 6), (8, 8), (16, 12), (32, 20), (1024, 40), (10_000, 55)],
)
def test_messages_grow_with_the_logarithm_of_ranks(ranks: int, messages: int) -> None:
    asked = range(0, ranks, max(1, ranks // 50))
    assert max(_messages(hops(ranks, rank)) for rank in asked) == messages
    assert most_messages(ranks) - messages in (0, 1)  # One more for ranks that fill no grid.


def test_up_to_four_ranks_sum_in_one_hop() -> None:
    assert [dimensions(ranks) for ranks in (2, 3, 4, 5, 64, 65, 512, 513)] == [
        1, 1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    for rank in range(4):
        (hop,) = hops(4, rank)
        assert hop.parts == range(rank, rank + 1)
        assert [peer for peer, _ in hop.shares] == [(rank + step) % 4 for step in (1, 2, 3)]


def test_short_regions_have_fewer_owners_in_a_grid_only() -> None:
    assert owners(4, 10) == 4
    assert owners(16, 10) == 1
    assert owners(16, 1 << 20) == 16
    assert owners(10_000, 1 << 18) == 64
