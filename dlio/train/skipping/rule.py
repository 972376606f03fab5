"""Which samples an epoch leaves out, from the losses that they had. Pure.

A sample is kept with a chance q that follows how wrong the network still is about it: with the loss
l = -log p of a sample, 1 - p bounds the norm of the loss's gradient by the outputs (by √2·(1 - p)),
and to keep samples in proportion to their gradient's norm is what varies least (Katharopoulos and
Fleuret, "Not All Samples Are Created Equal", 2018). So q = (1 - p) / t, but at least `floor` and at
most 1, with t such that the share that is asked for is left out, and `easy` at most: while a
network is unsure of all samples each of them teaches, and to leave some out costs what a shorter
run would. A kept sample counts 1/q, so the gradient stays unbiased, whatever the chances are; a
share r among the samples of low loss, counted 1/(1 - r), is InfoBatch's rule (Qin et al., 2024), as
are the last epochs, which see all.

Losses are kept as codes of one byte, a sixteenth of an octave apart: one for each sample, which
rises at once and falls by half the distance, so that only a loss that has stayed low is low. Each
sample is kept for certain in one of every `revisit` epochs, at its own turn.

Chances are whole 65,536ths and draws hashes of (seed, epoch, sample): integers, which every machine
computes alike.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.plan.order import keyed_uniforms
from dlio.plan.sample_mask import STRETCH, SampleMask

__all__ = [
    "CERTAIN",
    "EASY",
    "SHARE",
    "UNKNOWN",
    "Codes",
    "SkipRule",
    "Table",
    "chance_of",
    "chances",
    "encoded",
    "kept_of",
    "remembered",
]

Codes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]
_I64 = npt.NDArray[np.int64]

CERTAIN: Final = 1 << 16
"""The chance 1."""
UNKNOWN: Final = 0
"""The code of a sample that has had no loss yet."""
_LOWEST: Final = -10.0
_AN_OCTAVE: Final = 16
_DRAW: Final = 0xD7A3
_TURN: Final = 0x7042
_HALVINGS: Final = 60
SHARE: Final = 0.6
"""The largest share that may be asked for, and how many easy samples are left out at most."""
EASY: Final = 0.5


@dataclass(frozen=True, slots=True)
class SkipRule:
    """What is left out, and when. Raises UsageError for what cannot be."""

    epochs: int
    """Of the whole run."""
    share: float = SHARE
    """Of the samples of an epoch that is left out at most, above 0, up to 0.6."""
    floor: float = 0.2
    """The least chance: a kept sample counts up to 1 / floor."""
    easy: float = EASY
    """Samples of whose right answer the network is less sure than 1 - `easy` are all kept;
    infinite, the share is left out whatever they are."""
    revisit: int = 8
    """Epochs in which each sample is seen once at least."""
    first: int = 1
    """Epochs that see all, so that each sample has a loss."""
    last: int | None = None
    """Epochs at the end that see all; an eighth of them by default, and one at least."""

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
            raise UsageError(f"first {self.first}: an epoch at least sees all; last: 0 or more")

    @property
    def ending(self) -> int:
        """Epochs at the end that see all."""
        return max(1, round(self.epochs / 8)) if self.last is None else self.last

    def sees_all(self, epoch: int) -> bool:
        return epoch < self.first or epoch >= self.epochs - self.ending


def encoded(losses: npt.NDArray[np.floating]) -> Codes:
    """The code of each loss, from 1 to 255; what is no finite number is the worst."""
    known = np.nan_to_num(losses.astype(np.float64), nan=np.inf)
    steps = (np.log2(np.maximum(known, 2.0**_LOWEST)) - _LOWEST) * _AN_OCTAVE
    codes: Codes = np.clip(np.rint(np.minimum(steps, 254)) + 1, 1, 255).astype(np.uint8)
    return codes


def remembered(scores: Codes, seen: Codes) -> Codes:
    """What is remembered of each sample after an epoch's codes, 0 where it was not seen."""
    before = scores.astype(np.uint16)
    fallen = (before + seen + 1) // 2
    after = np.where(scores == UNKNOWN, seen, np.maximum(seen, fallen))
    return np.where(seen == UNKNOWN, scores, after).astype(np.uint8)


def chances(counts: _I64, rule: SkipRule) -> Table:
    """The chance of each code, in 65,536ths; shape (256,).

    Args:
        counts: samples of each code; shape (256,).

    As many samples are left out as the rule's share, on average; fewer where too few are easy, or
    too many have no loss yet, which are kept.
    """
    total = int(counts.sum())
    losses = 2.0 ** (_LOWEST + (np.arange(256) - 1.0) / _AN_OCTAVE)
    wrong = -np.expm1(-losses)
    wrong[UNKNOWN] = math.inf
    # A sample at its turn is kept whatever its chance is.
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


def chance_of(
    samples: _I64, scores: Codes, table: Table, seed: int, epoch: int, revisit: int
) -> _I64:
    """The chance of each sample in an epoch, in 65,536ths.

    Args:
        samples: shape (n,).
        scores: of these samples; shape (n,).
    """
    turn = keyed_uniforms(seed, 0, samples, 1, _TURN)[:, 0] * revisit
    return np.where(turn.astype(np.int64) == epoch % revisit, CERTAIN, table[scores])


def kept_of(scores: Codes, table: Table, seed: int, epoch: int, revisit: int) -> SampleMask:
    """The samples of an epoch.

    Args:
        scores: of all samples, shape (n,).

    Cost 25 ns a sample; n / 8 bytes.
    """
    total = len(scores)
    bits = np.zeros(-(-total // 8), np.uint8)
    for first in range(0, total, STRETCH):
        samples = np.arange(first, min(first + STRETCH, total), dtype=np.int64)
        chance = chance_of(samples, scores[samples], table, seed, epoch, revisit)
        drawn = keyed_uniforms(seed, epoch, samples, 1, _DRAW)[:, 0] * CERTAIN
        packed = np.packbits(drawn < chance, bitorder="little")
        bits[first // 8 : first // 8 + len(packed)] = packed
    return SampleMask(bits, total)
