"""Samples that are kept: a bitmap answers as a list would, and orders of them are formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.block_order import BlockOrder
from dlio.plan.layout import Layout
from dlio.plan.order import Order
from dlio.plan.sample_mask import MaskedOrder, SampleMask, masked_layout
from dlio.storage.block_fetcher import blocks_in_order


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    n = draw(st.integers(1, 3000))
    mask = np.random.default_rng(draw(st.integers(0, 9))).random(n) < draw(st.floats(0, 1))
    mask[draw(st.integers(0, n - 1))] = True
    return mask


@given(masks())
def test_a_bitmap_answers_as_a_list_would(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    n, listed = len(mask), np.flatnonzero(mask)
    kept = SampleMask.of(mask, n)
    assert kept.count == len(listed)
    assert np.array_equal(kept.sample(np.arange(kept.count)), listed)
    assert np.array_equal(kept.number(np.arange(n + 1)), np.append(0, np.cumsum(mask)))
    assert np.array_equal(kept.holds(np.arange(n)), mask)
    again = SampleMask.of(np.packbits(mask, bitorder="little"), n)
    assert again.digest == kept.digest
    assert SampleMask.of(again, n) is again


@given(masks(), st.integers(0, 99), st.integers(0, 3), st.booleans())
def test_the_order_of_kept_samples_is_a_bijection(
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]], seed: int, epoch: int, shuffled: bool
) -> None:
    kept = SampleMask.of(mask, len(mask))
    order = MaskedOrder(kept.count, seed, epoch, shuffled, kept)
    positions = np.arange(kept.count)
    samples = order.samples(positions)
    assert np.array_equal(np.sort(samples), np.flatnonzero(mask))
    assert np.array_equal(order.positions(samples), positions)
    for out in np.flatnonzero(~mask)[:1]:
        with pytest.raises(IndexError, match=f"sample {out} is left out"):
            order.positions(np.array([out]))
    with pytest.raises(IndexError):
        order.samples(np.array([kept.count]))


@given(masks(), st.booleans(), st.integers(1, 5))
def test_blocks_have_their_kept_samples_alone(
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]], shuffled: bool, window: int
) -> None:
    n = len(mask)
    starts = np.unique([0, n // 7, n // 5, n // 2, n]).astype(np.int64)
    layout = Layout(starts, Order(n, 5, 0, shuffled))
    kept = SampleMask.of(mask, n)
    small = masked_layout(layout, kept)
    listed = np.flatnonzero(mask)
    assert small.blocks == layout.blocks
    assert np.array_equal(small.block_of(listed), layout.block_of(listed))
    counts = np.bincount(layout.block_of(listed), minlength=layout.blocks)
    assert np.array_equal(np.diff(small.starts), counts)
    for block in range(layout.blocks):
        held = layout.samples_of(block)
        assert np.array_equal(small.samples_of(block), held[mask[held]])
    order = BlockOrder(kept.count, 3, 1, True, small, window)
    samples = order.samples(np.arange(kept.count))
    assert np.array_equal(np.sort(samples), listed)
    first, last = order.span()
    blocks = small.block_of(samples)
    assert (np.arange(kept.count) >= first[blocks]).all()
    assert (np.arange(kept.count) < last[blocks]).all()


def test_blocks_that_an_epoch_does_not_use_are_filled_last() -> None:
    layout = Layout(np.array([0, 10, 20, 30, 40]), Order(40, 0, shuffled=False))
    mask = np.zeros(40, np.bool_)
    mask[[5, 33]] = True
    kept = SampleMask.of(mask, 40)
    order = MaskedOrder(2, 1, 0, True, kept)
    results = list(blocks_in_order(layout, order, np.array([True, True, False, True])))
    assert sorted(results[:2]) == [0, 3]
    assert results[2:] == [1]


def test_a_bitmap_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="keeps no sample"):
        SampleMask.of(np.zeros(9, np.bool_), 9)
    with pytest.raises(UsageError, match="for 9 samples give uint8 of shape"):
        SampleMask.of(np.ones(8, np.bool_), 9)
    with pytest.raises(UsageError, match="the data set has 8"):
        SampleMask.of(SampleMask.of(np.ones(9, np.bool_), 9), 8)
    # Bits beyond the last sample are none of its.
    assert SampleMask.of(np.array([255, 255], np.uint8), 9).count == 9
