"""Specifications of tiers, as users write them: `ram:2GiB,/local/scratch:20GiB`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
from dlio.util.settings import settings
from dlio.util.shared import SHARED_MEMORY
from dlio.util.units import format_bytes, parse_bytes

__all__ = ["TierSpec", "choose_tiers", "decoded_spec", "default_tiers", "parse_tiers"]

_LEAST: Final = 16 << 20
"""Bytes of the smallest RAM tier that is made by default."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a node, as specified by the user."""

    kind: str
    """`ram` or `disk`; reports count bytes by it."""
    root: str
    """Folder that the tier's private folder is made in."""
    capacity: int
    """Bytes per node."""
    decoded: bool = False
    """True if it keeps decoded images, above the tiers of blocks."""

    def __str__(self) -> str:
        place = "ram" if self.kind == "ram" else self.root
        text = f"{place}:{format_bytes(self.capacity).replace(' ', '')}"
        return f"{text}:decoded" if self.decoded else text


def parse_tiers(text: str) -> list[TierSpec]:
    """Parse a comma-separated list of tiers, fastest first.

    `ram:SIZE` is shared memory, `FOLDER:SIZE` a disk, `ram:SIZE:decoded` (at most one) keeps
    decoded images, and `none` means that there are none. Persistent memory is a folder on its file
    system, with or without `pmem:` before it.

    Raises UsageError that quotes the part that is invalid.
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
    """Return the default: a RAM tier for the data set.

    It takes at most a quarter of this machine's free memory, and half of its free shared memory.
    No tier is made where that is too little to be of use, as in a small container.

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
    """Return the tiers of blocks that were given, else those of DLIO_TIERS, else the default.

    A tier of decoded images alone gets the default tiers of blocks as well, for the images that it
    has no room for.

    Args:
        data_bytes: the data set's payload bytes.
        nodes_here: pretended nodes that share this machine.

    Raises UsageError.
    """
    if tiers is None:
        tiers = settings().tiers
    if tiers is None:
        return default_tiers(data_bytes, nodes_here)
    given = parse_tiers(tiers) if isinstance(tiers, str) else list(tiers)
    specs = [spec for spec in given if not spec.decoded]
    return specs if specs or not given else default_tiers(data_bytes, nodes_here)


def decoded_spec(tiers: str | Sequence[TierSpec] | None) -> TierSpec | None:
    """Return the tier of decoded images, None if none is specified. Raises UsageError."""
    if tiers is None:
        tiers = settings().tiers or "none"
    specs = parse_tiers(tiers) if isinstance(tiers, str) else tiers
    return next((spec for spec in specs if spec.decoded), None)


def _available_memory() -> int:
    """Return the bytes that this machine can use without swapping; cgroups are ignored."""
    with open("/proc/meminfo", encoding="ascii") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
