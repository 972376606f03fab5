"""The counts of one pass: what its threads did, and how long the consumer waited for them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dlio.data.mixture_reader import MixtureReader
from dlio.loader.stats import STAGES, PassStats
from dlio.storage.hierarchy import Hierarchy


class StageTimes:
    """Seconds that threads spent, by stage. Thread-safe.

    `source`, `disk`, `ram` and `peer` are reads from that place; `fetch` is a user's data set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds

    def add_all(self, seconds: dict[str, float]) -> None:
        with self._lock:
            for stage, spent in seconds.items():
                self._seconds[stage] += spent

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


@dataclass(slots=True)
class PassCounters:
    """Counts of one pass: the hierarchy's counters since it began, the threads' time, the
    consumer's waiting.

    Args:
        threads: that make batches.
        engine: `planned`, `threads` or `torch`.
        images: True if samples have images to decode; None if that is unknown.
    """

    hierarchy: Hierarchy | None = None
    threads: int = 0
    engine: str = ""
    images: bool | None = None
    clock: StageTimes = field(default_factory=StageTimes)
    stall_s: float = 0.0
    samples: int = 0
    batches: int = 0
    first_batch_s: float | None = None
    skipped: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """Samples of each source of a mixture."""
    _before: dict[str, Any] = field(default_factory=dict)
    _after: dict[str, Any] | None = None
    _started: float = field(default_factory=time.perf_counter)
    _ended: float | None = None
    _waiting_since: float = 0.0

    def __post_init__(self) -> None:
        self._waiting_since = self._started
        if self.hierarchy is not None:
            self._before = self.hierarchy.counters.snapshot()

    def restart(self) -> None:
        """Begin now: work that was done ahead counts as the pass before."""
        self._started = self._waiting_since = time.perf_counter()
        if self.hierarchy is not None:
            self._before = self.hierarchy.counters.snapshot()

    def wait_begins(self) -> None:
        self._waiting_since = time.perf_counter()

    def wait_ends(self, samples: int) -> None:
        now = time.perf_counter()
        waited_s = now - self._waiting_since
        self.stall_s += waited_s
        self.samples += samples
        if self.hierarchy is not None:
            self.hierarchy.counters.hand_over(samples, waited_s)
        self.batches += 1
        if self.first_batch_s is None:
            self.first_batch_s = now - self._started

    def count_sources(self, numbers: Callable[[], npt.NDArray[np.int64]]) -> None:
        """Count a batch's samples, whose indices `numbers` returns, by the sources of a mixture."""
        reader = None if self.hierarchy is None else self.hierarchy.reader
        if isinstance(reader, MixtureReader):
            counts = np.bincount(reader.sources_of(numbers()), minlength=len(reader.names))
            for name, count in zip(reader.names, counts.tolist(), strict=True):
                self.sources[name] = self.sources.get(name, 0) + count

    def end(self) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()
            if self.hierarchy is not None:
                self._after = self.hierarchy.counters.snapshot()

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._started

    def as_dict(self) -> PassStats:
        """Return the counts so far."""
        counted: dict[str, Any] = {}
        if self.hierarchy is not None:
            now = self._after or self.hierarchy.counters.snapshot()
            for key, value in now.items():
                before = self._before[key]
                if isinstance(value, dict):
                    counted[key] = {place: value[place] - before[place] for place in value}
                else:
                    counted[key] = value - before
        counts = {
            "engine": self.engine,
            "samples": self.samples,
            "batches": self.batches,
            "seconds": self.seconds,
            "stall_s": self.stall_s,
            "first_batch_s": self.first_batch_s,
            "threads": self.threads,
            "thread_s": self.clock.snapshot(),
            "skipped": list(self.skipped),
            "notes": self.hierarchy.notes() if self.hierarchy is not None else [],
            **counted,
        }
        if self.sources:
            counts["source_samples"] = dict(self.sources)
        if self.images is not None:
            counts["images"] = self.images
        return cast(PassStats, counts)
