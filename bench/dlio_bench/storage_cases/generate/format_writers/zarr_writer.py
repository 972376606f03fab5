"""The writer of a Zarr store, version 3, with arrays `x` and `y`: its shards are the files.

x: uint8, (samples, size), one chunk for each sample. y: int64, (samples,), one chunk.
"""

import os
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt

from dlio_bench.storage_cases.generate.format_writers.part import FilePart
from dlio_bench.storage_cases.workload import Workload


def make_store(path: str, workload: Workload, labels: npt.NDArray[np.int64], size: int) -> None:
    """Write the store's description and its labels."""
    import zarr

    group = zarr.open_group(path, mode="a", zarr_format=3)
    _array(group, "x", workload.samples, workload.samples_per_file, size)
    group.create_array(
        "y",
        data=labels,
        chunks=labels.shape,
        compressors=None,
        config={"write_empty_chunks": True},
        overwrite=True,
    )


def write_zarr(path: str, part: FilePart) -> None:
    """Write a shard, as Zarr makes it of a store that holds these samples only."""
    import zarr

    count, size = len(part.sizes), int(part.sizes[0])
    store = f"{path}.store"
    shutil.rmtree(store, ignore_errors=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        array = _array(zarr.open_group(store, mode="w", zarr_format=3), "x", count, count, size)
        array[:] = np.stack(list(part.payloads()))
        os.rename(os.path.join(store, "x", "c", "0", "0"), path)
    finally:
        shutil.rmtree(store, ignore_errors=True)


def _array(group: Any, name: str, samples: int, per_file: int, size: int) -> Any:
    return group.create_array(
        name,
        shape=(samples, size),
        dtype="uint8",
        chunks=(1, size),
        shards=(per_file, size) if per_file > 1 else None,
        compressors=None,
        config={"write_empty_chunks": True},
        overwrite=True,
    )
