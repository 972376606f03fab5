"""Messages of a rank, counted: the statistics of sums and exchanges."""

import contextlib
import time
from collections.abc import Iterator, Mapping


class MessageTraffic:
    """Totals of a rank since the start: seconds of waiting, and messages and bytes sent."""

    def __init__(self) -> None:
        self.wait_s = self.messages = self.bytes = 0.0

    def sent(self, messages: float, size: float) -> None:
        """Count messages of `size` bytes together."""
        self.messages += messages
        self.bytes += size

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the `with` block, however it ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - began

    def as_dict(self) -> dict[str, float]:
        """Return `wait_s`, `messages` and `bytes`, as `statistics` of sums and exchanges do."""
        return {"wait_s": self.wait_s, "messages": self.messages, "bytes": self.bytes}


class KeptTotals:
    """Statistics that continue when the objects that count them are recreated."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def keep(self, counts: Mapping[str, float]) -> None:
        """Add the counts of objects that are about to be discarded."""
        self._before = self.plus(counts)

    def plus(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the counts so far plus those of the current objects."""
        return {key: value + self._before.get(key, 0.0) for key, value in counts.items()}
