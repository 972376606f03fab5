"""The rate of a file system's metadata operations, as mdtest measures it.

Each thread creates, stats, opens, lists and removes files of its own, in a folder of its own. All
threads begin each kind of operation together.
"""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.util.threads import Workers
from dlio.util.units import counted

OPERATIONS: Final = ("create", "stat", "open", "list", "remove")
"""create: create and close. open: open and close. list: entries of a folder."""
SCRATCH: Final = ".dlio-metadata-"
"""Prefix of the folder in which the files are; it is removed at the end."""
_BATCH: Final = 64
"""Operations after which a thread looks whether it shall stop."""


@dataclass(frozen=True, slots=True)
class MetadataRate:
    """One kind of operation, by all threads together."""

    operation: str
    """One of OPERATIONS."""
    count: int
    """Operations; entries for `list`."""
    seconds: float
    """Time from the first to the last of them."""
    latencies_s: npt.NDArray[np.float64]
    """Seconds of each operation, of a whole listing for `list`; shape (operations,), sorted."""

    @property
    def per_second(self) -> float:
        """Operations per second."""
        return self.count / self.seconds if self.seconds else 0.0

    def percentile(self, share: float) -> float:
        """Return the latency in seconds that a share of the operations do not exceed."""
        return float(np.quantile(self.latencies_s, share, method="higher"))


def measure_metadata(path: str, *, files: int = 1000, threads: int = 4) -> list[MetadataRate]:
    """Measure the metadata operations of the file system that holds a folder.

    Each thread has so many empty files. Nothing is left in the folder, even after an error or
    Ctrl-C.

    Raises UsageError if the folder cannot be written.
    """
    if files < 1 or threads < 1:
        raise UsageError(
            f"{counted(files, 'file')} by {counted(threads, 'thread')}: give at least one of each"
        )
    try:
        scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=path)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        folders = [os.path.join(scratch, str(thread)) for thread in range(threads)]
        for folder in folders:
            os.mkdir(folder)
        return [_measure(operation, folders, files) for operation in OPERATIONS]
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(scratch)


def _measure(operation: str, folders: Sequence[str], files: int) -> MetadataRate:
    begin, stop = threading.Barrier(len(folders)), threading.Event()
    latencies: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(folders)
    spans = [(0, 0)] * len(folders)
    errors: list[OSError] = []
    operate, clock = _OPERATE[operation], time.perf_counter_ns

    def run(thread: int) -> None:
        work = [folders[thread]]
        if operation != "list":
            work = [os.path.join(folders[thread], f"f{number:07d}") for number in range(files)]
        taken = np.zeros(len(work), np.int64)
        with suppress(threading.BrokenBarrierError):
            begin.wait()
        started = clock()
        try:
            for number, name in enumerate(work):
                if number % _BATCH == 0 and stop.is_set():
                    return
                before = clock()
                operate(name)
                taken[number] = clock() - before
        except OSError as error:
            errors.append(error)
            stop.set()
        spans[thread] = (started, clock())
        latencies[thread] = taken

    def give_up() -> None:
        """End the threads, those too that wait for others to begin."""
        stop.set()
        begin.abort()

    # Leaving the block waits for the threads, so that nothing is made after the folder is removed.
    with Workers("dlio-metadata", run, len(folders), wake=give_up) as workers:
        workers.wait()
    if errors:
        raise errors[0]
    seconds = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
    return MetadataRate(
        operation, files * len(folders), seconds, np.sort(np.concatenate(latencies)) / 1e9
    )


def _open(path: str, flags: int = os.O_RDONLY) -> None:
    os.close(os.open(path, flags, 0o600))


_OPERATE: Final[dict[str, Callable[[str], object]]] = {
    "create": partial(_open, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "stat": os.stat,
    "open": _open,
    "list": os.listdir,
    "remove": os.unlink,
}


def _remove(scratch: str) -> None:
    """Remove the scratch folder; a second attempt for what appeared during the first."""
    for _ in range(2):
        shutil.rmtree(scratch, ignore_errors=True)
        if not os.path.lexists(scratch):
            return


def _unwritable(path: str, error: OSError) -> UsageError:
    remedies = {
        errno.EROFS: "the file system is read-only, so that only reading can be measured there",
        errno.ENOENT: "create the folder",
        errno.ENOTDIR: "name a folder",
        errno.ENOSPC: "free some space, or inodes, there",
        errno.EDQUOT: "the quota is used up: free some space there",
    }
    remedy = remedies.get(error.errno or 0, "name a folder that you can write")
    return UsageError(f"{path}: metadata cannot be measured ({error.strerror}): {remedy}")
