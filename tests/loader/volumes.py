"""A volume in Zarr stores, and the chunks that a part of it touches."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

__all__ = ["CHUNKS", "PATCH", "SHAPE", "Part", "cut", "drawn", "store", "touched"]

SHAPE = (20, 30, 41)
CHUNKS = (8, 8, 16)
PATCH = (7, 6, 9)
Part = tuple[int, ...]


def drawn(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random(SHAPE, np.float32)


def store(path: Path, kind: str, volume: npt.NDArray[np.float32]) -> str:
    version: Any = 2 if kind == "v2" else 3
    shards = {"shards": tuple(2 * n for n in CHUNKS)} if kind == "sharded" else {}
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    group.create_array("image", data=volume, chunks=CHUNKS, **shards)  # type: ignore[arg-type]
    return str(path)


def touched(start: Sequence[int], side: Sequence[int], chunk: Sequence[int]) -> set[Part]:
    ranges = [
        range(a // c, (a + n - 1) // c + 1) for a, n, c in zip(start, side, chunk, strict=True)
    ]
    return set(itertools.product(*ranges))


def cut(volume: npt.NDArray[Any], start: Sequence[int], side: Sequence[int]) -> npt.NDArray[Any]:
    return volume[tuple(slice(a, a + n) for a, n in zip(start, side, strict=True))]
