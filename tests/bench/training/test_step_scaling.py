"""The time of a step on p ranks follows from steps of one and two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.plan.exchange_cost import FORMULAE, ExchangeLoad, LinkCost
from dlio_bench.training.step_scaling import (
    Cluster,
    StepTimings,
    compute_seconds,
    exchange_seconds,
    message_seconds,
)

LINK = LinkCost(1e-6, 1e-9, 1e-10)
HERE = Cluster(LINK, per_node=4, cores=2)
TWO = Cluster(LINK, per_node=2, cores=2)
AWAY = Cluster(LinkCost(1e-5, 1e-8, 1e-10), LINK, per_node=8)


def work(per_node: int) -> ExchangeLoad:
    return ExchangeLoad(1e6, 2, per_node)


def steps(x: float = 0.0, busy: float = 1.0) -> StepTimings:
    return StepTimings({2: 0.2, 8: 0.5}, busy, dict.fromkeys(FORMULAE, x))


def test_ranks_that_share_cores_compute_in_turn() -> None:
    assert compute_seconds(steps(), 8, 1, HERE) == pytest.approx(0.5)
    assert compute_seconds(steps(busy=1.1), 8, 2, HERE) == pytest.approx(0.55)
    assert compute_seconds(steps(busy=1.1), 8, 4, HERE) == pytest.approx(1.1)
    assert compute_seconds(steps(busy=1.1), 8, 1024, AWAY) == pytest.approx(0.55)


def test_ranks_that_share_cores_do_not_wait_for_the_slowest_core() -> None:
    uneven = StepTimings({8: 0.5}, 1.2, {}, shared=1.1)
    assert compute_seconds(uneven, 8, 2, HERE) == pytest.approx(0.6)
    assert compute_seconds(uneven, 8, 4, HERE) == pytest.approx(1.1)
    assert compute_seconds(uneven, 8, 1024, AWAY) == pytest.approx(0.6)


def test_ranks_that_share_a_core_take_longer_than_in_turns() -> None:
    crowded = StepTimings({2: 0.2, 8: 0.5}, 1.1, {}, crowding={2: 1.2, 8: 1.05})
    assert compute_seconds(crowded, 8, 4, HERE) == pytest.approx(1.1 * 1.05)
    assert compute_seconds(crowded, 2, 4, HERE) == pytest.approx(2 * 0.2 * 1.1 * 1.2)
    assert compute_seconds(crowded, 8, 2, HERE) == pytest.approx(0.55)
    assert compute_seconds(crowded, 8, 512, AWAY) == pytest.approx(0.55)


@pytest.mark.parametrize("preset", sorted(set(FORMULAE) - {"asgd"}))
@given(x=st.floats(0.0, 1.0))
def test_ranks_that_share_cores_are_forecast_from_two_on_one_core(preset: str, x: float) -> None:
    crowded = StepTimings({8: 0.5}, 1.0, dict.fromkeys(FORMULAE, 9.0), crowded={(preset, 8): x})
    one = Cluster(LINK, per_node=2, cores=1)
    works = (work(2), work(2))
    assert exchange_seconds(crowded, preset, 2, 8, works, one) == pytest.approx(x)
    # Not for ranks with a core each.
    assert exchange_seconds(crowded, preset, 2, 8, works, TWO) == pytest.approx(9.0)


def test_ranks_that_wait_for_nobody_are_forecast_from_two_with_a_core_each() -> None:
    known = StepTimings({8: 0.5}, 1.0, {"asgd": 0.2}, crowded={("asgd", 8): 9.0})
    unknown = StepTimings({8: 0.5}, 1.0, {"asgd": 0.2})
    forecasts = [
        exchange_seconds(each, "asgd", 4, 8, (work(2), work(4)), HERE) for each in (known, unknown)
    ]
    assert forecasts[0] == forecasts[1] < 9.0


def test_computing_time_is_linear_between_and_beyond_measured_batches() -> None:
    for size, seconds in ((1, 0.15), (2, 0.2), (4, 0.3), (8, 0.5), (12, 0.7)):
        assert compute_seconds(steps(), size, 1, HERE) == pytest.approx(seconds)
    one = StepTimings({4: 0.4}, 1.0, {})
    assert compute_seconds(one, 2, 1, HERE) == pytest.approx(0.2)


@pytest.mark.parametrize("preset", FORMULAE)
@given(x=st.floats(0.0, 1.0))
def test_two_ranks_are_forecast_as_measured(preset: str, x: float) -> None:
    forecast = exchange_seconds(steps(x), preset, 2, 8, (work(2), work(2)), TWO)
    assert forecast == pytest.approx(x)


@pytest.mark.parametrize("preset", FORMULAE)
@given(x=st.floats(0.0, 1.0))
def test_more_ranks_on_the_same_cores_do_not_exchange_faster(preset: str, x: float) -> None:
    forecast = exchange_seconds(steps(x), preset, 4, 8, (work(2), work(4)), HERE)
    assert forecast >= 2 * x * (1 - 1e-9)


def test_a_hidden_exchange_stays_hidden_and_own_work_does_not_grow() -> None:
    none = exchange_seconds(steps(0.0), "tree", 512, 8, (work(2), work(8)), AWAY)
    assert none == 0.0
    # Beyond the messages there is a second of work of each rank on its own.
    x = 1.0 + message_seconds("gossip", 1, 2, work(2), TWO)
    away = exchange_seconds(steps(x), "gossip", 512, 8, (work(2), work(8)), AWAY)
    assert away == pytest.approx(1.0 + message_seconds("gossip", 1, 512, work(8), AWAY))


def test_messages_of_shared_cores_take_the_busiest_rank_or_all_work() -> None:
    link = LinkCost(0.0, 1e-9)
    shared, own = Cluster(link, per_node=4, cores=2), Cluster(link, per_node=4)
    # A ring keeps all ranks busy: 3/2 of the bytes each, and two ranks take turns on a core.
    assert message_seconds("allreduce", 1, 4, work(4), own) == pytest.approx(1.5e-3)
    assert message_seconds("allreduce", 1, 4, work(4), shared) == pytest.approx(3e-3)
    # A server of three others moves 6 times the bytes whoever shares its core.
    assert message_seconds("parameter-server", 1, 4, work(4), shared) == pytest.approx(6e-3)
    assert message_seconds("local-sgd", 8, 4, work(4), shared) == pytest.approx(3e-3 / 8)
