"""The learning rate of `dlio train`: a linear warm-up, then a schedule."""

import math
from typing import Final

SCHEDULES: Final = ("cosine", "linear", "step", "constant")
"""Names that --lr-schedule takes."""
_WARM_UP: Final = 0.15
"""Fraction of the training in which the learning rate rises to its peak."""
_STEPS: Final = (0.5, 0.75)
"""Fractions of the training after which the rate of `step` is a tenth of that before (He et al.,
arXiv 1512.03385)."""


def learning_rate(
    peak: float, done: float, batch: float, total: float, schedule: str = "cosine"
) -> float:
    """Return the learning rate of one step, by a schedule of which `cosine` and `linear` end at 0.

    It follows samples instead of steps, so that it does not depend on the number of ranks: `done`
    samples of the `total` of the training come before the `batch` of this step.
    """
    warm = max(batch, _WARM_UP * total)
    if done < warm:
        return peak * min(1.0, (done + batch) / warm)
    if schedule == "constant":
        return peak
    if schedule == "step":
        return float(peak * 0.1 ** sum(done >= each * total for each in _STEPS))
    share = (done - warm) / max(1, total - warm)
    if schedule == "linear":
        return peak * max(0.0, 1 - share)
    return peak * 0.5 * (1 + math.cos(math.pi * share))
