"""Blocks of a data set: where each sample lies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlio.plan.layout import MAX_BLOCK_BYTES, Layout, cut_blocks, sum_of
from dlio.plan.order import Order


@given(
    st.integers(1, 3000),
    st.integers(1, 100_000),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.integers(0, 1000),
)
def test_samples_are_where_a_search_finds_them(
    count: int, size: int, spread: float, shuffled: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sizes = (size * random.uniform(1 - spread, 1, count)).astype(np.int64) + 1
    layout = cut_blocks(sizes, Order(count, 1, shuffled=shuffled))
    samples = np.arange(count)
    blocks, places = layout.locate(samples)
    positions = layout.order.positions(samples)
    assert (layout.starts[blocks] <= positions).all()
    assert (positions < layout.starts[blocks + 1]).all()
    assert np.array_equal(places, positions - layout.starts[blocks])
    assert blocks.dtype == np.int64


def test_blocks_of_samples_of_one_size_are_even_others_may_not_be() -> None:
    order = Order(1000, 1, shuffled=False)
    assert cut_blocks(np.full(1000, 5000), order).is_even
    assert not Layout(np.array([0, 1, 2, 3, 1000]), order).is_even
    assert Layout(np.array([0, 1, 2, 3, 1000]), order).locate(np.array([2, 3, 999]))[
        0
    ].tolist() == [
        2,
        3,
        3,
    ]


@given(
    size=st.integers(0, 1 << 24),
    count=st.integers(1, 3000),
    shuffled=st.booleans(),
    unit=st.one_of(st.none(), st.integers(1, 400)),
)
def test_a_size_that_is_broadcast_is_cut_as_all_sizes_are(
    size: int, count: int, shuffled: bool, unit: int | None
) -> None:
    order = Order(count, 3, shuffled=shuffled)
    units = None if unit is None else np.arange(0, count, unit, dtype=np.int64)
    alike = np.broadcast_to(np.int64(size), count)
    cut = cut_blocks(alike, order, units)
    assert cut.starts.tolist() == cut_blocks(alike.copy(), order, units).starts.tolist()
    assert sum_of(alike) == sum_of(alike.copy()) == size * count


def test_a_data_set_of_rows_is_cut_without_a_look_at_each() -> None:
    count = 10**12  # Their sizes would take 8 TB.
    cut = cut_blocks(np.broadcast_to(np.int64(2), count), Order(count, 0, shuffled=False))
    assert cut.starts[-1] == count
    assert np.diff(cut.starts).max() * 2 <= MAX_BLOCK_BYTES + 2
