"""A callback of `dlio train` that writes the CPU time of rank 0."""

import time

from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.report import EpochReport
from dlio.util.whole_files import write_json


class CpuTime(Callback):
    """Write the CPU seconds of rank 0's process from the first step to the end of each epoch.

    They include evaluation and, on several ranks, the time that MPI waits.

    Args:
        path: file to write, a list of a number per epoch.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._began = 0.0
        self._seconds: list[float] = []

    def begins(self, run: Run) -> None:
        self._began = time.process_time()

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self._seconds.append(time.process_time() - self._began)
        if run.comm.rank == 0:
            write_json(self._path, self._seconds)
