"""Choose the samples that an epoch skips, from their past losses. Pure.

Each sample is kept with probability q proportional to 1 - p, where p = exp(-loss) is the network's
probability of the right answer. The reason: √2·(1 - p) bounds the norm of the gradient of the loss
with respect to the outputs, and sampling in proportion to gradient norms minimises the variance
(Katharopoulos and Fleuret, "Not All Samples Are Created Equal", arXiv 1803.00942).

q = (1 - p) / t, clipped to [`floor`, 1]. The threshold t is chosen so that the requested share is
skipped, but never exceeds `easy`: a network that is unsure about all samples learns from each of
them, and skipping would cost as much as training for fewer epochs. A kept sample is weighted by
1/q, so the gradient stays unbiased. InfoBatch (Qin et al., arXiv 2303.04947) instead skips a fixed
share r of the samples with low loss, weights the rest of these by 1/(1 - r), and trains on all
samples in the last epochs; the last point is adopted here.

Losses are stored as one-byte codes on a logarithmic scale, 16 steps per factor of 2. A sample's
code rises immediately but falls by only half the distance, so it is low only if the loss has stayed
low. Each sample is kept with certainty in one of every `revisit` epochs.

Probabilities are integers in units of 1/65536, and random numbers are hashes of (seed, epoch,
sample), so that all machines compute the same choice.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.plan.order import keyed_uniforms
from dlio.plan.sample_mask import STRETCH, SampleMask

Codes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]
_I64 = npt.NDArray[np.int64]

CERTAIN: Final = 1 << 16
"""The probability 1."""
UNKNOWN: Final = 0
"""Code of a sample without a loss so far."""
_LOWEST: Final = -10.0
"""Base-2 logarithm of the loss with code 1."""
_STEPS_PER_OCTAVE: Final = 16
_DRAW: Final = 0xD7A3
_TURN: Final = 0x7042
_HALVINGS: Final = 60
SHARE: Final = 0.6
"""Largest share of samples that can be skipped; the default."""
EASY: Final = 0.5
"""Default of `SkipRule.easy`."""


@dataclass(frozen=True, slots=True)
class SkipRule:
    """Settings of skipping. Raises UsageError for values out of range."""

    epochs: int
    """Epochs of the whole run."""
    share: float = SHARE
    """Largest share of an epoch's samples to skip; above 0, up to 0.6."""
    floor: float = 0.2
    """Least probability q of keeping a sample; weights are 1 / floor at most."""
    easy: float = EASY
    """Keep all samples with p < 1 - `easy`. If infinite, skip the share whatever the losses."""
    revisit: int = 8
    """Period, in epochs, in which each sample is seen at least once."""
    first: int = 1
    """Epochs at the beginning that see all samples, to give each one a loss."""
    last: int | None = None
    """Epochs at the end that see all samples; by default one eighth of them, at least one."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= SHARE:
            raise UsageError(f"a share of {self.share} to skip: give one above 0, up to {SHARE}")
        if not 0 < self.floor <= 0.25 or self.revisit < 8:
            raise UsageError(
                f"floor {self.floor} and revisit {self.revisit}: give a floor above 0, up to 0.25, "
                "and revisit of 8 or more, or no share can be reached"
            )
        if not self.easy > 0:
            raise UsageError(f"easy {self.easy}: give a number above 0")
        if self.first < 1 or self.ending < 0:
            raise UsageError(
                f"first {self.first}, last {self.last}: give first of 1 or more, last of 0 or more"
            )

    @property
    def ending(self) -> int:
        """Number of epochs at the end that see all samples."""
        return max(1, round(self.epochs / 8)) if self.last is None else self.last

    def sees_all(self, epoch: int) -> bool:
        """True if the epoch skips nothing."""
        return epoch < self.first or epoch >= self.epochs - self.ending


def encode_losses(losses: npt.NDArray[np.floating]) -> Codes:
    """Encode losses as codes from 1 to 255; NaN and infinity become 255."""
    known = np.nan_to_num(losses.astype(np.float64), nan=np.inf)
    steps = (np.log2(np.maximum(known, 2.0**_LOWEST)) - _LOWEST) * _STEPS_PER_OCTAVE
    codes: Codes = np.clip(np.rint(np.minimum(steps, 254)) + 1, 1, 255).astype(np.uint8)
    return codes


def update_codes(scores: Codes, seen: Codes) -> Codes:
    """Combine each sample's stored code with that of an epoch, 0 if it was skipped; shape (n,)."""
    before = scores.astype(np.uint16)
    fallen = (before + seen + 1) // 2
    after = np.where(scores == UNKNOWN, seen, np.maximum(seen, fallen))
    return np.where(seen == UNKNOWN, scores, after).astype(np.uint8)


def probability_table(counts: _I64, rule: SkipRule) -> Table:
    """Return the probability of keeping a sample of each code, in units of 1/65536; shape (256,).

    On average the rule's share of samples is skipped; less if few samples are easy, or if many have
    no loss yet, because those are kept. `counts` are the numbers of samples of each code.
    """
    total = int(counts.sum())
    losses = 2.0 ** (_LOWEST + (np.arange(256) - 1.0) / _STEPS_PER_OCTAVE)
    wrong = -np.expm1(-losses)
    wrong[UNKNOWN] = math.inf
    # One of `revisit` samples is kept in any case.
    wanted = 1 - rule.share * rule.revisit / (rule.revisit - 1)
    low, high = 0.0, min(rule.easy, 1 / rule.floor)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        chance = np.clip(wrong / max(middle, 1e-300), rule.floor, 1.0)
        if (chance * counts).sum() > wanted * total:
            low = middle
        else:
            high = middle
    chance = np.clip(wrong / max(low, 1e-300), rule.floor, 1.0)
    return np.maximum(1, np.rint(chance * CERTAIN)).astype(np.int64)


def keep_probabilities(
    samples: _I64, scores: Codes, table: Table, seed: int, epoch: int, revisit: int
) -> _I64:
    """Return the probability of keeping each sample, in units of 1/65536; shape (n,).

    Samples are given by index and with their codes; see `probability_table` and `SkipRule`.
    """
    turn = keyed_uniforms(seed, 0, samples, 1, _TURN)[:, 0] * revisit
    return np.where(turn.astype(np.int64) == epoch % revisit, CERTAIN, table[scores])


def sample_mask(scores: Codes, table: Table, seed: int, epoch: int, revisit: int) -> SampleMask:
    """Draw the samples of an epoch by the codes of all; see `probability_table` and `SkipRule`.

    Cost: 25 ns per sample, n / 8 bytes.
    """
    total = len(scores)
    bits = np.zeros(-(-total // 8), np.uint8)
    for first in range(0, total, STRETCH):
        samples = np.arange(first, min(first + STRETCH, total), dtype=np.int64)
        chance = keep_probabilities(samples, scores[samples], table, seed, epoch, revisit)
        drawn = keyed_uniforms(seed, epoch, samples, 1, _DRAW)[:, 0] * CERTAIN
        packed = np.packbits(drawn < chance, bitorder="little")
        bits[first // 8 : first // 8 + len(packed)] = packed
    return SampleMask(bits, total)
