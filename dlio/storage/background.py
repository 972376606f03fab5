"""Limits the work that nobody waits for, while a trainer works.

Samples that are read ahead of all need fill tiers early, which hides a storage that is slow or
uneven. Where it is fast, reading them is work of the processor rather than waiting, and takes the
processors and the interpreter's lock from the trainer: such work may take a share of one processor.
Where the storage's bandwidth is the limit, a rank that reads ahead takes it from the ranks that
wait, for which it waits in turn: so few of its requests are in flight at a time.
"""

import time
from collections.abc import Callable
from typing import Final

_SHARE: Final = 0.25
"""Of one processor, and of the requests in flight."""
_RECENT_S: Final = 2.0
"""After this time without samples that somebody waits for, nothing is limited."""
_WEIGHT: Final = 0.2
"""Of the newest measurement in the mean."""


class BackgroundLimit:
    """When the next request that nobody waits for may begin. The caller holds a lock.

    Args:
        clock: seconds; another one for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wanted_at = -_RECENT_S
        self._next_at = 0.0
        self._computed_s = 0.0
        """Mean processor time of a request."""
        self._running = 0

    def wanted(self) -> None:
        """Say that somebody waits, or is going to wait, for a sample, or takes one. No lock is
        needed."""
        self._wanted_at = self._clock()

    def delay(self) -> float:
        """Seconds until a request may begin; 0 for now."""
        return 0.0 if self._is_free() else max(0.0, self._next_at - self._clock())

    def has_room(self, most: int) -> bool:
        """True if fewer requests are in flight than may be.

        Args:
            most: requests in flight of all kinds, at most.
        """
        return self._is_free() or self._running < max(1, int(_SHARE * most))

    def begins(self) -> None:
        """Say that a request begins."""
        self._running += 1
        self._next_at = max(self._next_at, self._clock()) + self._computed_s / _SHARE

    def ends(self, computed_s: float) -> None:
        """Say that a request has ended, and its processor time in seconds."""
        self._running -= 1
        self._computed_s += _WEIGHT * (computed_s - self._computed_s)

    def _is_free(self) -> bool:
        return self._clock() - self._wanted_at >= _RECENT_S
