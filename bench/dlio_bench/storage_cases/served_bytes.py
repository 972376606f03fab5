"""Counters of storage that was read: bytes and requests of processes, block device and slowfs.

    meter = Meter(folder)
    before = meter.snapshot()
    ...
    served = meter.snapshot() - before
    print(meter.verdict(served, bytes_of_data).describe())

A loader that gets its bytes from the page cache asks for them (`asked_bytes`), but nothing is
fetched (`fetched_bytes`).
"""

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from dlio_bench.bench_processes import descendants
from dlio_bench.emulated.emulated_folder import STATS
from dlio_bench.emulated.emulated_mount import stats
from dlio_bench.file_systems import FileSystem, file_system_of

_SECTOR: Final = 512
"""Bytes of the unit of /proc/diskstats, whatever the device's own is."""
_OF_PROCESSES: Final = ("asked_bytes", "asked_requests", "fetched_bytes")
_OF_SLOWFS: Final = ("bytes", "reads", "opens", "attributes")
_CACHED: Final = 0.1
"""Share of the bytes from the page cache from which on a run is said to have read from it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Share of the page cache in what was read."""

    cache_share: float | None
    """Share of the bytes that the page cache gave, 0 to 1; None if it cannot be known here."""
    source: str
    """What says so, such as `slowfs`, `the processes`; "" if nothing does."""

    @property
    def from_cache(self) -> bool:
        """True if more than a tenth of the bytes came from the page cache."""
        return self.cache_share is not None and self.cache_share > _CACHED

    def describe(self) -> str:
        """Return a sentence for the report."""
        if self.cache_share is None:
            return "the share of the page cache is unknown: no counter here shows the storage"
        if self.from_cache:
            return (
                f"{self.cache_share:.0%} of the bytes came from the page cache (by {self.source}): "
                "these are figures of memory, not of the storage"
            )
        return f"{self.cache_share:.0%} of the bytes came from the page cache"


@dataclass(frozen=True, slots=True)
class ServedBytes:
    """Counters since some beginning, or the difference of two snapshots; None is unknown."""

    asked_bytes: int = 0
    """Bytes that this process tree got from read system calls, of any file (rchar)."""
    asked_requests: int = 0
    """Its read system calls."""
    fetched_bytes: int = 0
    """Bytes that storage sent for this process tree (read_bytes); FUSE does not count there."""
    device_bytes: int | None = None
    """Bytes that were read from the block device, by anybody."""
    device_requests: int | None = None
    slowfs_bytes: int | None = None
    """Bytes that slowfs served, to anybody."""
    slowfs_reads: int | None = None
    slowfs_opens: int | None = None
    slowfs_attributes: int | None = None

    def __sub__(self, before: Self) -> "ServedBytes":
        pairs = zip(asdict(self).items(), asdict(before).values(), strict=True)
        less: dict[str, Any] = {
            name: None if now is None or then is None else now - then for (name, now), then in pairs
        }
        return ServedBytes(**less)

    def added(self, other: "ServedBytes", *, shared: bool) -> "ServedBytes":
        """Return the counters of two process trees together; those of the device and of slowfs,
        which belong to a machine, only if it is another one (`shared`)."""
        total: dict[str, Any] = asdict(self)
        for name, count in asdict(other).items():
            if count is not None and (shared or name in _OF_PROCESSES):
                total[name] = (total[name] or 0) + count
        return ServedBytes(**total)


class Meter:
    """Counters of this process, its children, and the storage below a folder of the data.

    Children that have ended count once their parents have waited for them.
    """

    def __init__(self, folder: str) -> None:
        self.file_system: FileSystem = file_system_of(folder)
        self._device = _device_of(self.file_system)
        # Some kernels and sandboxes do not count what processes fetch.
        self._counted = "read_bytes" in _io_of(os.getpid())
        top = self.file_system.mountpoint
        is_slowfs = self.file_system.fuse and os.path.exists(os.path.join(top, STATS))
        self._slowfs = top if is_slowfs else None

    def verdict(
        self, served: ServedBytes, wanted_bytes: int, resident_before: float | None = None
    ) -> Verdict:
        """Judge whether data came from the page cache, between two snapshots.

        `wanted_bytes` are those that the loader needed from the files meanwhile: those that tiers
        of its own held do not count. Readahead and the format's own bytes may make the storage
        serve more. `resident_before`, the share of the files' pages that were in the page cache
        before, decides where the storage has no counter.
        """
        system = self.file_system
        if system.in_memory:
            return Verdict(1.0, f"{system.type}, whose files are memory")
        fetched, source = 0, ""
        if served.slowfs_bytes is not None:
            fetched, source = served.slowfs_bytes, "slowfs"
        elif self._counted and (
            self._device or (system.remote and served.fetched_bytes > _CACHED * wanted_bytes)
        ):
            fetched, source = served.fetched_bytes, "the processes"
        elif resident_before is not None:
            return Verdict(resident_before, "the page cache before the run")
        else:
            return Verdict(None, "")
        share = max(0.0, 1 - fetched / wanted_bytes) if wanted_bytes > 0 else 0.0
        return Verdict(share, source)

    def snapshot(self) -> ServedBytes:
        """Return the counters now."""
        counts = Counter[str]()
        for pid in descendants(os.getpid()):
            counts.update(_io_of(pid))
        device = _disk(self._device) if self._device else None
        slow = _slowfs(self._slowfs) if self._slowfs else {}
        return ServedBytes(
            asked_bytes=counts["rchar"],
            asked_requests=counts["syscr"],
            fetched_bytes=counts["read_bytes"],
            device_bytes=device[1] if device else None,
            device_requests=device[0] if device else None,
            **{f"slowfs_{key}": slow.get(key) for key in _OF_SLOWFS},
        )


def _device_of(system: FileSystem) -> str:
    """Return `major:minor` of the block device below a file system; "" without one."""
    if system.type == "overlay" and system.upper and os.path.isdir(system.upper):
        system = file_system_of(system.upper)
    if not system.device.startswith("0:"):
        return system.device
    if system.source.startswith("/dev/") and os.path.exists(system.source):
        number = os.stat(system.source).st_rdev  # Such as btrfs, which numbers its own.
        return f"{os.major(number)}:{os.minor(number)}"
    return ""


def _disk(device: str) -> tuple[int, int] | None:
    """Return (requests, bytes) that were read from a block device."""
    with open("/proc/diskstats", encoding="ascii", errors="replace") as file:
        for line in file:
            columns = line.split()
            if ":".join(columns[:2]) == device:
                return int(columns[3]), int(columns[5]) * _SECTOR
    return None


def _slowfs(mountpoint: str) -> dict[str, int]:
    try:
        return stats(mountpoint)
    except (OSError, ValueError):
        return {}


def _io_of(pid: int) -> dict[str, int]:
    """Return the counters of a process; none of one that has ended, or that may not be asked."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            rows = (line.partition(":") for line in file)
            return {key: int(value) for key, _, value in rows}
    except (OSError, ValueError):
        return {}
