"""Arrays in files that are read a chunk at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.source import File

Box = tuple[slice, ...]
"""Part of an array: a slice of step 1 for each dimension."""
_RUN_BYTES: Final = 64 << 10
"""Consecutive bytes of an array without chunks that are read together at least, if it has them."""
_CHUNK_BYTES: Final = 1 << 20
"""Bytes that stand for a chunk of an array without chunks, at most."""


@dataclass(frozen=True, slots=True)
class ChunkedArray:
    """An array in a file that is read a chunk at a time."""

    where: str
    """File and name, for errors."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    """Shape of a chunk; one at the end of a dimension may be smaller."""
    read: Callable[[Box], npt.NDArray[Any]]
    """Reads a part; thread-safe."""
    stored: tuple[File, int] | None = None
    """The file and its byte from which on the elements lie as payloads have them: in C order,
    little-endian and without gaps; None where they do not."""

    @property
    def has_plain_chunks(self) -> bool:
        """True if the bytes of each chunk follow each other where the array is `stored`."""
        cut = [axis for axis, side in enumerate(self.chunks) if side > 1]
        rest = range(cut[0] + 1 if cut else 0, len(self.shape))
        return all(self.chunks[axis] >= self.shape[axis] for axis in rest) or not cut

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    def box(self, place: Sequence[int]) -> Box:
        """Return the part that a chunk covers. `place` is its number along each dimension."""
        sides = zip(place, self.chunks, self.shape, strict=True)
        return tuple(slice(k * c, min((k + 1) * c, n)) for k, c, n in sides)

    def touched(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (number of the chunk, its part of the array) of the chunks that a part touches."""
        sides = [
            range(part.start // c, -(-part.stop // c))
            for part, c in zip(box, self.chunks, strict=True)
        ]
        grid = self.grid
        for place in product(*sides):
            number = int(np.ravel_multi_index(place, grid)) if place else 0
            yield number, self.box(place)


def plain_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the shape of parts that stand for chunks of an array without any, in C order.

    A part has a mebibyte at most, in runs of 64 KiB or more if the array has those.
    """
    sides = [1] * len(shape)
    left = max(1, _RUN_BYTES // max(1, itemsize))
    rest = max(1, _CHUNK_BYTES // max(1, itemsize))
    for axis in reversed(range(len(shape))):
        sides[axis] = max(1, min(shape[axis], left))
        rest //= sides[axis]
        left //= sides[axis]
        if left < 2:
            left = max(1, rest)
        if rest < 2:
            break
    return tuple(sides)
