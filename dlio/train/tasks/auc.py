"""Area under the ROC curve, from a histogram of scores that ranks add up exactly.

The area is the probability that a random positive sample has a higher score than a random negative
one (Hanley and McNeil, Radiology 143, 1982). Within a bin the order is unknown and counts one half,
so that the area is wrong by at most half of the share of pairs that fall into one bin together:
`area` returns this bound, too. Bins are the upper 16 bits of the score as a float32: sign, exponent
and 7 bits of mantissa, so that a bin is less than 1 % wide relative to its scores, at any scale.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.train.tasks.metrics import Sums

_BINS: Final = 1 << 16
BINS: Final = 2 * _BINS
"""Integers of a histogram: negative samples, then positive ones, by score."""


def _bins_of(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    # -0 becomes 0: both are equal, and far apart as bits.
    bits = (np.ascontiguousarray(scores, np.float32) + np.float32(0)).view(np.uint32)
    # Negative numbers sort in reverse by their bits: order them all as unsigned integers.
    flipped = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered: npt.NDArray[np.int64] = (flipped >> 16).astype(np.int64)
    return ordered


def score_sums(scores: torch.Tensor, positive: torch.Tensor) -> Sums:
    """Return the histogram of some samples; shape (BINS,).

    Args:
        scores: greater for samples that are more likely positive; shape (n,). NaN sorts as an
            extreme score.
        positive: True for positive samples; shape (n,).
    """
    bins = _bins_of(scores.detach().float().cpu().numpy())
    right = positive.detach().cpu().numpy().astype(np.int64)
    return np.bincount(bins + _BINS * right, minlength=BINS).astype(np.int64)


def area(histogram: Sums) -> tuple[float, float]:
    """Return (area under the ROC curve, bound of its error); NaN if a class has no samples."""
    negative, positive = histogram[:_BINS].astype(float), histogram[_BINS:].astype(float)
    pairs = negative.sum() * positive.sum()
    if not pairs:
        return float("nan"), float("nan")
    below = np.cumsum(negative) - negative
    together = float((positive * negative).sum())
    return float((positive * below).sum() + together / 2) / pairs, together / 2 / pairs
