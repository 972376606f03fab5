"""Blocks of a data set: where each sample lies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlio.plan.layout import Layout, cut_blocks
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
