"""Latency and bandwidth of the places that data is read from.

`dlio bench tiers` measures them once; later reads, including their waiting, correct the figures.

    <cache>/bandwidths.json    {host: {place: {"latency_s": .., "bytes_per_s": .., "measured": ..}}}
"""

import json
import math
import os
import platform
import time
from typing import Any, Final

from dlio.data.index import cache_folder, open_cache
from dlio.util.forks import new_lock
from dlio.util.trusted_files import read_small
from dlio.util.whole_files import unwritable, write_whole_at

_FILE: Final = "bandwidths.json"
_MOST: Final = 1 << 20
_LATENCY_S: Final = 1e-3
_RATE: Final = 1e9
"""Bytes per second of a place that was not measured."""
_LEARNED: Final = 0.2
"""Weight of the latest read in the estimate."""
_FORGOTTEN: Final = 0.01
"""Share of the learned correction that is lost with each read for which the place was not chosen,
so that a place that was slow for a while is tried again."""


class ReadSpeed:
    """Expected duration of a place's reads. Thread-safe."""

    def __init__(self, latency_s: float = _LATENCY_S, rate: float = _RATE) -> None:
        self._first = (latency_s, 1 / rate)
        self._latency_s, self._s_per_byte = self._first
        self._waiting = 0
        self._lock = new_lock()

    def expected_s(self, count: int) -> float:
        """Return the seconds until `count` more bytes arrive, after those that are being read."""
        with self._lock:
            return self._latency_s + (self._waiting + count) * self._s_per_byte

    def begins(self, count: int) -> "Observation":
        """Say that a read of `count` bytes begins."""
        with self._lock:
            ahead, self._waiting = self._waiting, self._waiting + count
        return Observation(self, ahead + count, count)

    def forget(self) -> None:
        """Say that another place was chosen: return a little towards the first estimate."""
        with self._lock:
            for name, first in zip(("_latency_s", "_s_per_byte"), self._first, strict=True):
                now = getattr(self, name)
                setattr(self, name, now * (first / now) ** _FORGOTTEN)

    def learn(self, count: int, queued: int, seconds: float | None) -> None:
        """Say that a read has ended.

        Args:
            count: its bytes.
            queued: bytes that were under way when it began, its own included.
            seconds: its duration, None when it failed.
        """
        with self._lock:
            self._waiting -= count
            if seconds is None:
                return
            # Both parts change by the same factor: their proportion cannot be observed.
            expected = self._latency_s + queued * self._s_per_byte
            factor = math.exp(_LEARNED * math.log(max(seconds, 1e-9) / expected))
            self._latency_s *= factor
            self._s_per_byte *= factor


class Observation:
    """A read under way."""

    def __init__(self, speed: ReadSpeed, queued: int, count: int) -> None:
        self._speed, self._queued, self._count = speed, queued, count
        self._began = time.monotonic()

    def ends(self, failed: bool = False) -> None:
        """Say that the read has ended, so that its speed is learned unless it failed."""
        seconds = None if failed else time.monotonic() - self._began
        self._speed.learn(self._count, self._queued, seconds)


def measured(place: str) -> tuple[float, float] | None:
    """Return (seconds of a small request, bytes per second) of a place, None if not measured."""
    entry = _everything().get(platform.node(), {}).get(place)
    try:
        latency_s, rate = float(entry["latency_s"]), float(entry["bytes_per_s"])
    except (TypeError, KeyError, ValueError):
        return None
    return (latency_s, rate) if latency_s > 0 and rate > 0 else None


def remember(place: str, latency_s: float, rate: float) -> str:
    """Store the measured figures of a place on this machine, and return the path of the file.

    Raises UsageError when it cannot be written.
    """
    everything = _everything()
    here = everything.setdefault(platform.node(), {})
    here[place] = {"latency_s": latency_s, "bytes_per_s": rate, "measured": time.time()}
    text = json.dumps(everything, indent=2).encode()
    path = os.path.join(cache_folder(), _FILE)
    try:
        with open_cache() as cache:
            write_whole_at(cache, _FILE, lambda file: file.write(text))
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _everything() -> dict[str, Any]:
    try:
        with open_cache() as cache:
            content = json.loads(read_small(cache, _FILE, _MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
