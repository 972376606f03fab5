"""Readers and tiers that are slow or fail when a test says so.

A test that sleeps passes or fails with the load of the machine. `SlowReader` and `SlowTier` hold
each read until the test lets it go; `FailingReader` and `FailingTier` raise at chosen samples or
blocks, always or a number of times. All of them count.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError, TierFull
from dlio.storage.block import PayloadScratch
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec

_DEADLINE_S: Final = 60.0


class Gate:
    """Holds threads until a test lets them pass. Thread-safe.

    Every wait ends after `deadline_s` seconds with TimeoutError.
    """

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._passes = 0
        self._open = False
        self.held = 0
        """Threads that wait at the gate now."""
        self.passed = 0
        """Threads that have passed since the beginning."""

    def let(self, count: int = 1) -> None:
        """Let `count` threads pass."""
        with self._changed:
            self._passes += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let every thread pass from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_held(self, count: int = 1) -> None:
        """Wait until at least `count` threads are held. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.held >= count, self._deadline_s):
                raise TimeoutError(f"{self.held} of {count} threads came to the gate")

    def enter(self) -> None:
        """Wait until the gate lets this thread pass. Raises TimeoutError."""
        with self._changed:
            self.held += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(
                    lambda: self._open or self._passes > 0, self._deadline_s
                ):
                    raise TimeoutError("nobody opened the gate: call let() or open()")
                self._passes -= not self._open
                self.passed += 1
            finally:
                self.held -= 1


class _WrappedReader:
    """A reader that passes everything on to another one."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.format, self.path, self.schema = reader.format, reader.path, reader.schema
        self.classes, self.labels, self.sizes = reader.classes, reader.labels, reader.sizes
        self.fingerprint, self.layout = reader.fingerprint, reader.layout
        self.objects = reader.objects

    def __len__(self) -> int:
        return len(self.reader)

    def name(self, sample: int) -> str:
        return self.reader.name(sample)

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return self.reader.read(samples)

    def close(self) -> None:
        self.reader.close()


class SlowReader(_WrappedReader):
    """A reader each of whose reads waits at `gate`. Thread-safe as the reader that it wraps is."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.gate = Gate()

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Payloads of `samples`, once the gate lets this thread pass."""
        self.gate.enter()
        return super().read(samples)


class FailingReader(_WrappedReader):
    """A reader that cannot read some samples.

    Args:
        reader: the reader to wrap.
        samples: sample indices; a read that has one of them raises SourceError.
        times: failures before reads succeed; None: every read fails.
    """

    def __init__(self, reader: Reader, samples: Iterable[int], times: int | None = None) -> None:
        super().__init__(reader)
        self._samples = frozenset(samples)
        self._left = times
        self._lock = threading.Lock()
        self.failures = 0
        """Reads that have failed."""

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        """Payloads of `samples`. Raises SourceError while one of them is to fail."""
        broken = next((each for each in samples.tolist() if each in self._samples), None)
        if broken is not None:
            with self._lock:
                if self._left is None or self.failures < self._left:
                    self.failures += 1
                    raise SourceError(f"{self.name(broken)} cannot be read: the test wants it so")
        return super().read(samples)


class SlowTier(Tier):
    """A tier each of whose reads waits at `gate`."""

    def __init__(self, spec: TierSpec, *names: str, fingerprint: str | None = None) -> None:
        self.gate = Gate()
        super().__init__(spec, *names, fingerprint=fingerprint)

    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        """The payload at `place` of a block, once the gate lets this thread pass."""
        self.gate.enter()
        return super().read(block, place, scratch)


class FailingTier(Tier):
    """A tier that has no room for some blocks, and reads others as damaged.

    Attributes may be set at any time.
    """

    full: frozenset[int] = frozenset()
    """Blocks whose `publish` raises TierFull."""
    damaged: frozenset[int] = frozenset()
    """Blocks whose `read` raises CorruptBlock."""

    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        """Write a block. Raises TierFull for one of `full`."""
        if block in self.full:
            raise TierFull(f"tier {self.path} has no room for block {block}: the test wants it so")
        super().publish(block, pieces)

    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        """The payload at `place` of a block. Raises CorruptBlock for one of `damaged`."""
        if block in self.damaged:
            raise CorruptBlock(f"block {block} of {self.path} is damaged: the test wants it so")
        return super().read(block, place, scratch)
