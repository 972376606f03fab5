"""Messages of a rank, counted: the statistics of sums and exchanges."""

import contextlib
import time
from collections.abc import Iterator


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
