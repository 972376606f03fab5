"""Distributions of latencies, in counts that ranks can add up."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

PERCENTILES: Final = (50.0, 99.0, 99.9)
_LEAST_S: Final = 1e-7
_MOST_S: Final = 1e4
_PER_DECADE: Final = 200
"""Bins: their limits are 1.16 % apart."""
_BINS: Final = round(np.log10(_MOST_S / _LEAST_S) * _PER_DECADE)
_POINTS: Final = 200
"""Points of a curve, at most."""


class Latencies:
    """Counts of latencies in logarithmic bins; percentiles are exact to 1.2 %."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self.most_s = 0.0
        """The largest latency."""
        self.add(seconds)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, seconds: Iterable[float]) -> None:
        """Count latencies, in seconds."""
        values = np.fromiter(seconds, np.float64)
        if not len(values):
            return
        bins = np.log10(np.maximum(values, _LEAST_S) / _LEAST_S) * _PER_DECADE
        np.add.at(self._counts, np.minimum(bins.astype(np.int64), _BINS - 1), 1)
        self.most_s = max(self.most_s, float(values.max()))

    def merge(self, values: Sequence[float]) -> None:
        """Add the counts of another distribution, as its `to_json` has them."""
        pairs = np.array(values[1:], np.int64).reshape(-1, 2)
        self._counts[pairs[:, 0]] += pairs[:, 1]
        self.most_s = max(self.most_s, values[0])

    def percentile(self, share: float) -> float:
        """Return the latency in seconds that `share` percent of all do not exceed; 0 without any.

        It is the upper limit of its bin, and never above the largest latency.
        """
        total = len(self)
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._counts), np.ceil(total * share / 100)))
        return min(self.most_s, _upper(at))

    def curve(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (latencies in seconds, shares of all that do not exceed them), for a plot."""
        used = np.flatnonzero(self._counts)
        if not len(used):
            return (), ()
        chosen = used[np.unique(np.linspace(0, len(used) - 1, _POINTS).astype(np.int64))]
        shares = np.cumsum(self._counts) / len(self)
        limits = tuple(min(self.most_s, _upper(int(at))) for at in chosen)
        return limits, tuple(float(shares[at]) for at in chosen)

    def to_json(self) -> list[float]:
        """Return pairs of bin and count, after the largest latency, in one list."""
        used = np.flatnonzero(self._counts)
        pairs = np.stack([used, self._counts[used]], axis=1)
        return [self.most_s, *map(float, pairs.ravel())]


def _upper(at: int) -> float:
    return float(_LEAST_S * 10 ** ((at + 1) / _PER_DECADE))
