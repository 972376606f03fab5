"""Partners of gossip and the mixing of a round."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlio.exchange.gossip import partners

SEEDS = st.integers(0, 2**64 - 1)
STEPS = st.integers(0, 100_000)


@given(step=STEPS, ranks=st.integers(1, 40), seed=SEEDS)
def test_every_rank_sends_once_and_receives_once(step: int, ranks: int, seed: int) -> None:
    pairs = [partners(step, rank, ranks, seed) for rank in range(ranks)]
    assert sorted(to for to, _ in pairs) == list(range(ranks))
    for rank, (to, source) in enumerate(pairs):
        assert pairs[to][1] == rank
        assert pairs[source][0] == rank
        assert ranks == 1 or rank not in (to, source)


def _mixing(first_step: int, ranks: int, seed: int) -> np.ndarray:
    """Return the matrix by which one round of merges multiplies the ranks' weights."""
    product = np.eye(ranks)
    period = max(1, math.ceil(math.log2(ranks))) if ranks > 1 else 1
    for step in range(first_step, first_step + period):
        merge = np.eye(ranks) / 2
        for rank in range(ranks):
            merge[rank, partners(step, rank, ranks, seed)[1]] += 0.5
        product = merge @ product
    return product


@given(power=st.integers(1, 6), turn=st.integers(0, 1000), seed=SEEDS)
def test_a_round_gives_the_exact_mean_for_powers_of_two(power: int, turn: int, seed: int) -> None:
    ranks = 2**power
    assert np.allclose(_mixing(turn * power, ranks, seed), 1 / ranks, rtol=0, atol=1e-12)


@given(ranks=st.integers(2, 40), turn=st.integers(0, 1000), seed=SEEDS)
def test_a_round_reaches_all_ranks_and_keeps_the_mean(ranks: int, turn: int, seed: int) -> None:
    mixing = _mixing(turn * math.ceil(math.log2(ranks)), ranks, seed)
    assert (mixing > 0).all()
    assert np.allclose(mixing.sum(axis=0), 1)
    assert np.allclose(mixing.sum(axis=1), 1)


@given(step=STEPS, ranks=st.integers(1, 40), seed=SEEDS)
def test_pairs_leave_out_one_rank_at_most(step: int, ranks: int, seed: int) -> None:
    pair = [partners(step, rank, ranks, seed, "pairs") for rank in range(ranks)]
    assert all(to == source for to, source in pair)
    assert all(pair[to][0] == rank for rank, (to, _) in enumerate(pair))
    assert sum(to == rank for rank, (to, _) in enumerate(pair)) == ranks % 2


def test_each_rank_meets_all_others_in_pairs() -> None:
    met = {partners(step, 0, 10, 1, "pairs")[0] for step in range(64)}
    assert met == set(range(1, 10))


@given(step=STEPS, power=st.integers(1, 5), seed=SEEDS)
def test_pairs_of_a_power_of_two_mix_in_any_rounds_in_a_row(
    step: int, power: int, seed: int
) -> None:
    ranks = 2**power
    mixing = np.eye(ranks)
    for turn in range(step, step + power):
        merge = np.eye(ranks) / 2
        for rank in range(ranks):
            merge[rank, partners(turn, rank, ranks, seed, "pairs")[1]] += 0.5
        mixing = merge @ mixing
    assert np.allclose(mixing, 1 / ranks, rtol=0, atol=1e-12)


def test_partners_rotate() -> None:
    period, ranks = 3, 8
    receives_from = {partners(turn * period, 0, ranks, seed=1)[1] for turn in range(64)}
    assert receives_from == set(range(1, ranks))
