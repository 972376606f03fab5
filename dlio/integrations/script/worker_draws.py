"""Random numbers that samples draw in the workers of a loader, threads or forked processes.

A worker draws for the samples that it makes one after another: on ranks these are others than in
one process, and so are their numbers. Samples that seed a generator first have the same ones.
"""

import os
import sys
import threading
from types import FrameType
from typing import Final

from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

_FETCH: Final = _MapDatasetFetcher.fetch.__code__
"""Makes samples in a process: a seed that is given outside of it is the worker's."""


class _Seeds(threading.local):
    """Seeds of this thread, or process."""

    are_given = False


class WorkerDraws:
    """Tells this process whether samples have drawn numbers that depend on their worker. `close`
    ends it."""

    def __init__(self) -> None:
        self._process, self._has_drawn = os.getpid(), False
        self._file = os.memfd_create("dlio-worker-draws")
        """Memory to which processes write that are forked from this one."""
        self._seeds = _Seeds()

    def seeded(self) -> None:
        """Note a seed that the script gives, if this is a worker."""
        frame: FrameType | None = None if get_worker_info() is None else sys._getframe()
        while frame is not None and not self._seeds.are_given:
            self._seeds.are_given = frame.f_code is _FETCH
            frame = frame.f_back

    def drawn(self) -> None:
        """Note a call of a generator that samples share with others, if this is a worker."""
        if get_worker_info() is None or self._seeds.are_given:
            return
        if os.getpid() == self._process:
            self._has_drawn = True
        else:
            os.pwrite(self._file, b"1", 0)

    def take(self) -> bool:
        """Return True if samples have drawn since this was called last."""
        has_drawn, self._has_drawn = self._has_drawn, False
        if os.pread(self._file, 1, 0) != b"1":
            return has_drawn
        os.pwrite(self._file, b"0", 0)
        return True

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._file)
