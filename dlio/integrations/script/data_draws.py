"""Random numbers that a script's data set draws while it makes samples, such as crops and flips.

How many it draws is for each sample to say. Ranks make other samples each, so they draw from states
of their own: the script's numbers stay the same on all ranks, and crops are not those of another
rank's samples.
"""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
import torch

from dlio.comm import Communicator

_Data = TypeVar("_Data")
_SEEDS: Final = 1 << 31
_END: Final = object()


class DataDraws:
    """The states of Python's, NumPy's and torch's generators from which data sets of this rank
    draw."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._own: tuple[Any, ...] | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw numbers of this rank's own within a `with` statement."""
        shared = _states()
        if self._own is None:
            seed = (zlib.crc32(shared[0].numpy().tobytes()) + self._comm.rank) % _SEEDS
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 - data sets draw from the global generator
            torch.default_generator.manual_seed(seed)
        else:
            _restore(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _restore(shared)

    def fetched(self, batches: Iterator[_Data]) -> Iterator[_Data]:
        """Yield batches that a data set makes in this thread."""
        while True:
            with self.own():
                batch: Any = next(batches, _END)
            if batch is _END:
                return
            yield batch


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
