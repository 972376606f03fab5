"""`generate`: the files of a workload written in parallel, each complete or not at all."""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.errors import UsageError
from dlio.util.trusted_files import closing_descriptor
from dlio.util.units import counted, format_bytes
from dlio_bench.results.terminal import advance, working
from dlio_bench.storage_cases.generate.content import sample_sizes
from dlio_bench.storage_cases.generate.format_writers import WRITERS, FilePart, make_store
from dlio_bench.storage_cases.generate.stamp import check_folder, write_stamp
from dlio_bench.storage_cases.workload import Workload

_TEMPORARY: Final = ".writing"
"""Suffix of a file until it is complete."""
_OWN_BYTES: Final = 1024
"""Upper limit of what a format adds to each sample, for the check of free space."""
_QUEUED: Final = 1000
"""Files that are given to the threads at a time."""
_STORE_COMPLETE: Final = os.path.join("y", "c", "0")
"""The file of a Zarr store that is written last, before its shards."""
_TRAIN: Final = "train"
_VALID: Final = "valid"
"""Folder that DLIO looks for even if it evaluates nothing; it stays empty."""
_SUFFIXES: Final = {"folder": "ppm", "native": "dlio"}
_FILES_PER_CLASS: Final = 1000


@dataclass(frozen=True, slots=True)
class GeneratedData:
    """A complete data set of a workload."""

    workload: Workload
    source: str
    """Path for `dlio.open`."""
    options: Mapping[str, Any]
    """Further arguments of `dlio.open`."""
    files: tuple[str, ...]
    """Paths of the data files; sample k lies in file k // workload.samples_per_file."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each sample, without its label and the format's own bytes; shape (samples,)."""
    file_bytes: int
    """Bytes of all files."""
    written_files: int = 0
    """Files that this call wrote; 0 if all were there."""
    seconds: float = 0.0
    """Time that writing took, until the data was on the disk."""
    field: str = "image"
    """Name of the field with the sample's bytes, as `dlio.open` gives it."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all samples."""
        if not self.workload.sample_bytes_stdev:
            return self.workload.samples * int(self.sizes[0])
        return int(self.sizes.sum())


def generate(
    workload: Workload,
    folder: str,
    *,
    threads: int = 4,
    rank: int = 0,
    ranks: int = 1,
    barrier: Callable[[], object] = lambda: None,
) -> GeneratedData:
    """Write the data of a workload into a folder, or find it complete there.

    After an interruption the same call continues. All ranks call this together, and each writes
    its share of the files; they meet at the barrier three times. The folder is new, empty, or holds
    this workload's data, and its parent must exist.

    Raises UsageError if the folder holds something else, cannot be written, or has no room.
    """
    sizes = sample_sizes(workload)
    _check_shape(workload)
    started = time.monotonic()
    data = _DataFiles(workload, folder, sizes)
    with _explained(folder):
        if rank == 0:
            data.prepare()
    barrier()
    with _explained(folder):
        missing = data.missing(range(rank, workload.files, ranks))
        if missing:
            data.write(missing, threads, shown=rank == 0)
            _sync(folder)
    barrier()
    with _explained(folder):
        with ThreadPoolExecutor(threads, "dlio-generate") as pool:
            file_sizes = np.array(list(pool.map(os.path.getsize, data.paths)), np.int64)
        if rank == 0:
            _finish(workload, folder, file_sizes)
    barrier()
    source, options, field = _source_of(workload, folder)
    return GeneratedData(
        workload=workload,
        source=source,
        options=options,
        field=field,
        files=data.paths,
        sizes=sizes,
        file_bytes=int(file_sizes.sum()),
        written_files=len(missing),
        seconds=time.monotonic() - started if missing else 0.0,
    )


def _check_shape(workload: Workload) -> None:
    if workload.files < 1 or workload.samples_per_file < 1:
        raise UsageError(
            f"workload {workload.name}: {counted(workload.files, 'file')} of "
            f"{counted(workload.samples_per_file, 'sample')}"
            " hold nothing: give at least one of each"
        )
    if workload.format == "folder" and workload.samples_per_file != 1:
        raise UsageError(
            f"workload {workload.name}: a file of class folders is one sample: set "
            "dataset.num_samples_per_file to 1, and num_files_train to the number of samples"
        )


