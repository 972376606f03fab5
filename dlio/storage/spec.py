"""What the user says of tiers: `ram:2GiB,/local/scratch:20GiB`, fastest first."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dlio.errors import UsageError
from dlio.util.settings import settings
from dlio.util.shared import SHARED_MEMORY
from dlio.util.units import format_bytes, parse_bytes

_LEAST = 16 << 20
"""Bytes: a default RAM tier below this is not worth its trouble."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a node, as asked for."""

    kind: str
    """`ram` or `disk`; what reports count its bytes under."""
    root: str
    """Folder that the tier's own, private folder is made in."""
    capacity: int
    """Bytes per node."""
    decoded: bool = False
    """Whether it keeps decoded images, above the tiers of blocks."""

    def __str__(self) -> str:
        place = "ram" if self.kind == "ram" else self.root
        text = f"{place}:{format_bytes(self.capacity).replace(' ', '')}"
        return f"{text}:decoded" if self.decoded else text


def parse_tiers(text: str) -> list[TierSpec]:
    """Parse a comma-separated list of `ram:SIZE` and `FOLDER:SIZE`; `none` is no tier at all.
    Persistent memory is a folder on its file system, with or without `pmem:` before it.
    `ram:SIZE:decoded`, one at most, keeps decoded images.

    Raises UsageError that quotes the part that cannot be understood.
    """
    if text.strip() in ("", "none"):
        return []
    specs = []
    for part in text.split(","):
        text_, decoded, rest = part.strip().partition(":decoded")
        if rest:
            raise UsageError(f"tier {part.strip()!r}: write ram:8GiB:decoded")
        place, colon, size = text_.rpartition(":")
        if not colon or not place:
            raise UsageError(
                f"tier {part.strip()!r} has no size: write ram:2GiB or /local/scratch:20GiB"
            )
        capacity = parse_bytes(size)
        place = place.removeprefix("pmem:")
        if place == "ram":
            specs.append(TierSpec("ram", SHARED_MEMORY, capacity, bool(decoded)))
        elif decoded:
            raise UsageError(f"tier {part.strip()!r}: decoded images are kept in RAM alone")
        else:
            specs.append(TierSpec("disk", os.path.abspath(os.path.expanduser(place)), capacity))
    places = [(spec.root, spec.decoded) for spec in specs]
    if len(set(places)) != len(places):
        raise UsageError(f"tiers {text!r} name the same place twice: give each place once")
    return specs


def default_tiers(data_bytes: int, nodes_here: int = 1) -> list[TierSpec]:
    """RAM for the data set, but at most a quarter of what this machine has free, and half of what
    its shared memory has; no tier where that is next to nothing, as in a small container.

    Args:
        data_bytes: the data set's payload bytes.
        nodes_here: pretended nodes that share this machine.
    """
    available = _available_memory()
    shared = os.statvfs(SHARED_MEMORY)
    room = min(available // 4, shared.f_bavail * shared.f_frsize // 2) // nodes_here
    wanted = data_bytes + data_bytes // 16 + (1 << 20)
    if room < min(wanted, _LEAST):
        return []
    return [TierSpec("ram", SHARED_MEMORY, min(room, wanted))]


def choose_tiers(
    tiers: str | Sequence[TierSpec] | None, data_bytes: int, nodes_here: int = 1
) -> list[TierSpec]:
    """The tiers of blocks that were given, else those of DLIO_TIERS, else the default. The default
    is taken beside a tier of decoded images alone, too: something has to hold what it was not."""
    if tiers is None:
        tiers = settings().tiers
    if tiers is None:
        return default_tiers(data_bytes, nodes_here)
    given = parse_tiers(tiers) if isinstance(tiers, str) else list(tiers)
    specs = [spec for spec in given if not spec.decoded]
    return specs if specs or not given else default_tiers(data_bytes, nodes_here)


def decoded_spec(tiers: str | Sequence[TierSpec] | None) -> TierSpec | None:
    """The tier of decoded images, where one is asked for."""
    if tiers is None:
        tiers = settings().tiers or "none"
    specs = parse_tiers(tiers) if isinstance(tiers, str) else tiers
    return next((spec for spec in specs if spec.decoded), None)


def _available_memory() -> int:
    """Bytes of memory that can be used without swapping; of the machine, not of a cgroup."""
    with open("/proc/meminfo", encoding="ascii") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
