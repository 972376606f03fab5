"""Errors of tiers, judged in one place: the loader goes on without the tier.

A tier is a cache. Whatever its disk answers - a stale handle, an input/output error, a file system
that has become read-only or is full - costs time and not the job: a block that cannot be read or
written there comes from the next place that has it, last from the source. The user is told once for
each tier and kind of error, and every error is counted.
"""

import errno
from typing import Final

from dlio.errors import TierError
from dlio.storage.counters import Counters
from dlio.storage.notes import RunNotes
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.util.forks import new_lock
from dlio.util.printable import printable

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
    errno.ENOSPC: "free space there, or lower its capacity in --tiers",
    errno.EDQUOT: "free space there, or lower its capacity in --tiers",
}


def is_fault(error: BaseException) -> bool:
    """True for an error of a disk or a server, rather than of whoever has named the tier."""
    return _number(error) in _FAULTS


def _number(error: BaseException) -> int | None:
    """Return the error number of an error, or of the one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        number = getattr(seen, "errno", None)
        if number is not None:
            return int(number)
        seen = seen.__cause__
    return None


class TierHealth:
    """Counts and tells the errors of the tiers of one hierarchy. Thread-safe."""

    def __init__(self, counters: Counters, notes: RunNotes) -> None:
        self._counters, self._notes = counters, notes
        self._lock = new_lock()
        self._noted: set[tuple[str, str, int | None]] = set()

    def failed(self, path: str, doing: str, error: BaseException, then: str) -> None:
        """Note that a tier has failed.

        Args:
            path: of the tier.
            doing: `read`, `written`, `cleared` or `opened`.
            then: consequence, as the end of a sentence.
        """
        number = _number(error)
        self._counters.add("tier_errors")
        with self._lock:
            if (path, doing, number) in self._noted:
                return
            self._noted.add((path, doing, number))
        if isinstance(error, TierError):
            self._notes.add(f"{error}; {then}")
            return
        reason = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        remedy = _REMEDIES.get(number or 0, "check the disk, or leave it out of --tiers")
        self._notes.add(f"tier {path} cannot be {doing} ({reason}): {remedy}; {then}")


class LostTier(Tier):
    """A tier that could not be opened: it holds nothing, and takes nothing.

    Args:
        spec: its folder and capacity.
        path: of the folder.
    """

    def __init__(self, spec: TierSpec, path: str) -> None:
        self.spec, self.kind, self.path = spec, spec.kind, path
        self.writable = False
        self.hits = 0

    def keep(self) -> None:
        """Do nothing."""

    def free_bytes(self) -> int:
        """Return 0."""
        return 0

    def blocks(self) -> set[int]:
        """Return no blocks."""
        return set()

    def has(self, block: int) -> bool:
        """Return False."""
        return False

    def discard(self, block: int) -> None:
        """Do nothing."""

    def release(self, block: int) -> None:
        """Do nothing."""

    def claim(self, block: int) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""
