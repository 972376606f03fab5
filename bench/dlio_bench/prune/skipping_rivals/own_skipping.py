"""`dlio.SampleSkipper` as a contender."""

import math

import torch

import dlio
from dlio.features.skipping.skip_rule import EASY, SHARE
from dlio_bench.prune.skipping_rivals.contender import SkippingContender


class OwnSkipping(SkippingContender):
    """Skip samples as `dlio train --skip-samples` does.

    Args:
        share: share of an epoch's samples to skip, easy or not; None for the easy ones.
    """

    def __init__(
        self, loader: dlio.DataLoader, epochs: int, seed: int, share: float | None = None
    ) -> None:
        super().__init__(loader, epochs, seed)
        easy = EASY if share is None else math.inf
        self._skipper = dlio.SampleSkipper(loader, epochs, share or SHARE, seed=seed, easy=easy)

    @property
    def lr_factor(self) -> float:
        return self._skipper.lr_factor

    def begin(self, epoch: int) -> None:
        self._skipper.begin(epoch)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        return self._skipper.weigh(losses)

    def close(self) -> None:
        self._skipper.close()
