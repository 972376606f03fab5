"""The number of requests in flight follows from the latency of the answers."""

import heapq
from collections.abc import Callable

import pytest

from dlio.data.flow import Flow


def _run(
    flow: Flow,
    clock: list[float],
    latency: Callable[[int], float],
    requests: int,
    computing: float = 0.0,
) -> int:
    """Have a source answer requests; returns the most that were in flight.

    Args:
        latency: seconds of a request that begins with so many in flight, itself included.
        computing: share of its latency that a request computes.
    """
    under_way: list[tuple[float, float, tuple[int, float]]] = []
    most = left = 0
    for left in range(requests, 0, -1):
        while len(under_way) >= flow.limit:
            at, seconds, began = heapq.heappop(under_way)
            clock[0] = at
            flow.ends(began, computing * seconds, crowded=left > 0)
        began = flow.begins()
        seconds = latency(len(under_way) + 1)
        heapq.heappush(under_way, (clock[0] + seconds, seconds, began))
        most = max(most, len(under_way))
    return most


@pytest.mark.parametrize("most", [1, 3, 16, 64, 100])
def test_a_source_that_only_waits_is_sent_as_many_requests_as_allowed(most: int) -> None:
    clock = [0.0]
    flow = Flow(most, clock=lambda: clock[0])
    assert _run(flow, clock, lambda _: 0.025, 2000) == most


def test_a_source_whose_bandwidth_is_used_up_is_not_sent_many_more() -> None:
    clock = [0.0]
    flow = Flow(64, clock=lambda: clock[0])
    # Sixteen at a time come as fast as one; more share the bandwidth.
    _run(flow, clock, lambda n: 0.02 * max(1.0, n / 16), 5000)
    assert 16 <= flow.limit <= 32


def test_requests_that_take_turns_stay_few() -> None:
    clock = [0.0]
    flow = Flow(64, clock=lambda: clock[0])
    limits = []
    for _ in range(400):
        assert _run(flow, clock, lambda n: 0.005 * n, 1) <= 8
        limits.append(flow.limit)
    assert limits.count(4) > 200  # Now and then it tries eight.


@pytest.mark.parametrize(("seconds", "computing"), [(0.0001, 0.0), (0.02, 0.9)])
def test_requests_that_are_fast_or_that_compute_stay_four(seconds: float, computing: float) -> None:
    clock = [0.0]
    flow = Flow(64, clock=lambda: clock[0])
    assert _run(flow, clock, lambda _: seconds, 2000, computing) == 4


def test_a_source_that_becomes_slow_to_answer_is_sent_more_requests_later() -> None:
    clock = [0.0]
    flow = Flow(64, clock=lambda: clock[0])
    _run(flow, clock, lambda n: 0.005 * n, 200)
    assert flow.limit <= 8
    _run(flow, clock, lambda _: 0.05, 2000)
    assert flow.limit == 64


def test_nothing_is_learned_while_no_request_waits() -> None:
    clock = [0.0]
    flow = Flow(64, clock=lambda: clock[0])
    for _ in range(1000):
        began = flow.begins()
        clock[0] += 0.02
        flow.ends(began, 0.0, crowded=False)
    assert flow.limit == 4
    flow.raise_to(1000)
    assert flow.limit == 64
