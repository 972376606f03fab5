"""Parts of arrays that lie in a file as they are: only the bytes of a part are read."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray, plain_chunks
from dlio.data.source import File
from dlio.util.memory import new_memory

_LEAST_RUN: Final = 4096
"""Consecutive bytes of a part that are worth a request: storage reads no less than a page."""


def ranged_array(
    file: File,
    where: str,
    offset: int,
    shape: Sequence[int],
    stored: npt.DTypeLike,
    *,
    fortran: bool = False,
) -> ChunkedArray:
    """Return an array that lies in a file without gaps; parts of up to 1 MiB are its chunks.

    Args:
        where: for errors.
        offset: of the first element, in bytes.
        stored: type of the elements, with their byte order.
        fortran: the first dimension varies fastest.
    """
    dtype = np.dtype(stored)
    order = tuple(shape)[::-1] if fortran else tuple(shape)
    chunks = plain_chunks(order, dtype.itemsize)

    def read(box: Box) -> npt.NDArray[Any]:
        if not fortran:
            return _read(file, offset, order, dtype, box)
        return _read(file, offset, order, dtype, box[::-1]).T

    own = chunks[::-1] if fortran else chunks
    return ChunkedArray(where, tuple(shape), dtype.newbyteorder("="), own, read)


def read_slab(
    file: File,
    offset: int,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    parts: Sequence[slice | int],
) -> npt.NDArray[np.generic] | None:
    """Read a part of some rows alone; None if it is all of them, or many small pieces of each.

    Args:
        offset: of the array's first element, in bytes.
        dtype: of the elements, as they are stored.
        parts: of the leading dimensions, rows first.
    """
    sides = [slice(None)] * len(shape)
    sides[: len(parts)] = [p if isinstance(p, slice) else slice(p, p + 1) for p in parts]
    bounds = [side.indices(size) for side, size in zip(sides, shape, strict=True)]
    box = tuple(slice(first, max(first, last)) for first, last, _ in bounds)
    counts = [side.stop - side.start for side in box]
    if not math.prod(counts) or counts[1:] == list(shape[1:]):
        return None
    axis = max(k for k, count in enumerate(counts) if count < shape[k] or k == 0)
    if axis > 1 and math.prod(counts[axis:]) * dtype.itemsize < _LEAST_RUN:
        return None
    steps = [slice(None, None, step) for _, _, step in bounds]
    inner = zip(parts[1:], steps[1:], strict=False)
    key = [0 if not isinstance(part, slice) else step for part, step in inner]
    return _read(file, offset, shape, dtype, box)[(slice(None), *key)]


def _read(
    file: File, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], box: Box
) -> npt.NDArray[Any]:
    """Read a part of an array in C order, each run of consecutive bytes with one request."""
    sides = tuple(part.stop - part.start for part in box)
    memory = new_memory(math.prod(sides) * dtype.itemsize)
    whole = len(shape)
    while whole and sides[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    """Dimensions before those that a run covers."""
    run = math.prod(sides[outer:]) * dtype.itemsize
    steps = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    first = offset + sum(part.start * step for part, step in zip(box, steps, strict=True))
    if run:
        for number, place in enumerate(np.ndindex(*sides[:outer])):
            at = first + sum(k * step for k, step in zip(place, steps, strict=False))
            file.read_into(at, memory[number * run : (number + 1) * run])
    return np.frombuffer(memory, dtype).reshape(sides)
