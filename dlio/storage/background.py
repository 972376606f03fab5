"""Limits the processor time of work that nobody waits for, while a trainer works.

Samples that are read ahead of all need fill tiers early, which hides a storage that is slow or
uneven. Where it is fast, reading them is work of the processor rather than waiting, and takes the
processors and the interpreter's lock from the trainer. So such work may take a share of one
processor; work that waits for storage is hardly limited by that.
"""

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Background"]

_SHARE: Final = 0.25
"""Of one processor."""
_RECENT_S: Final = 2.0
"""After this time without samples that somebody waits for, nothing is limited."""
_WEIGHT: Final = 0.2
"""Of the newest measurement in the mean."""


class Background:
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

    def wanted(self) -> None:
        """Say that somebody waits, or is going to wait, for a sample."""
        self._wanted_at = self._clock()

    def delay(self) -> float:
        """Seconds until a request may begin; 0 for now."""
        now = self._clock()
        if now - self._wanted_at >= _RECENT_S:
            return 0.0
        return max(0.0, self._next_at - now)

    def begins(self) -> None:
        """Say that a request begins."""
        self._next_at = max(self._next_at, self._clock()) + self._computed_s / _SHARE

    def ends(self, computed_s: float) -> None:
        """Say that a request has ended, and its processor time in seconds."""
        self._computed_s += _WEIGHT * (computed_s - self._computed_s)
