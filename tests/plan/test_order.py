"""The order is a bijection, the same everywhere, and a good shuffle."""

import json
import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.errors import UsageError
from dlio.plan.order import MAX_SAMPLES, Cursor, Order, keyed_uniforms, share

seeds = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(1, 300), st.integers(1, MAX_SAMPLES))


@pytest.mark.parametrize("n", [*range(1, 201), 4095, 4096, 4097, 5000, 65536, 65537, 100_003])
def test_the_order_is_a_bijection(n: int) -> None:
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


@pytest.mark.parametrize("n", [2**40 - 1, 2**40])
def test_there_and_back_again_at_the_largest_sizes(n: int) -> None:
    ends = np.concatenate([np.arange(20_000), np.arange(n - 20_000, n)])
    order = Order(n, 2**64 - 1, 2**64 - 1)
    samples = order.samples(ends)
    assert len(np.unique(samples)) == len(ends)
    assert ((samples >= 0) & (samples < n)).all()
    assert np.array_equal(order.positions(samples), ends)


@given(st.integers(1, 20_000), seeds, st.data())
def test_a_sample_does_not_depend_on_what_else_is_asked(
    n: int, seed: int, data: st.DataObject
) -> None:
    order = Order(n, seed)
    position = data.draw(st.integers(0, n - 1))
    whole = order.samples(np.arange(n, dtype=np.int64).reshape(1, n))
    assert whole.shape == (1, n)
    assert order.samples(np.array([[position]]))[0, 0] == whole[0, position]


def test_values_are_the_same_on_every_machine() -> None:
    assert Order(10, 0).samples(np.arange(10)).tolist() == [4, 9, 5, 1, 8, 6, 0, 2, 3, 7]
    few = Order(100_000, 1, 2).samples(np.arange(5)).tolist()
    assert few == [65835, 43479, 9993, 72299, 10167]
    edge = Order(2**40, 7, 3).samples(np.array([0, 1, 2**40 - 1])).tolist()
    assert edge == [694301605459, 502900196581, 900748464276]
    drawn = keyed_uniforms(3, 4, np.array([5, 2**40 - 1]), 2).tolist()
    assert drawn == [
        [0.7939554957017727, 0.8518636621992894],
        [0.0008474848306320171, 0.572383134085782],
    ]
    assert keyed_uniforms(2**64 - 1, 0, np.array([0]), 1, stream=7).tolist() == [
        [0.013617004017195788]
    ]


