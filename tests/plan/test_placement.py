"""Every block has at most one home, within capacity; shares are even, and homes are stable."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.plan.placement import HomeNode, Placement, _log2, place

AMPLE = 1 << 50


def _equal(count: int, nodes: int, capacity: int = AMPLE, key: str = "key") -> Placement:
    """Blocks of 100 bytes on equal nodes."""
    names = [HomeNode(f"node{number}", (capacity,)) for number in range(nodes)]
    return place(np.full(count, 100, np.int64), names, key)


@given(
    st.lists(st.integers(1, 1000), max_size=60),
    st.lists(st.lists(st.integers(0, 8000), max_size=3), min_size=1, max_size=5),
)
def test_no_tier_holds_more_than_its_capacity(sizes: list[int], tiers: list[list[int]]) -> None:
    block_bytes = np.array(sizes, np.int64)
    nodes = [HomeNode(f"n{k}", tuple(capacities)) for k, capacities in enumerate(tiers)]
    placed = place(block_bytes, nodes, "data")
    assert ((placed.home < 0) == (placed.tier < 0)).all()
    free = [0]
    for number, node in enumerate(nodes):
        for tier, capacity in enumerate(node.capacities):
            held = int(block_bytes[(placed.home == number) & (placed.tier == tier)].sum())
            assert held <= capacity
            free.append(capacity - held)
    # Blocks that stay in the source would not have fitted anywhere.
    left = block_bytes[placed.home < 0]
    if len(left):
        assert left.min() > max(free)


@given(st.lists(st.integers(500, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_with_room_for_all_shares_are_even_to_two_blocks(sizes: list[int], nodes: int) -> None:
    block_bytes = np.array(sizes, np.int64)
    placed = place(block_bytes, [HomeNode(f"n{k}", (AMPLE, AMPLE)) for k in range(nodes)], "data")
    assert (placed.home >= 0).all()
    loads = np.bincount(placed.home, block_bytes, minlength=nodes)
    assert np.abs(loads - block_bytes.sum() / nodes).max() <= 2 * block_bytes.max()


@pytest.mark.parametrize("blocks", [450, 5000])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 64, 100])
def test_shares_of_equal_blocks_are_even_to_one(blocks: int, nodes: int) -> None:
    counts = np.bincount(_equal(blocks, nodes).home, minlength=nodes)
    assert counts.sum() == blocks
    assert counts.max() - counts.min() <= 1


def test_shares_follow_capacity() -> None:
    nodes = [
        HomeNode("small", (1 << 20,)),
        HomeNode("large", (1 << 20, 2 << 20)),
        HomeNode("none", ()),
    ]
    counts = np.bincount(place(np.full(4000, 100, np.int64), nodes, "k").home, minlength=3)
    assert counts.tolist() == pytest.approx([1000, 3000, 0], abs=1)


def test_storage_that_is_too_small_is_filled_on_every_node() -> None:
    counts = np.bincount(_equal(1000, 4, capacity=12_500).home + 1)
    assert counts.tolist() == [500, 125, 125, 125, 125]


def test_at_most_a_block_of_a_tier_is_wasted() -> None:
    sizes = np.random.default_rng(0).integers(50, 100, 1000)
    nodes = [HomeNode(f"n{k}", (1000 + 37 * k, 5000)) for k in range(5)]
    placed = place(sizes, nodes, "k")
    held = sizes[placed.home >= 0].sum()
    assert sum(sum(node.capacities) for node in nodes) - held <= 10 * 100


def test_the_fastest_tier_is_filled_first() -> None:
    placed = place(np.full(10, 10, np.int64), [HomeNode("n", (35, 1000))], "k")
    assert placed.tier.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("blocks", "nodes", "limit"),
    [
        (8000, 1, 0.5),
        (8000, 2, 0.36),
        (8000, 4, 0.23),
        (8000, 8, 0.135),
        (8000, 16, 0.08),
        (8000, 64, 0.035),
        # Seven blocks a node before, six or seven after.
        (450, 64, 0.09),
    ],
)
@pytest.mark.parametrize("key", ["key", "another"])
def test_few_blocks_move_when_a_node_joins_or_leaves(
    blocks: int, nodes: int, limit: float, key: str
) -> None:
    few, more = (_equal(blocks, count, key=key).home for count in (nodes, nodes + 1))
    moved = float((few != more).mean())
    # No even placement does with less than the share of the node that joins.
    assert blocks // (nodes + 1) / blocks <= moved <= limit


def test_a_node_keeps_its_blocks_whatever_its_number() -> None:
    names = [f"node{number}" for number in range(5)]
    forward = place(np.full(900, 100, np.int64), [HomeNode(name, (AMPLE,)) for name in names], "k")
    backward = place(
        np.full(900, 100, np.int64), [HomeNode(name, (AMPLE,)) for name in names[::-1]], "k"
    )
    assert np.array_equal(forward.home, 4 - backward.home)


def test_data_sets_are_placed_independently() -> None:
    same = _equal(4000, 4, key="one").home == _equal(4000, 4, key="other").home
    assert same.mean() == pytest.approx(1 / 4, abs=0.04)


def test_without_capacity_all_stays_in_the_source() -> None:
    for nodes in ([], [HomeNode("n", ()), HomeNode("m", (0,))], [HomeNode("n", (9, 9))]):
        placed = place(np.full(3, 10, np.int64), nodes, "k")
        assert (placed.home == -1).all()
        assert (placed.tier == -1).all()
    assert len(place(np.empty(0, np.int64), [HomeNode("n", (1,))], "k").home) == 0


def test_homes_are_the_same_on_every_machine() -> None:
    assert _equal(16, 3).home.tolist() == [2, 1, 1, 1, 1, 2, 1, 2, 1, 0, 2, 0, 2, 0, 0, 0]
    nodes = [HomeNode("a", (250, 300)), HomeNode("b", (900,)), HomeNode("c", (100, 100))]
    placed = place(np.full(20, 100, np.int64), nodes, "key")
    assert placed.home.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 2, 1, 2, 0, 0, -1, -1, -1, -1]
    assert placed.tier.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1]


def test_the_logarithm_that_scores_is_one() -> None:
    random: npt.NDArray[np.float64] = np.random.default_rng(0).random(100_000)
    values = np.concatenate([random[random > 0], [2.0**-53, 0.5, np.sqrt(0.5), 1 - 2.0**-53]])
    assert np.allclose(_log2(values), np.log2(values), rtol=1e-13, atol=0)
    # To the last bit, on any processor.
    assert [value.hex() for value in _log2(np.array([0.1, 0.7, 0.99]))] == [
        "-0x1.a934f0979a371p+1",
        "-0x1.0776228967d70p-1",
        "-0x1.db1f34d2c386ep-7",
    ]
