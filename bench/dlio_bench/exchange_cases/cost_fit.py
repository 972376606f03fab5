"""Fit the cost model of a message to measured messages."""

import math
from collections.abc import Sequence

import numpy as np

from dlio.plan.exchange_cost import LinkCost


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[LinkCost, float]:
    """Return the link that fits measured messages best, and its root mean square relative error.

    Least squares of relative errors, because sizes and times span five decades.

    Args:
        sizes: bytes of each message.
        seconds: time that each message took.
    """
    weights = 1 / np.asarray(seconds)
    columns = np.stack([weights, np.asarray(sizes) * weights], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones(len(weights)), rcond=None)
    link = LinkCost(max(0.0, float(alpha)), max(0.0, float(beta)))
    errors = [link.message(n) / s - 1 for n, s in zip(sizes, seconds, strict=True)]
    return link, math.sqrt(sum(error * error for error in errors) / len(errors))
