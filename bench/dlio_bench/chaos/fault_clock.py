"""The clock of a storm: it stands still while no fault can be made."""

import time
from collections import deque
from collections.abc import Sequence

from dlio_bench.chaos.scheduled_faults import ScheduledFault


class FaultClock:
    """The faults that are still to be made, and the time that counts for them."""

    def __init__(self, faults: Sequence[ScheduledFault]) -> None:
        self.faults = deque(faults)
        self._passed_s = 0.0
        self._last: float | None = None

    def due(self, runs: bool) -> ScheduledFault | None:
        """Return the next fault if its time has come.

        Args:
            runs: True if the next fault can be made now; time stands still otherwise.
        """
        now = time.monotonic()
        if runs and self._last is not None:
            self._passed_s += now - self._last
            if self.faults:  # Until a fault is made, those after it do not come nearer.
                self._passed_s = min(self._passed_s, self.faults[0].due_s)
        self._last = now if runs else None
        if runs and self.faults and self._passed_s >= self.faults[0].due_s:
            return self.faults[0]
        return None
