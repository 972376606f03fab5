"""Metrics of tasks: their names, and sums that ranks add up exactly.

Ranks add sums of 64-bit integers, so that a metric of the same outputs is the same on any number of
ranks, in any order of samples. A real number enters as a multiple of 2**-32.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Sums = npt.NDArray[np.int64]
"""Sums over samples, which ranks add up; shape (sums of the task,)."""
REAL: Final = 3
"""Integers that the sum of a real number takes."""
UNIT: Final = 2.0**-32
"""Real numbers are rounded to multiples of it."""
_LARGEST: Final = 2.0**40
"""Values from here on count as not finite: 2**22 of them would overflow their sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is shown."""

    label: str
    is_share: bool = False
    """True if it is shown in percent."""
    is_error: bool = False
    """True if less is better."""


METRICS: Final = {
    "accuracy": Metric("accuracy", is_share=True),
    "top5": Metric("top-5 accuracy", is_share=True),
    "auc": Metric("AUC"),
    "auc_error": Metric("largest error of the AUC", is_error=True),
    "loss": Metric("loss", is_error=True),
    "rmse": Metric("RMSE", is_error=True),
    "mae": Metric("mean absolute error", is_error=True),
    "r2": Metric("R2"),
    "iou": Metric("mean IoU", is_share=True),
    "image_loss": Metric("loss of the whole reconstruction", is_error=True),
}
"""Metrics by their names in reports."""


def show_metric(name: str, value: float | None) -> str:
    """Return a metric as text: `91.2%`, `0.8132`; `-` for None."""
    if value is None:
        return "-"
    metric = METRICS.get(name)
    if metric is not None and metric.is_share:
        return f"{value:.1%}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 10 else f"{value:.4g}"


def label(name: str) -> str:
    """Return the name of a metric in words."""
    return METRICS[name].label if name in METRICS else name


def goodness(name: str, value: float | None) -> float:
    """Return a number that is greater for a better value of a metric; -inf for None and NaN."""
    if value is None or math.isnan(value):
        return -math.inf
    metric = METRICS.get(name)
    return -value if metric is not None and metric.is_error else value


def real_sums(values: torch.Tensor) -> Sums:
    """Return the exact sum of values (n,), each rounded to a multiple of 2**-32; shape (REAL,).

    Those that are not finite, or 2**40 and more, are only counted.
    """
    wide = values.detach().to("cpu", torch.float64).numpy().reshape(-1)
    sound = np.abs(wide) < _LARGEST  # False for NaN.
    wide = wide[sound]
    whole = np.floor(wide)
    parts = np.rint((wide - whole) / UNIT)
    return np.array([whole.sum(), parts.sum(), len(sound) - len(wide)], np.float64).astype(np.int64)


def mean_of(sums: Sums, count: int) -> float:
    """Return the mean of values from `real_sums`: NaN for none, and if one was not finite."""
    if not count or sums[2]:
        return math.nan
    return (int(sums[0]) + int(sums[1]) * UNIT) / count
