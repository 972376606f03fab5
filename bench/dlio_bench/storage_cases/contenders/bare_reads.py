"""Parallel reads of a data set's files without a loader: the most that the storage gives."""

import os
import time
from collections.abc import Callable
from typing import Final

from dlio.errors import SourceError
from dlio.util.threads import Workers
from dlio_bench.storage_cases.contenders.rank_loader import LoaderShare

THREADS: Final = (1, 4, 16, 64)
"""Numbers of threads per rank that are tried."""
_PIECE: Final = 1 << 20


def bare_rate(
    place: LoaderShare, threads: int, seconds: float, barrier: Callable[[], object]
) -> float:
    """Return the bytes per second at which this rank's threads read its share of the files.

    Files are read in pieces of 1 MiB, from a rank's own files, in order. Each piece opens its
    file, as loaders do that cannot keep millions open.

    Args:
        threads: reads at a time.
        seconds: time after which no further piece begins.
        barrier: called before the first read; returns when all ranks have called it.
    """
    files = place.generated.files[place.rank :: place.ranks]
    pieces = [
        (path, offset) for path in files for offset in range(0, os.stat(path).st_size, _PIECE)
    ]
    barrier()
    began = time.perf_counter()
    counts = [0] * threads
    errors: list[OSError] = []

    def read(worker: int) -> None:
        try:
            for path, offset in pieces[worker::threads]:
                if time.perf_counter() - began > seconds or errors:
                    return
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    counts[worker] += len(os.pread(descriptor, _PIECE, offset))
                finally:
                    os.close(descriptor)
        except OSError as error:
            errors.append(error)

    with Workers("dlio-bench-bare", read, threads) as running:
        running.wait()
    if errors:
        raise SourceError(f"{errors[0].filename}: {errors[0].strerror}") from errors[0]
    return sum(counts) / (time.perf_counter() - began)
