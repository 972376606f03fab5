"""The axes of a mesh: `data=2,space=2`, checked against the number of ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.units import counted

AXES: Final = ("data", "model", "space")
"""`data`: ranks of different samples. `model`: ranks that share the weights of layers. `space`:
ranks that share each sample."""
_EXAMPLE: Final = "such as data=2,space=2"


@dataclass(frozen=True, slots=True)
class Axes:
    """Names and sizes of the axes; ranks are numbered in C order, the last axis fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, name: str) -> int:
        """Ranks along an axis; 1 if the mesh does not have it."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def place(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate along each axis."""
        place: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def group(self, rank: int, names: tuple[str, ...]) -> int:
        """Return the number of the group of ranks that differ from `rank` along `names` alone."""
        place, number = self.place(rank), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name not in names:
                number = number * size + place[name]
        return number

    def __str__(self) -> str:
        return _text(dict(zip(self.names, self.sizes, strict=True)))


def parse_axes(given: str | Mapping[str, int], ranks: int) -> Axes:
    """Return the axes of a mesh of `ranks` ranks, from a text or sizes by name.

    Without `data`, the ranks that the other axes leave are along a first axis `data`.

    Raises UsageError for unknown axes, invalid sizes, and sizes that do not fit the ranks.
    """
    sizes = parse_sizes(given)
    rest = math.prod(sizes.values())
    if "data" not in sizes:
        if ranks % rest:
            raise UsageError(
                f"--mesh {_text(sizes)} needs a multiple of {counted(rest, 'rank')}, and there "
                f"are {ranks}: "
                f"start {rest * max(1, ranks // rest)}, or give other sizes"
            )
        sizes = {"data": ranks // rest, **sizes}
    elif rest != ranks:
        raise UsageError(
            f"--mesh {_text(sizes)} needs {counted(rest, 'rank')}, and there are {ranks}: start "
            f"{rest}, or "
            "give other sizes"
        )
    return Axes(tuple(sizes), tuple(sizes.values()))


def _text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def parse_sizes(given: str | Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the axes that are given, by name. Raises UsageError for invalid ones."""
    if isinstance(given, str):
        pairs = [tuple(part.split("=", 1)) for part in given.split(",") if part.strip()]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise UsageError(f"--mesh {given!r}: give sizes of axes, {_EXAMPLE}")
        named = [(name.strip(), size.strip()) for name, size in pairs]
    elif isinstance(given, Mapping):
        named = [(str(name), str(size)) for name, size in given.items()]
    else:
        raise UsageError(f"--mesh {given!r}: give text, {_EXAMPLE}")
    sizes: dict[str, int] = {}
    for name, size in named:
        if name not in AXES:
            raise UsageError(
                f"--mesh: unknown axis {name!r}: choose from {', '.join(AXES)}{nearest(name, AXES)}"
            )
        if name in sizes:
            raise UsageError(f"--mesh names {name} twice: give each axis once")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"--mesh {name}={size}: give a number of ranks, 1 or more")
        sizes[name] = int(size)
    return sizes
