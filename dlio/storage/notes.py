"""Things that went wrong and were handled, in words, for the report of a run."""

from typing import Final

from dlio.util.forks import new_lock

_MOST: Final = 1000
"""Notes that are kept; a failing disk would otherwise fill the memory with them."""


class RunNotes:
    """Sentences that users should read once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._events: list[str] = []

    def add(self, event: str) -> None:
        """Remember a sentence."""
        with self._lock:
            if len(self._events) < _MOST:
                self._events.append(event)

    def all(self) -> list[str]:
        """Return the sentences in order, without duplicates."""
        with self._lock:
            return list(dict.fromkeys(self._events))
