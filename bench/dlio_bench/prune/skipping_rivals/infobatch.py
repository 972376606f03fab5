"""InfoBatch (Qin et al., arXiv 2303.04947), after the paper and its authors' code."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

import dlio
from dlio_bench.prune.skipping_rivals.contender import SkippingContender

_SHARE: Final = 0.5
_WHOLE: Final = 0.875


def choose(
    losses: npt.NDArray[np.float32], share: float, generator: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Return the weight of each sample in an epoch, 0 for those that it skips; shape (n,).

    Of the samples whose loss is below the mean, `share` are skipped at random and the others
    weighted by 1 / (1 - share).

    Args:
        losses: last loss of each sample; shape (n,).
    """
    weights = np.ones(len(losses), np.float32)
    low = np.flatnonzero(losses < losses.mean())
    weights[low] = 0
    kept = generator.choice(low, int((1 - share) * len(low)), replace=False)
    weights[kept] = 1 / (1 - share)
    return weights


class InfoBatch(SkippingContender):
    """Skip half of the samples with a loss below the mean until 7/8 of the epochs are done.

    Weights are not brought to a mean of 1, which has the effect of a larger learning rate.

    Args:
        share: share of the samples of low loss to skip; the authors' r.
        whole: fraction of the epochs after which all samples are used; the authors' delta.
    """

    def __init__(
        self,
        loader: dlio.DataLoader,
        epochs: int,
        seed: int,
        share: float = _SHARE,
        whole: float = _WHOLE,
    ) -> None:
        super().__init__(loader, epochs, seed)
        self._share, self._whole = share, whole
        self._losses = np.zeros(self.total, np.float32)
        self._weights = np.ones(self.total, np.float32)

    def begin(self, epoch: int) -> None:
        if epoch == 0 or epoch + 1 > self._whole * self.epochs:
            self._weights[:] = 1
            self.loader.set_epoch(epoch)
            return
        generator = np.random.default_rng((self.seed, epoch))
        self._weights = choose(self._losses, self._share, generator)
        self.loader.set_epoch(epoch, self._weights > 0)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        samples = self.loader.last_samples
        self._losses[samples] = losses.detach().numpy()
        return losses * torch.from_numpy(self._weights[samples])
