"""Names of a workload's files, as DLIO has them where it knows the format. Pure."""

import os
from functools import lru_cache
from typing import Final

from dlio_bench.storage_cases.workload import Workload

TRAIN: Final = "train"
VALID: Final = "valid"
"""Folder that DLIO looks for even if it evaluates nothing; it stays empty."""
_SUFFIXES: Final = {"folder": "ppm", "native": "dlio"}
_FILES_PER_CLASS: Final = 1000


@lru_cache(maxsize=4)
def folder_names(workload: Workload) -> tuple[str, ...]:
    """Return the folders of the data, below that of the workload."""
    if workload.format != "folder":
        return (TRAIN,)
    count = _classes(workload)
    width = len(str(count))
    return tuple(f"{TRAIN}/{number:0{width}d}" for number in range(count))


def path_of_file(workload: Workload, number: int) -> str:
    """Return the path of a file, below the folder of the workload.

    In the order of their names, files are in the order of their numbers.
    """
    width = len(str(workload.files))
    suffix = _SUFFIXES.get(workload.format, workload.format)
    name = f"img_{number:0{width}d}_of_{workload.files}.{suffix}"
    if workload.format == "zarr":
        # A store whose shards are the files.
        return os.path.join(store_name(workload), "x", "c", str(number), "0")
    folders = folder_names(workload)
    return os.path.join(folders[number * len(folders) // workload.files], name)


def store_name(workload: Workload) -> str:
    """Return the folder of the store that holds all files; "" for formats without one."""
    return os.path.join(TRAIN, "data.zarr") if workload.format == "zarr" else ""


def class_of_file(workload: Workload, number: int) -> int:
    """Return the label of the samples of a file."""
    return number * _classes(workload) // workload.files


def _classes(workload: Workload) -> int:
    usual = min(1000, -(-workload.files // _FILES_PER_CLASS))
    return max(1, min(workload.files, workload.subfolders or max(2, usual)))


def source_of(workload: Workload, folder: str) -> tuple[str, dict[str, str], str]:
    """Return the path for `dlio.open`, its further arguments, and the field with the bytes."""
    train = os.path.join(folder, TRAIN)
    single = workload.samples_per_file == 1
    match workload.format:
        case "npz" | "hdf5" if single:
            name = "x" if workload.format == "npz" else "records_0"
            return f"{train}::{name}", {"samples": "files"}, name
        case "npz":
            return f"{train}::x,y", {}, "x"
        case "hdf5":
            return f"{train}::records_0,labels", {}, "records_0"
        case "zarr":
            return f"{os.path.join(folder, store_name(workload))}::x,y", {}, "x"
        case _:
            return train, {}, "image"
