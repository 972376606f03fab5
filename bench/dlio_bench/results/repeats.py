"""Medians, spreads, and confidence intervals of ratios."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
ENOUGH: Final = 6
"""Repeats from which on a 95 % interval of a median exists.

Of n values, all lie on one side of the true median with a chance of 2 * 0.5**n: 6 % of 5 values, so
that even the range from the least to the largest is too narrow for 95 %.
"""


class Summary(TypedDict):
    """Summary of repeats."""

    median: float
    min: float
    max: float
    all: list[float]


class Deviation(Summary):
    """Summary of repeats with their mean and standard deviation."""

    mean: float
    deviation: float


_DRAWS: Final = 10_000
_SEED: Final = 20180713
_BOUNDS: Final = (2.5, 97.5)


def turns(names: Iterable[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield (repeat, name) for each name within each repeat, in every second one the other way
    round: a machine that has rested may be faster for the first."""
    listed = list(names)
    for repeat in range(repeats):
        for name in listed if repeat % 2 == 0 else listed[::-1]:
            yield repeat, name


def spread(values: Sequence[float]) -> Summary:
    """Median, minimum, maximum, and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def deviation(values: Sequence[float]) -> Deviation:
    """Mean, standard deviation (0 of one value), and the spread."""
    return {
        **spread(values),
        "mean": statistics.mean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def ratio(values: Sequence[float], to: Sequence[float]) -> Summary:
    """Median, least, largest and all ratios of paired repeats."""
    return spread([value / other for value, other in zip(values, to, strict=True)])


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the median; None for fewer than two values.

    The values are drawn with replacement 10,000 times, from a fixed seed. Of fewer than `ENOUGH`
    values the interval is too narrow; say so next to it.
    """
    if len(values) < 2:
        return None
    drawn = np.median(_drawn(np.random.default_rng(_SEED), values), axis=1)
    return _bounds(drawn)


def interval_of_ratio(values: Sequence[float], to: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of median(values) / median(to), not paired.

    None if either has fewer than two values, or a divisor that is zero can be drawn.
    """
    if min(len(values), len(to)) < 2:
        return None
    random = np.random.default_rng(_SEED)
    divisors = np.median(_drawn(random, to), axis=1)
    if not np.all(divisors):
        return None
    return _bounds(np.median(_drawn(random, values), axis=1) / divisors)


def _drawn(random: np.random.Generator, values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return draws with replacement; shape (draws, number of values)."""
    given = np.asarray(values, dtype=np.float64)
    return given[random.integers(0, len(given), (_DRAWS, len(given)))]


def _bounds(drawn: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(drawn, _BOUNDS)
    return float(low), float(high)
