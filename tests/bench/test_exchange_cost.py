"""The cost model of exchanges, compared with sums done by hand."""

import math

import pytest

from dlio.exchange import NAMES
from dlio.plan import exchange_cost
from dlio.plan.exchange_cost import ExchangeLoad, LinkCost
from dlio_bench.exchange_cases.message_cost import fit

LINK = LinkCost(alpha_s=1e-5, beta_s=1e-9, gamma_s=1e-10)


def test_a_fit_recovers_the_link_that_generated_the_figures() -> None:
    sizes = [1 << power for power in range(10, 26)]
    link, error = fit(sizes, [LINK.message(size) for size in sizes])
    assert link.alpha_s == pytest.approx(1e-5)
    assert link.beta_s == pytest.approx(1e-9)
    assert error < 1e-9
    _, error = fit(sizes, [LINK.message(size) * (1 + 0.1 * (-1) ** size.bit_length())
                                     for size in sizes])  # fmt: skip
    assert error == pytest.approx(0.1, rel=0.1)


def test_a_fit_of_noise_has_a_bandwidth_that_can_be_told() -> None:
    link, _ = fit([1024, 1 << 20], [2e-3, 1e-3])
    assert link.alpha_s > 0
    assert 1e-9 / link.beta_s == pytest.approx(1e4)


def test_rings_and_recursive_halving_send_the_fewest_bytes() -> None:
    work = ExchangeLoad(8e6)
    for p in (2, 4, 8, 4096):
        by_bytes = 2 * (p - 1) / p * 8e6 * 1e-9 + (p - 1) / p * 8e6 * 1e-10
        assert exchange_cost.ring(p, work, LINK) == pytest.approx(2 * (p - 1) * 1e-5 + by_bytes)
        assert exchange_cost.halving(p, work, LINK) == pytest.approx(
            2 * math.log2(p) * 1e-5 + by_bytes
        )
    # Five ranks: the fifth sends its gradients to another rank and receives the sum.
    more = exchange_cost.halving(5, work, LINK) - exchange_cost.halving(4, work, LINK)
    assert more == pytest.approx(2 * 1e-5 + 8e6 * 2.1e-9)


def test_a_server_receives_from_all_ranks_and_a_tree_from_some() -> None:
    work = ExchangeLoad(8e6, buckets=8)
    hop = 8 * 1e-5 * 2 + 8e6 * (2e-9 + 1e-10)
    assert exchange_cost.star(16, work, LINK) == pytest.approx(15 * hop)
    assert exchange_cost.binomial(16, work, LINK) == pytest.approx(4 * hop)


def test_nodes_sum_within_first() -> None:
    work, inside = ExchangeLoad(8e6, per_node=4), LinkCost(0.0, 1e-10)
    within = 3 * 2 * 8e6 * 1e-10
    across = 2 * (1e-5 + 8e6 * 1.1e-9)
    assert exchange_cost.seconds("hierarchical", 16, work, LINK, inside) == pytest.approx(
        within + across
    )


def test_some_presets_cost_the_same_on_any_number_of_ranks() -> None:
    work = ExchangeLoad(8e6, buckets=8)
    for name in NAMES:
        assert exchange_cost.seconds(name, 1, work, LINK) == 0
        assert exchange_cost.counts(name, 1, work).size == 0
        few, many = (exchange_cost.seconds(name, p, work, LINK) for p in (2, 4096))
        counted = [exchange_cost.counts(name, p, work).messages for p in (2, 4096)]
        if name in ("gossip", "noloco", "asgd"):
            assert few == many
            assert counted[0] == counted[1]
        else:
            assert few < many
    eighth = exchange_cost.seconds("allreduce", 64, work, LINK) / 8
    assert exchange_cost.seconds("local-sgd", 64, work, LINK) == pytest.approx(eighth)


def test_compressed_sums_send_few_messages_and_few_bytes() -> None:
    work = ExchangeLoad(8e6, buckets=8)
    for p, messages in ((2, 1), (4, 6), (16, 12), (1024, 40), (10_000, 55)):
        counted = exchange_cost.counts("allreduce+int8", p, work)
        assert counted.messages / 8 == messages
        assert counted.size == pytest.approx(2 * (p - 1) / p * 8e6 * 8.03 / 32)
        forecast = exchange_cost.seconds("allreduce+int8", p, work, LINK)
        alphas, share = counted.messages * 1e-5, counted.size / 2
        assert forecast == pytest.approx(alphas + share * 2.1e-9)
    assert set(NAMES) < set(exchange_cost.FORMULAE)


def test_shared_cores_slow_bytes_and_not_messages() -> None:
    slow = exchange_cost.shared(LINK, 8, 2)
    assert slow.alpha_s == 1e-5
    assert slow.beta_s == pytest.approx(4e-9)
    assert exchange_cost.shared(LINK, 2, 4) == LINK