@pytest.mark.parametrize("n", [50, 6000])
def test_every_position_is_equally_likely_for_a_sample(n: int) -> None:
    # Of samples spread over the data set, the position in 50 bins, over many epochs.
    samples = np.linspace(0, n - 1, 10).astype(np.int64)
    places = np.array([Order(n, 11, epoch).positions(samples) for epoch in range(3000)])
    for sample in range(len(samples)):
        counts = np.bincount(places[:, sample] * 50 // n, minlength=50)
        assert _chi_square(counts) < _limit(49)


@pytest.mark.parametrize("n", [64, 10_000])
def test_neighbours_in_the_order_are_independent(n: int) -> None:
    # The pair (sample at i, sample at i + 1), in 8 x 8 cells, over many epochs.
    cells = np.zeros((8, 8), np.int64)
    for epoch in range(200_000 // n):
        samples = Order(n, 5, epoch).samples(np.arange(n))
        pairs = samples[:-1:2] * 8 // n, samples[1::2] * 8 // n
        np.add.at(cells, pairs, 1)
    # Cells with, and without, equal numbers: a sample is not its own neighbour.
    width = n // 8
    expected = np.full((8, 8), width * width, np.float64)
    expected[np.diag_indices(8)] -= width
    expected *= cells.sum() / expected.sum()
    assert float(((cells - expected) ** 2 / expected).sum()) < _limit(63)


@pytest.mark.parametrize("n", [40, 5041])
def test_the_step_from_one_sample_to_the_next_is_of_any_length(n: int) -> None:
    # 5041 is 71 x 71: the network's halves have no remainder to hide a pattern in.
    steps = np.zeros(n, np.int64)
    for epoch in range(400_000 // n):
        samples = Order(n, 77, epoch).samples(np.arange(n))
        steps += np.bincount(np.diff(samples) % n, minlength=n)
    assert steps[0] == 0
    assert _chi_square(steps[1:]) < _limit(n - 2)


@pytest.mark.parametrize("n", [4000, 20_000])
@pytest.mark.parametrize(("seed", "epoch"), [(1, 1), (2, 0), (0, 1), (2**63 + 1, 0)])
def test_epochs_and_seeds_are_independent(n: int, seed: int, epoch: int) -> None:
    other = Order(n, seed, epoch)
    a, b = Order(n, 1, 0).samples(np.arange(n)), other.samples(np.arange(n))
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 5 / math.sqrt(n)
    # Neighbours stay neighbours as seldom as chance has it: n pairs, probability 2 / n.
    assert int((np.abs(np.diff(other.positions(a))) == 1).sum()) <= 14


@pytest.mark.parametrize("n", [10, 4500])
def test_fixed_points_between_epochs_are_poisson(n: int) -> None:
    epochs = 1500
    orders = [Order(n, 21, epoch).samples(np.arange(n)) for epoch in range(epochs + 1)]
    same = [int((a == b).sum()) for a, b in pairwise(orders)]
    counts = np.bincount(np.minimum(same, 5), minlength=6)
    chances = [math.exp(-1) / math.factorial(k) for k in range(5)]
    expected = epochs * np.array([*chances, 1 - sum(chances)])
    assert float(((counts - expected) ** 2 / expected).sum()) < _limit(5)


def test_all_permutations_of_a_few_samples_are_equally_likely() -> None:
    seen = [tuple(Order(4, seed).samples(np.arange(4)).tolist()) for seed in range(4800)]
    counts = np.array([seen.count(order) for order in set(seen)])
    assert len(counts) == math.factorial(4)
    assert _chi_square(counts) < _limit(23)


def test_unshuffled_is_the_readers_order() -> None:
    values = np.array([0, 5, 99])
    assert Order(100, 3, shuffled=False).samples(values).tolist() == [0, 5, 99]


@pytest.mark.parametrize("n", [100, 10_000])
def test_what_is_outside_is_refused(n: int) -> None:
    for wrong in (-1, n):
        with pytest.raises(IndexError, match="order of"):
            Order(n, 0).samples(np.array([wrong]))
        with pytest.raises(IndexError, match="order of"):
            Order(n, 0).positions(np.array([0, wrong]))


@pytest.mark.parametrize(
    ("n", "seed", "epoch"),
    [(0, 0, 0), (MAX_SAMPLES + 1, 0, 0), (9, -1, 0), (9, 2**64, 0), (9, 0, -1)],
)
def test_an_impossible_order_is_refused(n: int, seed: int, epoch: int) -> None:
    with pytest.raises(UsageError):
        Order(n, seed, epoch)


@given(st.integers(0, 500), st.integers(1, 40))
def test_shares_are_even_and_cover_all(count: int, parts: int) -> None:
    shares = [share(count, parts, part) for part in range(parts)]
    assert [place for part in shares for place in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_random_numbers_belong_to_the_sample() -> None:
    samples = np.arange(5000)
    drawn = keyed_uniforms(1, 2, samples, 4)
    assert np.array_equal(drawn[[7, 3]], keyed_uniforms(1, 2, np.array([7, 3]), 4))
    assert np.array_equal(drawn[:, :2], keyed_uniforms(1, 2, samples, 2))
    assert not np.array_equal(drawn, keyed_uniforms(2, 2, samples, 4))
    assert not np.array_equal(drawn, keyed_uniforms(1, 3, samples, 4))
    assert not np.array_equal(drawn, keyed_uniforms(1, 2, samples, 4, stream=1))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 100, (0, 1))[0]
    assert _chi_square(counts) < _limit(99)
    correlations = np.corrcoef(drawn.T) - np.eye(4)
    assert np.abs(correlations).max() < 5 / np.sqrt(5000)


@given(seeds, st.integers(0, 2**64 - 1), st.integers(0, MAX_SAMPLES), st.data())
def test_a_cursor_survives_being_written_down(
    seed: int, epoch: int, samples: int, data: st.DataObject
) -> None:
    cursor = Cursor(seed, epoch, data.draw(st.integers(0, samples)), samples)
    assert Cursor.from_dict(json.loads(json.dumps(cursor.as_dict()))) == cursor


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "format 2"),
        ({"seed": "x"}, "seed 'x'"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"seed": True}, "seed True"),
        ({"position": -1}, "position -1"),
        ({"position": 1001}, "position 1001 of only 1,000"),
        ({"epoch": None}, "epoch None"),
        ({"samples": 1000.0}, "samples 1000.0"),
    ],
)
def test_a_damaged_cursor_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match="loader state") as refused:
        Cursor.from_dict({**Cursor(3, 2, 64, 1000).as_dict(), **change})
    assert named in str(refused.value)


def _chi_square(counts: npt.NDArray[np.int64]) -> float:
    mean = counts.mean()
    return float(((counts - mean) ** 2 / mean).sum())


def _limit(degrees: int) -> float:
    """Six standard deviations above the mean of chi-square: a fair shuffle exceeds it for one
    choice of seeds in tens of thousands, and these seeds are fixed."""
    return degrees + 6 * math.sqrt(2 * degrees)
