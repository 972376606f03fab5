"""Entries beyond a threshold, all sent as one size (Strom, "Scalable distributed DNN training using
commodity GPU cloud computing", Interspeech 2015).

Strom sends them as the threshold, which leaves something of each to later messages. Here it is a
quarter more, about what they are in the mean, as entries go when they have just passed it.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.train.exchange.compress.sparse import order_statistic

__all__ = ["Threshold"]

_SENT: Final = 1.25
"""Value that entries are sent as, in multiples of the threshold."""
_REACH: Final = 2.0**17
"""Of numbers of seven significant bits: four of a threshold's, and three of `_SENT`."""
_STEPS: Final = 8
"""Of thresholds in an octave: 1, 1.125, and so on to 1.875."""
_LOWEST, _HIGHEST = -126 * _STEPS, 127 * _STEPS


class Threshold:
    """One threshold per tensor, which follows the magnitude that the desired share of entries
    exceeds, by a sixteenth to an eighth per message.

    A constant threshold, as in Strom's paper, would need tuning for each network, and would send
    ever less as gradients shrink, or let residuals grow.

    Args:
        threshold: the same for all tensors and messages, instead; rounded to four bits.

    Raises UsageError for a threshold that is not above 0.
    """

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not 0 < threshold < math.inf:
            raise UsageError(f"a threshold of {threshold}: give a number above 0")
        self._fixed = None if threshold is None else _number(_step(threshold))
        self.steps: dict[int, int] = {}

    def level(self, tensor: int, sample: npt.NDArray[np.float32], ratio: float) -> float:
        if self._fixed is not None:
            return self._fixed
        level = order_statistic(sample, ratio)
        if 0 < level < math.inf:
            wanted = _step(level)
            last = self.steps.get(tensor, wanted)
            self.steps[tensor] = last + min(max(wanted - last, -1), 1)
        return _number(self.steps[tensor]) if tensor in self.steps else 0.0

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        largest = float(sizes.max())
        while largest > level * _REACH:
            level *= 2
        return level, _SENT * level


def _step(value: float) -> int:
    """The number of the nearest threshold."""
    fraction, exponent = math.frexp(value)
    step = (exponent - 1) * _STEPS + round((2 * fraction - 1) * _STEPS)
    return min(max(step, _LOWEST), _HIGHEST)


def _number(step: int) -> float:
    return math.ldexp(1 + step % _STEPS / _STEPS, step // _STEPS)
