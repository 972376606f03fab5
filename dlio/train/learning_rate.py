"""The learning rate of `dlio train`: a linear warm-up, then half a cosine."""

import math
from typing import Final

__all__ = ["learning_rate"]

_WARM_UP: Final = 0.15
"""Fraction of the training in which the learning rate rises to its peak."""


def learning_rate(peak: float, done: float, batch: float, total: float) -> float:
    """Return the learning rate of one step.

    It follows samples instead of steps, so that it does not depend on the number of ranks.

    Args:
        peak: the greatest learning rate.
        done: samples of the whole training before this step.
        batch: samples of this step.
        total: samples of the whole training.
    """
    warm = max(batch, _WARM_UP * total)
    if done < warm:
        return peak * min(1.0, (done + batch) / warm)
    return peak * 0.5 * (1 + math.cos(math.pi * (done - warm) / max(1, total - warm)))
