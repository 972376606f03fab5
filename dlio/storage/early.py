"""Payloads that are read before the blocks that they belong to."""

import threading
from collections.abc import Iterable, Sequence

from dlio.data.schema import Buffer
from dlio.util.forks import call_in_child


class EarlyPayloads:
    """Payloads that are read before their blocks, by sample. Thread-safe.

    Invariant, under the condition: a sample is expected, or here, or neither. A sample that is
    expected is either put or given up, so nobody waits for it for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: set[int] = set()
        self.payloads: dict[int, Buffer] = {}
        """The payloads that are here."""
        call_in_child(self._begin_anew)

    def expect(self, samples: Iterable[int]) -> None:
        """Have readers of these samples wait for them."""
        with self._changed:
            self._expected.update(samples)

    def put(self, sample: int, payload: Buffer) -> None:
        """Hand over a payload to whoever waits for it."""
        with self._changed:
            self.payloads[sample] = payload
            self._expected.discard(sample)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Expect nothing any more."""
        with self._changed:
            self._expected.clear()
            self._changed.notify_all()

    def get(self, sample: int, timeout_s: float) -> Buffer | None:
        """Return a payload that is here or comes within `timeout_s`; None for all others."""
        if not (self._expected or self.payloads):
            return None  # On the way of every sample of a run: no lock is taken.
        if sample in self._expected:
            with self._changed:
                self._changed.wait_for(lambda: sample not in self._expected, timeout_s)
        return self.payloads.get(sample)

    def _begin_anew(self) -> None:
        """Expect nothing in a forked child: the threads that read are its parent's."""
        self._changed = threading.Condition()
        self._expected.clear()

    def drop(self, samples: Sequence[int]) -> None:
        """Forget samples whose block is in its tier."""
        for sample in samples:
            self.payloads.pop(sample, None)
