"""Entries beyond a fixed threshold, sent as the threshold (Strom, "Scalable distributed DNN
training using commodity GPU cloud computing", Interspeech 2015)."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.train.exchange.compress.sparse import MOST_SENT

_FIRST: Final = 8
"""Thresholds that are chosen here begin as so many root mean squares."""
_REACH: Final = 2.0**23
_LOWEST, _HIGHEST = -126, 127
"""Exponents of thresholds."""


class Threshold:
    """Each tensor has a threshold, a power of two, from its first gradient that is not zero on.

    It begins as 8 times that gradient's root mean square: sums of gradients that are independent
    from step to step leave [-t, t] after (t / rms)^2 steps, so that about one entry in 64 is sent.
    It doubles after every 64 messages in which more entries were beyond it than could be sent:
    else residuals would grow without end where gradients are alike from step to step. In 64 such
    messages each entry has its turn. Little is sent in the first steps, until residuals have grown.

    Args:
        threshold: the same for all tensors and steps, instead; rounded to the nearest power of two.

    Raises UsageError for a threshold that is not above 0.
    """

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not 0 < threshold < math.inf:
            raise UsageError(f"a threshold of {threshold}: give a number above 0")
        self._fixed = None if threshold is None else _power_of_two(threshold)
        self._levels: dict[int, float] = {}
        self._crowded: dict[int, int] = {}

    def level(self, tensor: int, sample: npt.NDArray[np.float32]) -> float:
        if self._fixed is not None:
            return self._fixed
        level = self._levels.get(tensor, 0.0)
        if level == 0:
            rms = float(np.sqrt(np.mean(np.square(sample, dtype=np.float64))))
            if 0 < rms < math.inf:
                level = self._levels[tensor] = _power_of_two(_FIRST * rms)
        return level

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        largest = float(sizes.max())
        while largest > level * _REACH:
            level *= 2
        return level, level

    def crowded(self, tensor: int) -> None:
        self._crowded[tensor] = self._crowded.get(tensor, 0) + 1
        if self._crowded[tensor] % MOST_SENT == 0 and tensor in self._levels:
            self._levels[tensor] = min(2 * self._levels[tensor], 2.0**_HIGHEST)


def _power_of_two(value: float) -> float:
    return 2.0 ** min(max(round(math.log2(value)), _LOWEST), _HIGHEST)
