"""The order is a bijection, the same everywhere, and a good shuffle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.order import MAX_SAMPLES, Cursor, Order, keyed_uniforms, share

seeds = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(1, 300), st.integers(1, MAX_SAMPLES))


@pytest.mark.parametrize("n", [*range(1, 130), 4095, 4096, 4097, 5000, 65536, 65537, 100_003])
def test_every_sample_has_one_position(n: int) -> None:
    order = Order(n, seed=n, epoch=1)
    positions = np.arange(n, dtype=np.int64)
    samples = order.samples(positions)
    assert np.array_equal(np.sort(samples), positions)
    assert np.array_equal(order.positions(samples), positions)


@given(sizes, seeds, st.integers(0, 1000), st.data())
def test_there_and_back_again_at_any_size(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    order = Order(n, seed, epoch)
    samples = order.samples(positions)
    assert ((samples >= 0) & (samples < n)).all()
    assert np.array_equal(order.positions(samples), positions)


def test_values_are_the_same_on_every_machine() -> None:
    assert Order(10, 0).samples(np.arange(10)).tolist() == [4, 9, 5, 1, 8, 6, 0, 2, 3, 7]
    assert Order(100_000, 1, 2).samples(np.arange(5)).tolist() == [
        65835,
        43479,
        9993,
        72299,
        10167,
    ]
    edge = np.array([0, 1, 2**40 - 1])
    assert Order(2**40, 7, 3).samples(edge).tolist() == [
        694301605459,
        502900196581,
        900748464276,
    ]
    assert keyed_uniforms(3, 4, np.array([5]), 2)[0] == pytest.approx(
        keyed_uniforms(3, 4, np.array([9, 5, 1]), 2)[1], abs=0
    )


@pytest.mark.parametrize("n", [50, 6000])
def test_every_position_is_equally_likely_for_a_sample(n: int) -> None:
    places = np.array(
        [Order(n, 11, epoch).positions(np.array([n // 3]))[0] for epoch in range(4000)]
    )
    counts = np.bincount(places * 50 // n, minlength=50)
    assert _chi_square(counts) < _limit(49)


@pytest.mark.parametrize("n", [64, 10_000])
def test_neighbours_in_the_order_are_independent(n: int) -> None:
    # The pair (sample at i, sample at i + 1), in 8 x 8 cells, over many epochs.
    cells = np.zeros((8, 8), np.int64)
    for epoch in range(200_000 // n):
        samples = Order(n, 5, epoch).samples(np.arange(n))
        pairs = samples[:-1:2] * 8 // n, samples[1::2] * 8 // n
        np.add.at(cells, pairs, 1)
    expected = np.full((8, 8), cells.sum() / 64)
    if n == 64:  # A sample is not its own neighbour.
        expected[np.diag_indices(8)] *= (8 - 1) / 8 * 64 / 63
        off = ~np.eye(8, dtype=bool)
        expected[off] *= 64 / 63
    assert float(((cells - expected) ** 2 / expected).sum()) < _limit(63)


@pytest.mark.parametrize("other", [Order(20_000, 1, 1), Order(20_000, 2, 0)])
def test_epochs_and_seeds_are_independent(other: Order) -> None:
    n = 20_000
    a, b = Order(n, 1, 0).samples(np.arange(n)), other.samples(np.arange(n))
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 5 / np.sqrt(n)
    # Fixed points of one relative to the other: Poisson with mean 1.
    assert int((a == b).sum()) <= 8
    # Neighbours stay neighbours as seldom as chance has it: n pairs, probability 2 / n.
    gap = np.abs(np.diff(other.positions(a)))
    assert int((gap == 1).sum()) <= 14


def test_all_permutations_of_a_few_samples_are_equally_likely() -> None:
    seen = [tuple(Order(4, seed).samples(np.arange(4)).tolist()) for seed in range(4800)]
    counts = np.array([seen.count(order) for order in set(seen)])
    assert len(counts) == 24
    assert _chi_square(counts) < _limit(23)


def test_unshuffled_is_the_readers_order() -> None:
    values = np.array([0, 5, 99])
    assert Order(100, 3, shuffled=False).samples(values).tolist() == [0, 5, 99]


@pytest.mark.parametrize("n", [100, 10_000])
def test_what_is_outside_is_refused(n: int) -> None:
    for wrong in (-1, n):
        with pytest.raises(IndexError, match="order of"):
            Order(n, 0).samples(np.array([wrong]))
    with pytest.raises(UsageError):
        Order(0, 0)
    with pytest.raises(UsageError):
        Order(2**40 + 1, 0)


@given(st.integers(0, 500), st.integers(1, 40))
def test_shares_are_even_and_cover_all(count: int, parts: int) -> None:
    shares = [share(count, parts, part) for part in range(parts)]
    assert [place for part in shares for place in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_random_numbers_belong_to_the_sample() -> None:
    samples = np.arange(5000)
    drawn = keyed_uniforms(1, 2, samples, 4)
    assert np.array_equal(drawn[[7, 3]], keyed_uniforms(1, 2, np.array([7, 3]), 4))
    assert not np.array_equal(drawn, keyed_uniforms(1, 3, samples, 4))
    assert not np.array_equal(drawn, keyed_uniforms(1, 2, samples, 4, stream=1))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 100, (0, 1))[0]
    assert _chi_square(counts) < _limit(99)
    correlations = np.corrcoef(drawn.T) - np.eye(4)
    assert np.abs(correlations).max() < 5 / np.sqrt(5000)


def test_a_cursor_survives_being_written_down() -> None:
    cursor = Cursor(seed=3, epoch=2, position=64, samples=1000)
    assert Cursor.from_dict(cursor.as_dict()) == cursor


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"seed": "x"}, {"position": -1}, {"position": 1001}, {"epoch": None}],
)
def test_a_damaged_cursor_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="loader state"):
        Cursor.from_dict({**Cursor(3, 2, 64, 1000).as_dict(), **change})


def _chi_square(counts: np.ndarray) -> float:
    mean = counts.mean()
    return float(((counts - mean) ** 2 / mean).sum())


def _limit(degrees: int) -> float:
    """Six standard deviations above the mean of chi-square: these seeds are fixed, and fair."""
    return float(degrees + 6 * np.sqrt(2 * degrees))
