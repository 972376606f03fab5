"""The notice that a data set draws random numbers which threads share, so that no run repeats them.

torch's worker processes have random states of their own, seeded from torch's seed. Threads share
those of the process: which sample gets which number depends on which thread is first, and the
model's own draws, such as dropout's, come between them.
"""

import random
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import torch

from dlio.loader.contract import UserDataset
from dlio.util.printable import tell_once

_LOOKS: Final = 32
"""Samples of a loader that are looked at."""
_MODULES: Final[dict[str, Callable[[], Any]]] = {
    "random": random.getstate,
    "numpy.random": lambda: cast("tuple[Any, ...]", np.random.get_state())[1:],  # noqa: NPY002
    "torch": torch.get_rng_state,
}


class SharedDraws:
    """Looks at the first samples of a loader for draws, while its consumer waits, who draws from
    the same states. Thread-safe."""

    def __init__(self) -> None:
        self._left = _LOOKS
        self._waits = 0
        """Odd while the consumer waits for a batch."""
        self._lock = threading.Lock()

    @property
    def looks(self) -> bool:
        """True if more samples are to be looked at."""
        return self._left > 0

    def waiting(self, now: bool) -> None:
        """Note that the consumer begins or ends to wait."""
        self._waits += (self._waits % 2 == 0) is now

    def fetch(self, dataset: UserDataset, index: Any) -> Any:
        """Return a sample, and tell once of random numbers drawn for it."""
        waits = self._waits
        if waits % 2 == 0 or not self._lock.acquire(blocking=False):
            return dataset[index]
        try:
            before = {name: state() for name, state in _MODULES.items()}
            sample = dataset[index]
            drawn = [name for name, state in _MODULES.items() if not _same(state(), before[name])]
            if self._waits == waits:  # Nobody but data sets has drawn meanwhile.
                self._left -= 1
                if drawn:
                    self._left = 0
                    tell_once(
                        f"{type(dataset).__name__} draws random numbers of {' and '.join(drawn)}, "
                        "which the loader's threads share: no run repeats them; "
                        "workers='process' does"
                    )
        finally:
            self._lock.release()
        return sample


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(one[0], np.ndarray):
        return bool((one[0] == other[0]).all()) and one[1:] == other[1:]
    return bool(one == other)
