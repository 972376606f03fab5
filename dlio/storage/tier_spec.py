"""Specifications of tiers, as users write them: `ram:2GiB,/local/scratch:20GiB`."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.errors import TierError, UsageError
from dlio.util.arguments import named, nearest, path_in
from dlio.util.settings import settings
from dlio.util.shared_folders import SHARED_MEMORY
from dlio.util.units import format_bytes, parse_bytes

_LEAST: Final = 16 << 20
"""Bytes of the smallest RAM tier that is made by default."""
_EXAMPLE: Final = "ram:8GiB,/local/scratch:200GiB"

_OTHER_NAMES: Final = ("memory", "mem", "dram", "shm")
"""Names that people give RAM."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a node, as specified by the user."""

    kind: str
    """`ram`, `disk` or `gpu`; reports count bytes by it."""
    root: str
    """Folder that the tier's private folder is made in; `gpu` for a rank's device."""
    capacity: int
    """Bytes per node; per rank on its device."""
    decoded: bool = False
    """True if it keeps decoded images, above the tiers of blocks."""

    def __str__(self) -> str:
        place = self.root if self.kind == "disk" else self.kind
        text = f"{place}:{format_bytes(self.capacity).replace(' ', '')}"
        return f"{text}:decoded" if self.decoded else text


Tiers = (
    str
    | os.PathLike[str]
    | Sequence[TierSpec | str | os.PathLike[str] | tuple[str | os.PathLike[str], str]]
)
"""Tiers as users give them: a text, or a list of such parts as `ram:8GiB`, also as pairs of a place
and a size: `(Path("/local/scratch"), "200GiB")`."""


def parse_tiers(tiers: Tiers) -> list[TierSpec]:
    """Parse a comma-separated list of tiers, or a list of its parts, fastest first.

    `ram:SIZE` is shared memory, `FOLDER:SIZE` a disk, `ram:SIZE:decoded` (at most one) keeps
    decoded images, `gpu:SIZE:decoded` keeps them on each rank's device, and `none` means that there
    are none. Persistent memory is a folder on its file system, with or without `pmem:` before it;
    `disk:` before a folder changes nothing.

    Raises UsageError that quotes the part that is invalid.
    """
    specs = [spec for part in _parts(tiers) for spec in _parsed(part)]
    places = [(spec.root, spec.decoded) for spec in specs]
    if len(set(places)) != len(places):
        shown = ",".join(map(str, specs))
        raise UsageError(f"tiers {shown!r} name the same place twice: give each place once")
    return specs


def _parts(tiers: Tiers) -> Iterator[TierSpec | str]:
    """Yield single tiers, as text unless they are parsed already."""
    if isinstance(tiers, str):
        yield from tiers.split(",") if tiers.strip() not in ("", "none") else ()
        return
    for each in tiers if isinstance(tiers, list | tuple) else (tiers,):
        if isinstance(each, TierSpec):
            yield each
        elif isinstance(each, str):
            yield from _parts(each)
        elif isinstance(each, os.PathLike):
            yield path_in("tiers", each)
        elif isinstance(each, tuple) and len(each) == 2:
            yield ":".join(path_in("tiers", item) for item in each)
        else:
            raise UsageError(
                f"{named('tiers', tiers)}: give text such as {_EXAMPLE!r}, a list of such parts, "
                "or 'none'"
            )