class _DataFiles:
    def __init__(self, workload: Workload, folder: str, sizes: npt.NDArray[np.int64]) -> None:
        self._workload, self._folder, self._sizes = workload, folder, sizes
        self.paths = tuple(
            os.path.join(folder, _path_of_file(workload, number))
            for number in range(workload.files)
        )

    def prepare(self) -> None:
        """Check the folder and its room, and make the folders of the data."""
        workload, folder = self._workload, self._folder
        parent = os.path.dirname(os.path.abspath(folder))
        if not os.path.isdir(parent):
            raise UsageError(f"{folder} cannot be made: {parent} does not exist; create it")
        with suppress(FileExistsError):
            os.mkdir(folder)
        if check_folder(folder, workload) is None:
            write_stamp(folder, workload)
        self._check_room(self.missing(range(workload.files)))
        for name in (*_folder_names(workload), _VALID):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        store = _store_name(workload)
        if store and not os.path.exists(os.path.join(folder, store, _STORE_COMPLETE)):
            of_files = [_class_of_file(workload, number) for number in range(workload.files)]
            labels = np.repeat(np.array(of_files, np.int64), workload.samples_per_file)
            make_store(os.path.join(folder, store), workload, labels, int(self._sizes[0]))

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of those files that are not there, or not complete."""
        return [number for number in numbers if not self._is_complete(number)]

    def write(self, missing: Sequence[int], threads: int, *, shown: bool) -> None:
        """Write files; each appears complete or not at all."""
        total = sum(map(self._bytes_of, missing))
        with (
            working(f"generating {self._workload.name}", total, shown=shown),
            ThreadPoolExecutor(threads, "dlio-generate") as pool,
        ):
            # A part at a time: after an error no more files begin, and there may be millions.
            for first in range(0, len(missing), _QUEUED):
                for written in pool.map(self._write_one, missing[first : first + _QUEUED]):
                    advance(steps=written)

    def _check_room(self, missing: Sequence[int]) -> None:
        """Raise UsageError unless files fit into the file system; network file systems with quotas
        show what is left of these."""
        needed = sum(map(self._bytes_of, missing))
        needed += len(missing) * self._workload.samples_per_file * _OWN_BYTES
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise UsageError(
                f"{self._folder}: {format_bytes(needed)} are to be written, but "
                f"{format_bytes(free)} are free: name a folder with more room, or fewer files "
                "(dataset.num_files_train)"
            )
        # Some file systems make inodes as they need them, and name none.
        if status.f_files and len(missing) > status.f_favail:
            raise UsageError(
                f"{self._folder}: {counted(len(missing), 'file')} to write, but "
                f"room for {counted(status.f_favail, 'inode')}: name another folder, or fewer "
                "files (dataset.num_files_train)"
            )

    def _rows(self, number: int) -> slice:
        first = number * self._workload.samples_per_file
        return slice(first, first + self._workload.samples_per_file)

    def _bytes_of(self, number: int) -> int:
        return int(self._sizes[self._rows(number)].sum())

    def _is_complete(self, number: int) -> bool:
        try:
            return os.path.getsize(self.paths[number]) >= self._bytes_of(number)
        except FileNotFoundError:
            return False

    def _write_one(self, number: int) -> int:
        workload, rows = self._workload, self._rows(number)
        label = _class_of_file(workload, number)
        part = FilePart(workload, number, label, self._sizes[rows], rows.start)
        path, temporary = self.paths[number], self.paths[number] + _TEMPORARY
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        try:
            WRITERS[workload.format](temporary, part)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return self._bytes_of(number)


def _finish(workload: Workload, folder: str, sizes: npt.NDArray[np.int64]) -> None:
    """Verify that all files are as they were generated, and note that they are complete."""
    digest = xxhash.xxh3_128_hexdigest(sizes.astype("<i8").tobytes())
    stamped = check_folder(folder, workload)
    if stamped == digest:
        return
    if stamped:
        raise UsageError(
            f"{folder}: files have other sizes than those that were generated: remove the folder "
            "and generate it again"
        )
    write_stamp(folder, workload, digest)


def _sync(folder: str) -> None:
    """Wait until the data is on the disk: pages that are not could not leave the page cache."""
    with closing_descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)


@contextmanager
def _explained(folder: str) -> Iterator[None]:
    """Turn an error of the operating system into one with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = {
            errno.ENOSPC: "free some space there, or name another folder",
            errno.EDQUOT: "the quota is used up: free some space there, or name another folder",
            errno.EROFS: "the file system is read-only: name a folder that can be written",
        }.get(error.errno or 0, "name a folder that you can write")
        where = error.filename or folder
        raise UsageError(f"{where} cannot be written ({error.strerror}): {remedy}") from error


# Names of a workload's files, as DLIO has them where it knows the format


@lru_cache(maxsize=4)
def _folder_names(workload: Workload) -> tuple[str, ...]:
    """Return the folders of the data, below that of the workload."""
    if workload.format != "folder":
        return (_TRAIN,)
    count = _classes(workload)
    width = len(str(count))
    return tuple(f"{_TRAIN}/{number:0{width}d}" for number in range(count))


def _path_of_file(workload: Workload, number: int) -> str:
    """Return the path of a file, below the folder of the workload.

    In the order of their names, files are in the order of their numbers.
    """
    width = len(str(workload.files))
    suffix = _SUFFIXES.get(workload.format, workload.format)
    name = f"img_{number:0{width}d}_of_{workload.files}.{suffix}"
    if workload.format == "zarr":
        # A store whose shards are the files.
        return os.path.join(_store_name(workload), "x", "c", str(number), "0")
    folders = _folder_names(workload)
    return os.path.join(folders[number * len(folders) // workload.files], name)


def _store_name(workload: Workload) -> str:
    """Return the folder of the store that holds all files; "" for formats without one."""
    return os.path.join(_TRAIN, "data.zarr") if workload.format == "zarr" else ""


def _class_of_file(workload: Workload, number: int) -> int:
    """Return the label of the samples of a file."""
    return number * _classes(workload) // workload.files


def _classes(workload: Workload) -> int:
    usual = min(1000, -(-workload.files // _FILES_PER_CLASS))
    return max(1, min(workload.files, workload.subfolders or max(2, usual)))


def _source_of(workload: Workload, folder: str) -> tuple[str, dict[str, str], str]:
    """Return the path for `dlio.open`, its further arguments, and the field with the bytes."""
    train = os.path.join(folder, _TRAIN)
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
            return f"{os.path.join(folder, _store_name(workload))}::x,y", {}, "x"
        case _:
            return train, {}, "image"
