"""Work that nobody waits for takes a quarter of what there is, and all of it when nobody works."""

import pytest

from dlio.storage.sample_fetcher import BackgroundLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _requests(clock: Clock, background: BackgroundLimit, seconds: float, computed_s: float) -> int:
    """Number of requests that begin in some seconds while somebody waits for others."""
    count, end = 0, clock.now + seconds
    while clock.now < end:
        background.wanted()
        delay = background.delay()
        clock.now += delay
        if not delay:
            background.begins()
            background.ends(computed_s)
            count += 1
            clock.now += 1e-6
    return count


@pytest.mark.parametrize("computed_s", [0.001, 0.02])
def test_it_takes_a_quarter_of_a_processor(computed_s: float) -> None:
    clock = Clock()
    background = BackgroundLimit(clock)
    _requests(clock, background, 1.0, computed_s)  # It learns the cost of a request.
    count = _requests(clock, background, 10.0, computed_s)
    assert count * computed_s == pytest.approx(2.5, rel=0.05)


def test_without_anybody_who_waits_nothing_is_limited() -> None:
    clock = Clock()
    background = BackgroundLimit(clock)
    for _ in range(20):
        assert background.delay() == 0.0
        background.begins()
        background.ends(1.0)
    background.wanted()
    assert background.delay() > 1.0
    clock.now += 2.0
    assert background.delay() == 0.0


def test_a_quarter_of_the_requests_in_flight() -> None:
    clock = Clock()
    background = BackgroundLimit(clock)
    for _ in range(3):
        assert background.has_room(4)  # Nobody waits.
        background.begins()
    background.wanted()
    assert not background.has_room(4)
    assert background.has_room(16)
    for _ in range(3):
        background.ends(0.0)
    assert background.has_room(1)  # One, at least.
    background.begins()
    assert not background.has_room(7)
    assert background.has_room(8)
    clock.now += 2.0
    assert background.has_room(1)
