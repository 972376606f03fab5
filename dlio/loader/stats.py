"""What a pass cost and where, and what follows from it: the line that names the bottleneck."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

from dlio.storage.hierarchy import Hierarchy
from dlio.util.units import format_bytes

_SMALL_STALL: Final = 0.02
"""Share of the time that a consumer may wait before the loader is called slow."""
_BUSY: Final = 0.7
"""Share of the threads' time below which it is not they who are slow."""
STAGES: Final = ("source", "disk", "ram", "peer", "decode", "transform", "collate", "fetch")


class Clock:
    """Seconds that threads spent, by stage: `source`, `disk`, `ram` and `peer` are reads from
    there, `fetch` is a user's data set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._bytes_read = 0

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
class Stats:
    """Counts of one pass: the hierarchy's counters since it began, the threads' time, the
    waiting."""

    hierarchy: Hierarchy | None = None
    threads: int = 0
    engine: str = ""
    clock: Clock = field(default_factory=Clock)
    stall_s: float = 0.0
    samples: int = 0
    batches: int = 0
    first_batch_s: float | None = None
    skipped: list[str] = field(default_factory=list)
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
        """Begin now: what was brought ahead belongs to the pass before."""
        self._started = self._waiting_since = time.perf_counter()
        if self.hierarchy is not None:
            self._before = self.hierarchy.counters.snapshot()

    def wait_begins(self) -> None:
        self._waiting_since = time.perf_counter()

    def wait_ends(self, samples: int) -> None:
        now = time.perf_counter()
        self.stall_s += now - self._waiting_since
        self.samples += samples
        self.batches += 1
        if self.first_batch_s is None:
            self.first_batch_s = now - self._started

    def end(self) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()
            if self.hierarchy is not None:
                self._after = self.hierarchy.counters.snapshot()

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._started

    def as_dict(self) -> dict[str, Any]:
        counted: dict[str, Any] = {}
        if self.hierarchy is not None:
            now = self._after or self.hierarchy.counters.snapshot()
            for key, value in now.items():
                before = self._before[key]
                if isinstance(value, dict):
                    counted[key] = {place: value[place] - before[place] for place in value}
                else:
                    counted[key] = value - before
        return {
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


def diagnose(stats: dict[str, Any], cores: int) -> str:
    """One line: the rate, the waiting, what held it up, what to do. Pure.

    Args:
        stats: of `DataLoader.stats`.
        cores: that this process may use.
    """
    seconds = max(stats["seconds"], 1e-9)
    rate = f"{stats['samples'] / seconds:,.0f} samples/s"
    later = max(0.0, stats["stall_s"] - (stats["first_batch_s"] or 0.0))
    waited = stats["stall_s"] / seconds
    head = f"{rate}, the consumer waited {waited:.0%} of {seconds:.1f} s"
    if waited <= _SMALL_STALL:
        return f"{head}; bottleneck: consumer (the training step); the loader keeps up"
    if later / seconds <= _SMALL_STALL:
        return (
            f"{head}; all but {later:.1f} s of it for the first batch, which took "
            f"{stats['first_batch_s']:.1f} s; remedy: `dlio stage` fills the tiers before the job"
        )
    spent: dict[str, float] = stats["thread_s"]
    threads = max(1, stats["threads"])
    total = sum(spent.values())
    busy = total / (threads * seconds)
    if not total:
        return f"{head}; bottleneck: the workers' processes, whose time is not seen from here"
    stage = max(spent, key=lambda name: spent[name])
    if busy < _BUSY and stats.get("late", 0) + stats.get("bytes", {}).get("peer", 0) > 0:
        return (
            f"{head}; bottleneck: network (threads busy {busy:.0%}, "
            f"{format_bytes(stats['bytes']['peer'])} from peers); remedy: mode='batch', or tiers "
            "with room for more on each node"
        )
    share = f"{spent[stage] / total:.0%} of the time of {threads} threads"
    return f"{head}; bottleneck: {_NAMES[stage]} ({share}); remedy: {_remedy(stage, stats, cores)}"


_NAMES: Final = {
    "source": "source",
    "disk": "tier (disk)",
    "ram": "tier (ram)",
    "peer": "network",
    "decode": "decode",
    "transform": "transform",
    "collate": "collate",
    "fetch": "the data set's own [i]",
}


def _remedy(stage: str, stats: dict[str, Any], cores: int) -> str:
    threads = stats["threads"]
    more = f"num_workers={cores} (it is {threads}), or " if threads < cores else ""
    read = format_bytes(stats.get("bytes", {}).get("source", 0))
    return {
        "source": f"{read} were read from the source: larger tiers=, or `dlio stage` before the "
        "job; num_workers for more reads at a time",
        "disk": "a larger RAM tier, or a faster disk",
        "ram": "fewer threads: memory is the limit",
        "peer": "mode='batch'",
        "decode": f"{more}`dlio pack --resize` once, so that there is less to decode",
        "transform": f"{more}dlio.transforms, or workers='process' for Python that holds the GIL",
        "collate": "arrays of one shape, or a collate_fn that copies less",
        "fetch": f"{more}workers='process' for Python that holds the GIL, or tiers= to keep what "
        "it returns",
    }[stage]
