"""Parse and format byte counts and times, such as `20GiB` and `1.25 s`."""

import re
from typing import Final

from dlio.errors import UsageError

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZES: Final[dict[str, int]] = {
    **{name.lower(): size for name, size in _UNITS.items()},
    **{f"{letter}": 2 ** (10 * k) for k, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * k) for k, letter in enumerate("kmgt", 1)},
}
"""Bytes of each unit that users may write, in lower case."""
_MOST: Final = 2**62


def parse_bytes(text: str, name: str = "") -> int:
    """Parse a capacity such as `20GiB`, `20GB`, `1.5 TiB` or `4096B` into bytes; errors begin with
    the `name` of its option.

    As coreutils have it, GiB and G are 2^30 bytes, and GB is 10^9. Case does not matter.

    Raises UsageError for anything else, negative numbers and unknown units included.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    size = _SIZES.get(match[2].lower()) if match else None
    if match is None or size is None:
        raise UsageError(
            f"{name} {text!r} is not a size: write a number and a unit, such as 20GiB (or 20G: "
            "2^30 bytes each) or 20GB (10^9 bytes each)".lstrip()
        )
    count = float(match[1]) * size
    if count > _MOST:
        most = "give 4 EiB (2^62 bytes) at most"
        raise UsageError(f"{name} {text!r} is more than any machine has: {most}".lstrip())
    return int(count)


def parse_seconds(text: str, name: str = "") -> float:
    """Parse a time such as `200ms`, `0.2s` or `20us` into seconds.

    Raises UsageError, which begins with the `name` of its option.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*", text)
    if match is None:
        raise UsageError(
            f"{name} {text!r} is not a time: write a number and s, ms or us, such as 200ms".lstrip()
        )
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2]]


def format_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit, as in `1.25 s` and `20 us`."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(count: float) -> str:
    """Format a byte count in the largest unit in which it is at least 1, as in `1.5 GiB`."""
    unit = "B"
    for name, size in _UNITS.items():
        if abs(count) >= size:
            unit = name
    value = count / _UNITS[unit]
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"


def exact_bytes(count: float) -> str:
    """Format a byte count so that `parse_bytes` returns exactly it, as in `20GiB`."""
    name, size = max(
        ((name, size) for name, size in _UNITS.items() if count % size == 0),
        key=lambda unit: unit[1],
        default=("B", 1),
    )
    return f"{int(count) // size}{name}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, such as `1 rank`, `1,024 ranks` and `2 batches`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch":
        return f"{number:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}s"
