"""Instance-dependent early stopping (Yuan et al., arXiv 2502.07547), after the authors' code."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio_bench.prune.skipping_rivals.contender import SkippingContender, batches

_THRESHOLD: Final = 2e-3
"""The authors' for CIFAR-100."""
_WINDOW: Final = 3
_LOSSES: Final = 3
"""Losses that a second difference takes."""


class LossHistory:
    """The last losses of samples, and the second differences between them.

    Args:
        total: number of samples.
    """

    def __init__(self, total: int) -> None:
        self._losses = np.zeros((_LOSSES, total), np.float32)
        self._differences = np.zeros((_WINDOW, total), np.float32)
        self._epochs = 0

    def add(self, losses: npt.NDArray[np.float32]) -> None:
        """Append an epoch's losses; shape (n,)."""
        self._losses = np.concatenate([self._losses[1:], losses[None]])
        self._epochs += 1
        if self._epochs >= _LOSSES:
            first, second, third = self._losses
            difference = np.abs(third - 2 * second + first)
            self._differences = np.concatenate([self._differences[1:], difference[None]])

    def mastered(self, threshold: float) -> npt.NDArray[np.bool_]:
        """True for samples whose second differences have been below `threshold` in absolute value,
        on average over three epochs; shape (n,). None until there are four differences."""
        enough = self._epochs - _LOSSES + 1 > _WINDOW
        below: npt.NDArray[np.bool_] = self._differences.mean(0) < threshold
        return below & enough


class InstanceEarlyStopping(SkippingContender):
    """Stop the training on samples that are mastered, as long as they are.

    Mastered samples get a forward pass after each epoch, in evaluation mode, so that they are
    trained on again if their losses change.

    Args:
        threshold: largest mean second difference of a mastered sample; the authors' delta.
    """

    def __init__(
        self, loader: dlio.DataLoader, epochs: int, seed: int, threshold: float = _THRESHOLD
    ) -> None:
        super().__init__(loader, epochs, seed)
        self._threshold = threshold
        self._history = LossHistory(self.total)
        self._losses = np.zeros(self.total, np.float32)
        self._mastered = np.zeros(self.total, np.bool_)

    def begin(self, epoch: int) -> None:
        self._mastered = self._history.mastered(self._threshold)
        if self._mastered.all():
            self._mastered[:] = False
        self.loader.set_epoch(epoch, ~self._mastered)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        self._losses[self.loader.last_samples] = losses.detach().numpy()
        return losses

    @torch.no_grad()
    def end(self, epoch: int, model: nn.Module) -> None:
        if self._mastered.any() and epoch + 1 < self.epochs:
            model.eval()
            self.loader.set_epoch(epoch, self._mastered)
            for images, labels in batches(self.loader):
                self.weigh(cross_entropy(model(images), labels, reduction="none"))
                self.work.forward += len(images)
            model.train()
        self._history.add(self._losses)
