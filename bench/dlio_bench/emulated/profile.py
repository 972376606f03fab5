"""Profiles of emulated storage, by name and as a mix of parts. Pure.

    none
    lustre-busy
    latency(20ms,open=5ms)+bandwidth(150MiB)
    s3+errors(0.1%)+seed(3)

Parts are joined by `+`; a later part replaces an earlier one's figures.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.units import parse_bytes, parse_seconds

_PART: Final = re.compile(r"([a-z0-9-]+)(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class Profile:
    """How storage answers. Times in seconds, bandwidths in bytes a second.

    A request is a read of 1 MiB or less, as FUSE divides larger ones.
    """

    latency_s: float = 0.0
    """Of a read, however many are under way at a time."""
    open_latency_s: float = 0.0
    """Of opening or creating a file."""
    metadata_latency_s: float = 0.0
    """Of attributes, listings, renames and deletions."""
    write_latency_s: float = 0.0
    """Of a write; 0 as where clients buffer writes, which then cost bandwidth alone."""
    sync_latency_s: float = 0.0
    """Of fsync, which is not passed on to the disk below."""
    bandwidth: float | None = None
    """Of all readers together; None for no limit."""
    each_bandwidth: float | None = None
    """Of one open file."""
    write_bandwidth: float | None = None
    """Of all writers together."""
    tail_share: float = 0.0
    """Share of the requests that take `tail_times` as long."""
    tail_times: float = 1.0
    metadata_rate: float | None = None
    """Opens, attributes, listings and changes of names a second, of all clients together."""
    error_share: float = 0.0
    """Share of reads that fail with EIO."""
    hang_share: float = 0.0
    """Share of reads that never end."""
    seed: int = 0
    """Seed for the requests of the tail and those that fail or hang."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share") and not 0 <= value <= 1:
                raise UsageError(f"{field.name} {value}: give a share between 0 and 1")
            if field.name.endswith(("bandwidth", "_rate")) and value is not None and value <= 0:
                raise UsageError(f"{field.name} {value}: give more than 0")
            if field.name.endswith(("_s", "_times")) and value < 0:
                raise UsageError(f"{field.name} {value}: give 0 or more")

    @property
    def emulates(self) -> bool:
        """False if the storage is to be used as it is."""
        return self != Profile(seed=self.seed)


NAMED: Final[dict[str, Profile]] = {
    "none": Profile(),
    "lustre-busy": Profile(
        # One to two seeks of a 7,200 rpm disk (8.5 ms each, by data sheets), which a random read
        # of an OST waits for behind another job's.
        latency_s=0.010,
        # An MDT round trip and a layout, with others waiting.
        open_latency_s=0.005,
        metadata_latency_s=0.002,
        sync_latency_s=0.010,
        # One job's share; a file has one stripe by default (Lustre manual, stripe_count), and thus
        # one OST's array.
        bandwidth=400 * 2**20,
        each_bandwidth=200 * 2**20,
        write_bandwidth=300 * 2**20,
        # Contention: the slowest of 100 requests in 0.2 s.
        tail_share=0.01,
        tail_times=20.0,
        # One client's share of an MDS.
        metadata_rate=1000.0,
    ),
    # By AWS, Performance guidelines for S3.
    "s3": Profile(
        # Small objects answer in roughly 100-200 ms; less within a region of today.
        latency_s=0.060,
        metadata_latency_s=0.030,
        write_latency_s=0.010,
        sync_latency_s=0.100,
        # One concurrent request for each 85 to 90 MB/s.
        each_bandwidth=85 * 10**6,
        write_bandwidth=500 * 10**6,
        # Retry the slowest few per cent.
        tail_share=0.01,
        tail_times=5.0,
        # GET and HEAD requests a second and prefix.
        metadata_rate=5500.0,
    ),
    "nfs": Profile(
        # A round trip of 0.2 ms and a server with an SSD, with others waiting.
        latency_s=0.001,
        # Close-to-open consistency: LOOKUP, OPEN and GETATTR (RFC 7530).
        open_latency_s=0.001,
        metadata_latency_s=0.0005,
        # COMMIT, a turn of a 7,200 rpm disk (8.3 ms).
        sync_latency_s=0.008,
        # 1 Gbit/s Ethernet without its headers.
        bandwidth=117 * 10**6,
        write_bandwidth=117 * 10**6,
        tail_share=0.01,
        tail_times=10.0,
        metadata_rate=3000.0,
    ),
}
"""Profiles by name."""


