"""The interface of the contenders, and the one that trains on all samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.train.model import normalised

CPU: Final = torch.device("cpu")
_PASSES: Final = 3
"""Cost of a sample's forward and backward pass, in forward passes."""


@dataclass(slots=True)
class ComputedSamples:
    """Samples that a training has computed."""

    forward: float = 0.0
    """Forward passes; a part of the network counts by its FLOPs."""
    backward: float = 0.0
    """Backward passes, each of the cost of two forward passes."""

    @property
    def samples(self) -> float:
        """Cost, in samples with a forward and a backward pass each."""
        return (self.forward + (_PASSES - 1) * self.backward) / _PASSES


class SkippingContender:
    """Train on all samples. Subclasses leave samples out.

    Args:
        loader: batches (uint8 images, labels) in dlio's own order; `begin` sets its epoch.
        epochs: epochs of the whole training.
        seed: seeds random choices.
    """

    def __init__(self, loader: dlio.DataLoader, epochs: int, seed: int) -> None:
        self.loader, self.epochs, self.seed = loader, epochs, seed
        self.total = len(loader.data)
        """Samples in the data set."""
        self.work = ComputedSamples()

    @property
    def lr_factor(self) -> float:
        """Factor of the epoch's learning rate."""
        return 1.0

    def begin(self, epoch: int) -> None:
        """Choose the samples of an epoch."""
        self.loader.set_epoch(epoch)

    def loss(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of the loader's last batch, a scalar.

        Args:
            images: input of the model; shape (n, 3, h, w).
            labels: classes; shape (n,).
        """
        losses = cross_entropy(model(images), labels, reduction="none")
        self.work.forward += len(images)
        self.work.backward += len(images)
        return self.weigh(losses).mean()

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        """Record the losses of the loader's last batch, and return them times their weights."""
        return losses

    def end(self, epoch: int, model: nn.Module) -> None:
        """Run after the last batch of an epoch."""

    def close(self) -> None:
        """Release what the contender holds, apart from the loader."""


Make = Callable[[dlio.DataLoader, int, int], SkippingContender]
"""Makes a contender from a loader, a number of epochs and a seed."""


def batches(loader: dlio.DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (input of the model, labels) of each batch."""
    for images, labels in loader:
        inputs = normalised(images, CPU).contiguous(memory_format=torch.channels_last)
        yield inputs, cast(torch.Tensor, labels)
