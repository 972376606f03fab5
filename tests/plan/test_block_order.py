"""An order by blocks: still a bijection; each block's samples are within one window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.block_order import BlockOrder, window_of
from dlio.plan.layout import Layout
from dlio.plan.order import Order


def _layout(sizes: list[int], shuffled: bool) -> Layout:
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Layout(starts, Order(int(starts[-1]), 5, 0, shuffled))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3),
    st.booleans(),
)
def test_it_is_a_bijection_that_uses_a_block_within_one_window(
    sizes: list[int], window: int, seed: int, epoch: int, shuffled: bool
) -> None:
    layout = _layout(sizes, shuffled)
    count = sum(sizes)
    order = BlockOrder(count, seed, epoch, True, layout, window)
    positions = np.arange(count, dtype=np.int64)
    samples = order.samples(positions)
    assert np.array_equal(np.sort(samples), positions)
    assert np.array_equal(order.positions(samples), positions)
    first, last = order.span()
    blocks = layout.block_of(samples)
    assert (positions >= first[blocks]).all()
    assert (positions < last[blocks]).all()
    # No window has more than its blocks.
    for start, stop in zip(order.edges[:-1], order.edges[1:], strict=True):
        assert len(np.unique(blocks[start:stop])) == min(window, len(sizes), len(order.blocks))
        break


def test_epochs_and_windows_are_shuffled_anew() -> None:
    layout = _layout([50] * 64, False)
    one, other = (BlockOrder(3200, 1, epoch, True, layout, 8) for epoch in (0, 1))
    positions = np.arange(3200, dtype=np.int64)
    a, b = one.samples(positions), other.samples(positions)
    assert not np.array_equal(one.blocks, other.blocks)
    assert (a == b).mean() < 0.01
    # Within a window samples come from all its blocks, from the beginning.
    assert len(np.unique(layout.block_of(a[:50]))) == 8
    # Two windows of as many samples are not shuffled alike.
    first, second = (one.positions(layout.samples_of(int(k))) for k in one.blocks[::8][:2])
    assert not np.array_equal(np.argsort(first), np.argsort(second))


def test_without_a_shuffle_it_is_the_samples_in_turn() -> None:
    order = BlockOrder(30, 1, 0, False, _layout([10] * 3, True), 2)
    assert order.samples(np.arange(30)).tolist() == list(range(30))


@pytest.mark.parametrize(
    ("text", "window"), [("sample", None), ("block", 16), ("block(3)", 3), ("block( 40 )", 40)]
)
def test_what_users_write(text: str, window: int | None) -> None:
    assert window_of(text) == window


@pytest.mark.parametrize("text", ["blocks", "block(0)", "block()", "block(-1)", "", "block(x)"])
def test_what_users_should_not_write(text: str) -> None:
    with pytest.raises(UsageError, match="source order"):
        window_of(text)
