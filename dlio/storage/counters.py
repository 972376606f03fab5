"""The account of a run: counts of reads by their place, and sentences about errors.

A tier is a cache. Whatever its disk answers - a stale handle, an input/output error, a file system
that has become read-only or is full - costs time and not the job: a block that cannot be read or
written there comes from the next place that has it, last from the source. The user is told once for
each tier and kind of error, and every error is counted.
"""

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dlio.errors import TierError, printable
from dlio.util.forks import new_lock

PLACES = ("source", "peer", "ram", "disk")
"""Places that a sample can be read from."""
# fmt: off
_REPORTED: Final = (
    "bytes", "healed", "tier_errors", "moved_bytes", "late", "single_bytes", "sent", "messages",
    "decoded", "decode_saved_s", "device_images", "device_bytes", "fallbacks",
)
# fmt: on
"""Counters in reports, in this order."""


@dataclass(slots=True)
class Counters:
    """Payload bytes and events of one rank. Thread-safe.

    Those that are reported have the names of `PassStats` in `dlio.loader.stats`, which explains
    them.
    """

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    """Payload bytes by the place they were read from. `source` counts every read of the source,
    those that fill a tier included; the others count samples that were consumed from there."""
    healed: int = 0
    tier_errors: int = 0
    moved_bytes: int = 0
    late: int = 0
    single_bytes: int = 0
    sent: int = 0
    messages: int = 0
    decoded: int = 0
    decode_saved_s: float = 0.0
    device_images: int = 0
    device_bytes: int = 0
    fallbacks: int = 0
    samples: int = 0
    """Samples that were handed to the consumer, in all passes."""
    waited_s: float = 0.0
    """Seconds that the consumer waited for batches, in all passes."""
    by_source: Callable[[], dict[str, int]] | None = field(default=None, repr=False)
    """Returns the payload bytes read from each source of a mixture."""
    _lock: threading.Lock = field(default_factory=new_lock, repr=False)
    _waits: threading.local = field(default_factory=threading.local, repr=False)

    def waited(self, place: str, seconds: float) -> None:
        """Note the time of a read within another piece of work of this thread, for `take_waits`."""
        waits = self._waits.__dict__
        waits[place] = waits.get(place, 0.0) + seconds

    def take_waits(self) -> dict[str, float]:
        """Return the seconds that this thread has waited for places since the last call."""
        waits = self._waits.__dict__
        if not waits:
            return {}
        taken = dict(waits)
        waits.clear()
        return taken

    def add_bytes(self, place: str, count: int) -> None:
        """Add payload bytes that were read from one of PLACES."""
        with self._lock:
            self.bytes[place] += count

    def add(self, event: str, count: float = 1) -> None:
        """Add to the counter named `event`."""
        # Under a lock: `+=` on an attribute is several steps of the interpreter, and counts of
        # other threads would be lost.
        with self._lock:
            setattr(self, event, getattr(self, event) + count)

    def hand_over(self, samples: int, waited_s: float) -> None:
        """Count a batch that the consumer takes."""
        with self._lock:
            self.samples += samples
            self.waited_s += waited_s

    def snapshot(self) -> dict[str, object]:
        """Return all counts, for a report."""
        sources = {} if self.by_source is None else {"source_bytes": self.by_source()}
        with self._lock:
            counts = {name: getattr(self, name) for name in _REPORTED}
        return {**sources, **counts, "bytes": dict(self.bytes)}


# Sentences for users, and faults of tiers

_MOST: Final = 1000
"""Notes that are kept; a failing disk would otherwise fill the memory with them."""
_FAULTS: Final = frozenset(
    {
        errno.EDQUOT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EIO,
        errno.EMEDIUMTYPE,
        errno.ENODEV,
        errno.ENOLCK,
        errno.ENOMEDIUM,
        errno.ENOSPC,
        errno.ENOTCONN,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.EROFS,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EUCLEAN,
    }
)
"""Error numbers of disks and servers that fail; others, as of a missing folder, are mistakes of
users."""
_REMEDIES: Final = {
    errno.EROFS: "mount it writable, or leave it out of --tiers",
    errno.ESTALE: "mount it again, or leave it out of --tiers",
    errno.ENOSPC: "free space there, or inodes (df -i), or lower its capacity in --tiers",
    errno.EDQUOT: "free space there, or lower its capacity in --tiers",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or leave it out of --tiers",
}


def is_fault(error: BaseException) -> bool:
    """True for an error of a disk or a server, rather than of whoever has named the tier."""
    return _number(error) in _FAULTS


def tier_remedy(number: int | None) -> str:
    """Return the remedy for an error number of a tier."""
    return _REMEDIES.get(number or 0, "check the disk, or leave it out of --tiers")


def _number(error: BaseException) -> int | None:
    """Return the error number of an error, or of the one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        number = getattr(seen, "errno", None)
        if number is not None:
            return int(number)
        seen = seen.__cause__
    return None


class RunNotes:
    """Sentences that users should read once: failures that were handled, decisions. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._lock = new_lock()
        self._events: list[str] = []
        self._faults: set[tuple[str, str, int | None]] = set()
        """(path, verb, error number) of the faults of tiers that were told."""

    def add(self, event: str) -> None:
        """Remember a sentence."""
        with self._lock:
            if len(self._events) < _MOST:
                self._events.append(event)

    def tier_failed(
        self,
        path: str,
        doing: str,
        error: BaseException,
        then: str = "its blocks are read from elsewhere",
    ) -> None:
        """Count an error of a tier, and tell it once for each tier and kind of error. `doing` is
        `read`, `written`, `cleared` or `opened`; `then` is the consequence, as the end of a
        sentence."""
        number = _number(error)
        self.counters.add("tier_errors")
        with self._lock:
            if (path, doing, number) in self._faults:
                return
            self._faults.add((path, doing, number))
        if isinstance(error, TierError):
            self.add(f"{error}; {then}")
            return
        reason = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        self.add(f"tier {path} cannot be {doing} ({reason}): {tier_remedy(number)}; {then}")

    def all(self) -> list[str]:
        """Return the sentences in order, without duplicates."""
        with self._lock:
            return list(dict.fromkeys(self._events))
