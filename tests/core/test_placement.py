"""Every block has at most one home, within capacity; shares are even, and homes are stable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.placement import Node, place


def _even(count: int, nodes: int, capacity: int = 1 << 60) -> np.ndarray:
    names = [Node(f"node{k}", (capacity,)) for k in range(nodes)]
    return place(np.full(count, 100, np.int64), names, "key").home


@given(
    st.lists(st.integers(1, 1000), max_size=60),
    st.lists(st.lists(st.integers(0, 8000), min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_no_tier_holds_more_than_its_capacity(sizes: list[int], tiers: list[list[int]]) -> None:
    block_bytes = np.array(sizes, np.int64)
    nodes = [Node(f"n{k}", tuple(capacities)) for k, capacities in enumerate(tiers)]
    placed = place(block_bytes, nodes, "data")
    assert ((placed.home < 0) == (placed.tier < 0)).all()
    free = []
    for number, node in enumerate(nodes):
        for tier, capacity in enumerate(node.capacities):
            held = block_bytes[(placed.home == number) & (placed.tier == tier)].sum()
            assert held <= capacity
            free.append(capacity - held)
    # What stays in the source would not have fitted anywhere.
    left = block_bytes[placed.home < 0]
    if len(left):
        assert left.min() > max(free)


@pytest.mark.parametrize("nodes", [2, 3, 8, 100])
def test_shares_are_even_to_about_a_block(nodes: int) -> None:
    counts = np.bincount(_even(5000, nodes), minlength=nodes)
    assert counts.max() - counts.min() <= 2


def test_shares_follow_capacity() -> None:
    nodes = [Node("small", (1 << 20,)), Node("large", (3 << 20,))]
    counts = np.bincount(place(np.full(4000, 100, np.int64), nodes, "k").home)
    assert counts.tolist() == pytest.approx([1000, 3000], abs=2)


def test_storage_that_is_too_small_is_filled_evenly() -> None:
    counts = np.bincount(_even(1000, 4, capacity=12_500) + 1)
    assert counts.tolist() == [500, 125, 125, 125, 125]


def test_the_fastest_tier_is_filled_first() -> None:
    placed = place(np.full(10, 10, np.int64), [Node("n", (35, 1000))], "k")
    assert np.bincount(placed.tier).tolist() == [3, 7]


@pytest.mark.parametrize(("before", "limit"), [(2, 0.5), (4, 0.35), (16, 0.2)])
def test_few_blocks_move_when_a_node_joins(before: int, limit: float) -> None:
    moved = float((_even(8000, before) != _even(8000, before + 1)).mean())
    assert 1 / (before + 1) * 0.9 <= moved <= limit


def test_without_capacity_all_stays_in_the_source() -> None:
    placed = place(np.full(3, 10, np.int64), [Node("n", ()), Node("m", (0,))], "k")
    assert (placed.home == -1).all()


def test_homes_are_the_same_everywhere() -> None:
    assert _even(12, 3).tolist() == _even(12, 3).tolist()
    assert len(place(np.empty(0, np.int64), [Node("n", (1,))], "k").home) == 0
