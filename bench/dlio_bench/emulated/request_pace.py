"""When requests are answered: latency, tail, and shares of bandwidth and of rates."""

import threading
import time
from typing import Final

import xxhash

_WHOLE: Final = float(2**64)


class Share:
    """A rate that all requests share, in the order in which they come. Thread-safe.

    Args:
        rate: units a second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def until(self, now: float, count: float) -> float:
        """Take `count` units, and return when they are through."""
        if self._rate is None or not count:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now) + count / self._rate
            return self._free_at


class RequestPace:
    """Requests of one kind: answered after the latency, and after their share of the rates."""

    def __init__(self, latency_s: float, *shares: Share) -> None:
        self._latency_s = latency_s
        self._shares = shares

    def wait(self, count: float = 0, times: float = 1.0, own: Share | None = None) -> None:
        """Come back when a request for `count` units is answered.

        Args:
            times: factor of the latency, more than 1 in the tail.
            own: one more share, such as that of an open file.
        """
        now = time.monotonic()
        until = now + self._latency_s * times
        for share in self._shares if own is None else (*self._shares, own):
            until = max(until, share.until(now, count))
        time.sleep(max(0.0, until - time.monotonic()))


class RequestDraws:
    """Chances drawn from a seed, the same in each run with the same requests."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw(self, *what: object) -> float:
        """Return a number between 0 and 1 that depends on the seed and on `what`."""
        text = " ".join(map(str, (self._seed, *what)))
        return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape")) / _WHOLE