def _share(text: str) -> float:
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a share: write 0.01 or 1%") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


_PARTS: Final[dict[str, tuple[dict[str, str], Callable[[str], float]]]] = {
    "latency": (
        {
            "all": "latency_s",
            "open": "open_latency_s",
            "metadata": "metadata_latency_s",
            "write": "write_latency_s",
            "sync": "sync_latency_s",
        },
        parse_seconds,
    ),
    "bandwidth": (
        {"all": "bandwidth", "each": "each_bandwidth", "write": "write_bandwidth"},
        lambda text: float(parse_bytes(text.removesuffix("/s"))),
    ),
    "tail": ({"share": "tail_share", "times": "tail_times"}, _share),
    "metadata": ({"rate": "metadata_rate"}, _number),
    "errors": ({"share": "error_share"}, _share),
    "hangs": ({"share": "hang_share"}, _share),
    "seed": ({"seed": "seed"}, _number),
}
"""Parts by name: fields of `Profile` by the argument's name, of which the first one needs none, and
what parses them."""


def parse_profile(text: str) -> Profile:
    """Parse a profile such as `s3` or `latency(20ms,open=5ms)+bandwidth(150MiB)`.

    `latency(5ms)` is that of reads, opens and metadata alike; with `open=5ms`, or any other
    argument, those that are not named take no time. Raises UsageError that names
    the parts and arguments there are.
    """
    profile = Profile()
    for part in _split(text, "+"):
        match = _PART.fullmatch(part.strip())
        name = match[1] if match else part.strip()
        if match is None or (name not in NAMED and name not in _PARTS):
            known = [*NAMED, *(f"{each}(...)" for each in _PARTS)]
            raise UsageError(
                f"{text!r}: {part!r} is not a part of a profile of emulated storage"
                f"{nearest(name, [*NAMED, *_PARTS])}: join some of {', '.join(known)} by +"
            )
        if name in NAMED and match[2] is None:
            profile = replace(profile, **_figures(NAMED[name]))
        elif name in _PARTS and match[2] is not None:
            profile = replace(profile, **_arguments(text, name, match[2]))
        else:
            example = name if name in NAMED else f"{name}({next(iter(_PARTS[name][0]))}=...)"
            raise UsageError(f"{text!r}: {part!r}: write {example}")
    return profile


def _figures(profile: Profile) -> dict[str, Any]:
    """Return the figures of a profile that are not the usual ones."""
    usual = Profile()
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _arguments(text: str, name: str, inside: str) -> dict[str, Any]:
    known, parse = _PARTS[name]
    keys = list(known)
    figures: dict[str, Any] = {}
    for place, argument in enumerate(_split(inside, ",")):
        key, equals, value = argument.partition("=")
        if not equals:
            key, value = (keys[place] if place < len(keys) else ""), argument
        key = key.strip()
        if key not in known:
            raise UsageError(
                f"{text!r}: {name}({inside}) has no {argument.strip()!r}"
                f"{nearest(key, keys)}: it takes {', '.join(keys)}"
            )
        try:
            figures[known[key]] = parse(value.strip())
        except UsageError as error:
            raise UsageError(f"{text!r}: {name}, {key}: {error}") from error
    if name == "latency" and list(figures) == ["latency_s"]:
        figures["open_latency_s"] = figures["metadata_latency_s"] = figures["latency_s"]
    if name == "seed":
        figures["seed"] = int(figures["seed"])
    return figures


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator that is in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
