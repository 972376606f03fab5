"""Costs of steps: simulated ranks converge to the split in which all finish together."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.plan.rank_shares import Cost, RankShares, balanced_shares, fastest_shares
from tests.conftest import examples

_BATCH = 32


class _Rank:
    """A simulated rank, whose steps take `true` seconds with a relative error of `noise`."""

    def __init__(self, true: Cost, noise: float = 0.0) -> None:
        self._true, self._noise = true, noise
        self._random = random.Random(str(true))
        self.believed = Cost.fitted(
            (_BATCH // 2, self.step(_BATCH // 2)), (_BATCH, self.step(_BATCH))
        )

    def step(self, samples: int) -> float:
        return self._true.of(samples) * self._random.uniform(1 - self._noise, 1 + self._noise)

    def epoch(self, samples: int, steps: int = 20) -> None:
        taken = [(samples, self.step(samples)) for _ in range(steps)]
        self.believed = self.believed.corrected(taken)


def _trained(ranks: Sequence[_Rank], epochs: int) -> list[RankShares]:
    """Train for some epochs; return the shares of each epoch."""
    shares = balanced_shares(RankShares.even(_BATCH, len(ranks)), [rank.believed for rank in ranks])
    history = [shares]
    for _ in range(epochs):
        for rank, count in zip(ranks, shares.counts, strict=True):
            rank.epoch(count)
        shares = balanced_shares(shares, [rank.believed for rank in ranks])
        history.append(shares)
    return history


def _ideal(costs: Sequence[Cost]) -> RankShares:
    fixed = [cost.fixed_s for cost in costs]
    return fastest_shares(_BATCH * len(costs), fixed, [cost.per_sample_s for cost in costs])


def _apart(one: RankShares, other: RankShares) -> int:
    return max(abs(a - b) for a, b in zip(one.counts, other.counts, strict=True))


costs = st.lists(
    st.builds(Cost, st.floats(0.0, 0.05), st.floats(0.001, 0.01)), min_size=2, max_size=5
)


@given(costs)
def test_the_first_epoch_already_has_the_ideal_split(true: list[Cost]) -> None:
    (first,) = _trained([_Rank(cost) for cost in true], 0)
    slowest = [
        max(cost.of(n) for cost, n in zip(true, shares.counts, strict=True))
        for shares in (first, _ideal(true))
    ]
    assert slowest[0] <= 1.011 * slowest[1]


@pytest.mark.parametrize("slower", [1.0, 1.5, 3.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_noisy_times_converge_to_the_ideal_within_one_sample(ranks: int, slower: float) -> None:
    true = [Cost(0.004, 0.002)] * (ranks - 1) + [Cost(0.004 * slower, 0.002 * slower)]
    shares = _trained([_Rank(cost, noise=0.1) for cost in true], 12)
    assert _apart(shares[-1], _ideal(true)) <= 1
    # The shares no longer change.
    assert len(set(shares[-4:])) == 1


@settings(max_examples=examples(50))
@given(st.floats(0.0, 0.03), st.floats(0.001, 0.01))
def test_measurements_correct_a_wrong_calibration(fixed: float, per_sample: float) -> None:
    """They do so even if a rank became slower in a part that the calibration does not model."""
    true = [Cost(fixed, per_sample), Cost(3 * fixed, 3 * per_sample)]
    ranks = [_Rank(cost) for cost in true]
    ranks[1].believed = Cost(0.0, 0.004)
    last = _trained(ranks, 25)[-1]
    ends = [cost.of(n) for cost, n in zip(true, last.counts, strict=True)]
    best = [cost.of(n) for cost, n in zip(true, _ideal(true).counts, strict=True)]
    assert max(ends) <= 1.03 * max(best) + max(cost.per_sample_s for cost in true)


def test_a_fit_has_no_negative_part() -> None:
    fitted = Cost.fitted((16, 0.26), (32, 0.42))
    assert (fitted.fixed_s, fitted.per_sample_s) == pytest.approx((0.1, 0.01))
    # Twice the samples take more than twice the time; the fixed part stays 0.
    assert Cost.fitted((16, 0.1), (32, 0.4)) == Cost(0.0, 0.4 / 32)
    # With noise alone, the time per sample stays positive.
    noisy = Cost.fitted((16, 0.5), (32, 0.4))
    assert noisy.per_sample_s > 0
    assert noisy.of(32) == pytest.approx(0.4)


def test_a_step_without_samples_is_ignored() -> None:
    cost = Cost(0.1, 0.01)
    assert cost.corrected([(0, 5.0)]) == cost
    assert cost.corrected([]) == cost
