"""Comparisons of drawn numbers with distributions, at a level of one in a thousand.

All numbers come from fixed seeds, so that a test passes each time or never.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dlio.image.random_source import KeyedRandom, RandomSource, TorchRandom

__all__ = ["SOURCES", "chi_square", "ks", "ks_of_two"]

SOURCES: dict[str, Callable[[int], RandomSource]] = {
    "keyed": lambda sample: KeyedRandom(11, 2, sample, 64),
    "torch": lambda _: TorchRandom(),
}
"""Sources of a sample's random numbers: a loader's, and torch's generator."""
_LEVEL = 1.95
"""The statistic of Kolmogorov and Smirnov that one in a thousand surpasses."""
_SIGMAS = 3.3


def ks(values: Sequence[float], low: float, high: float) -> None:
    """Check that numbers are distributed evenly from `low` to `high`."""
    ordered = (np.sort(np.asarray(values, float)) - low) / (high - low)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    gap = max(np.abs(ordered - steps[1:]).max(), np.abs(ordered - steps[:-1]).max())
    assert gap < _LEVEL / math.sqrt(len(ordered)), gap


def ks_of_two(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> None:
    """Check that two lists of numbers come from one distribution."""
    a, b = np.sort(np.asarray(ours, float)), np.sort(np.asarray(theirs, float))
    values = np.unique(np.concatenate([a, b]))
    ranks = [np.searchsorted(x, values, "right") / len(x) for x in (a, b)]
    gap = np.abs(ranks[0] - ranks[1]).max()
    assert gap < _LEVEL * math.sqrt(1 / len(a) + 1 / len(b)), gap


def chi_square(counts: Sequence[int], chances: Sequence[float] | None = None) -> None:
    """Check that counts fit chances, even ones for None."""
    wanted = np.full(len(counts), 1 / len(counts)) if chances is None else np.asarray(chances)
    expected = wanted * sum(counts)
    statistic = float(((np.asarray(counts) - expected) ** 2 / expected).sum())
    free = len(counts) - 1
    # The limit of Wilson and Hilferty.
    limit = free * (1 - 2 / (9 * free) + _SIGMAS * math.sqrt(2 / (9 * free))) ** 3
    assert statistic < limit, (statistic, limit)
