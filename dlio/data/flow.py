"""The number of requests that a source is sent at a time, from the latency that it is measured at.

A source that answers each request as fast whether it has one or sixty to answer (an object store,
a slow file system, a data base) is read the faster the more are under way. One that computes under
Python's lock, or that its bandwidth limits, is not: its answers take longer in proportion.

So the limit is doubled as long as answers take a millisecond or more and a doubling gains a quarter
in answers a second, which by Little's law are the limit over the latency. A doubling that gained
less is taken back; it is tried again after some rounds. A round is as many answers as there are
requests in flight, of requests that began since the limit was changed last.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final

from dlio.util.forks import new_lock

MOST_REQUESTS: Final = 64
"""Requests in flight from one rank, at most, unless the user names another number."""
_FIRST: Final = 4
_WORTH_S: Final = 1e-3
"""Latency below which another thread costs more than it gains."""
_GAIN: Final = 1.25
_BUSY: Final = 0.5
_LEAST_ROUND: Final = 8
_HELD_ROUNDS: Final = 2


class Flow:
    """The limit of requests in flight to one source. Thread-safe. It begins at `first`, and never
    exceeds `most`."""

    def __init__(
        self,
        most: int = MOST_REQUESTS,
        first: int = _FIRST,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most = most
        self.limit = min(first, most)
        """Requests that may be in flight now."""
        self._clock = clock
        self._lock = new_lock()
        self._changes = 0
        self._round: list[float] = []
        self._computed_s = 0.0
        self._since = clock()
        """Time at which the round began."""
        self._before: tuple[int, float] | None = None
        """(limit, median latency) before the doubling that is being tried."""
        self._held = 0

    def __reduce__(self) -> tuple[type["Flow"], tuple[int, int]]:
        """In another process it begins at this limit, with measurements of its own."""
        return type(self), (self.most, self.limit)

    def begins(self) -> tuple[int, float]:
        """Say that a request begins; returns a value for `ends`."""
        return self._changes, self._clock()

    def ends(self, began: tuple[int, float], computed_s: float, crowded: bool) -> None:
        """Say that a request has been answered.

        `began` is the value from `begins`, and `computed_s` the processor time of its thread since
        its last request. `crowded` is true if other requests wait for it; otherwise nothing can be
        gained.
        """
        with self._lock:
            changes, at = began
            if changes != self._changes or self.limit >= self.most:
                return
            now = self._clock()
            if not crowded:
                self._restart(now)
                return
            self._round.append(now - at)
            self._computed_s += computed_s
            if len(self._round) >= max(_LEAST_ROUND, self.limit):
                median = statistics.median(self._round)
                busy = self._computed_s > _BUSY * (now - self._since)
                self._restart(now)
                self._decide(median, busy)

    def raise_to(self, limit: int) -> None:
        """Begin at a limit that has proved to be worth it."""
        with self._lock:
            self._change(max(self.limit, min(limit, self.most)))

    def _decide(self, median: float, busy: bool) -> None:
        before, self._before = self._before, None
        if before is not None:
            limit, seconds = before
            if busy or self.limit * seconds < _GAIN * limit * median:
                self._held = _HELD_ROUNDS
                self._change(limit)
                return
        if self._held:
            self._held -= 1
        elif median >= _WORTH_S and not busy:
            self._before = (self.limit, median)
            self._change(min(self.most, 2 * self.limit))

    def _change(self, limit: int) -> None:
        self.limit = limit
        self._changes += 1
        self._restart(self._clock())

    def _restart(self, now: float) -> None:
        self._round.clear()
        self._computed_s, self._since = 0.0, now