def _parsed(part: TierSpec | str) -> list[TierSpec]:
    if isinstance(part, TierSpec):
        return [part]
    part = part.strip()
    if not part:
        raise UsageError(f"tiers: a part between commas is empty: write them as {_EXAMPLE!r}")
    body, colon, kind = part.rpartition(":")
    decoded = bool(colon) and kind == "decoded"
    if colon and not decoded and nearest(kind, ("decoded",)):
        raise UsageError(f"tier {part!r}: write ram:8GiB:decoded{nearest(kind, ('decoded',))}")
    place, colon, size = (body if decoded else part).rpartition(":")
    if not colon or not place:
        if re.fullmatch(r"[\d.]+ *[KMGT]?i?B?", part, re.IGNORECASE):
            raise UsageError(f"tier {part!r} is a size alone: write ram:{part} or FOLDER:{part}")
        raise UsageError(f"tier {part!r} has no size: write ram:2GiB or /local/scratch:20GiB")
    capacity = parse_bytes(size, f"tier {part}: the size")
    if not capacity:
        raise UsageError(
            f"tier {part!r} would hold nothing: give it a size above 0, or leave it out"
        )
    place = place.removeprefix("pmem:").removeprefix("disk:")
    if place == "ram":
        return [TierSpec("ram", SHARED_MEMORY, capacity, decoded)]
    if place == "gpu":
        if not decoded:
            raise UsageError(f"tier {part!r}: a GPU keeps decoded images: write {part}:decoded")
        return [TierSpec("gpu", "gpu", capacity, decoded)]
    if decoded:
        raise UsageError(
            f"tier {part!r}: decoded images are kept in RAM or on a GPU: write ram:{size}:decoded "
            f"or gpu:{size}:decoded"
        )
    root = os.path.abspath(os.path.expanduser(path_in("tiers", place)))
    close = (
        ""
        if "/" in place or os.path.exists(root)
        else "; did you mean ram?"
        if place.lower() in _OTHER_NAMES
        else nearest(place, ("ram", "gpu", "pmem", "none"))
    )
    if close:
        raise UsageError(f"tier {part!r}: the folder {root} does not exist{close}")
    return [TierSpec("disk", root, capacity)]


def check_folders(tiers: Tiers | None) -> None:
    """Check that the folders of tiers exist, on the line where a user names them.

    Raises TierError. A disk that fails is none of the user's mistakes: the tier then stays unused.
    """
    tiers = settings().tiers if tiers is None else tiers
    for spec in () if tiers is None else parse_tiers(tiers):
        if spec.kind != "disk":
            continue
        try:
            os.stat(os.path.join(spec.root, ""))
        except FileNotFoundError:
            wrong = "is not there: create it, or name a folder"
        except NotADirectoryError:
            wrong = "is not a folder: name one"
        except OSError:
            continue
        else:
            continue
        raise TierError(
            f"tier {spec}: {spec.root} {wrong} of this node in --tiers (tiers=), or leave it out"
        )


def is_parsed(tiers: Tiers | None) -> bool:
    """True for specifications, False for tiers as users write them."""
    return isinstance(tiers, list | tuple) and all(isinstance(each, TierSpec) for each in tiers)


def default_tiers(block_bytes: int, nodes_here: int = 1) -> list[TierSpec]:
    """Return the default: a RAM tier for the blocks of the data set, which take so many bytes.

    It takes at most a quarter of this machine's free memory, and half of its free shared memory. No
    tier is made where that is too little to be of use, as in a small container. `nodes_here` are
    pretended nodes that share this machine.
    """
    available = _available_memory()
    shared = os.statvfs(SHARED_MEMORY)
    # A quarter: the page cache, which the source is read through, and the trainer need the rest.
    room = min(available // 4, shared.f_bavail * shared.f_frsize // 2) // nodes_here
    wanted = block_bytes + block_bytes // 16 + (1 << 20)
    # Docker gives containers 64 MiB of shared memory: a tier there would serve nobody, and torch's
    # workers need the room.
    if room < min(wanted, _LEAST):
        return []
    return [TierSpec("ram", SHARED_MEMORY, min(room, wanted))]


def choose_tiers(tiers: Tiers | None, block_bytes: int, nodes_here: int = 1) -> list[TierSpec]:
    """Return the tiers of blocks that were given, else those of DLIO_TIERS, else the default.

    A tier of decoded images alone gets the default tiers of blocks as well, for the images that it
    has no room for. `nodes_here` are pretended nodes that share this machine.

    Raises UsageError.
    """
    if tiers is None:
        tiers = settings().tiers
    if tiers is None:
        return default_tiers(block_bytes, nodes_here)
    given = parse_tiers(tiers)
    specs = [spec for spec in given if not spec.decoded]
    return specs if specs or not given else default_tiers(block_bytes, nodes_here)


def decoded_spec(tiers: Tiers | None, kind: str = "ram") -> TierSpec | None:
    """Return the tier of decoded images in RAM, or with `gpu` that on each rank's device; None if
    none is specified. Raises UsageError."""
    if tiers is None:
        tiers = settings().tiers or "none"
    specs = parse_tiers(tiers)
    return next((spec for spec in specs if spec.decoded and spec.kind == kind), None)


def _available_memory() -> int:
    """Return the bytes that this machine can use without swapping; cgroups are ignored."""
    with open("/proc/meminfo", encoding="ascii") as table:
        for line in table:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
