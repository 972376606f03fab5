"""Ways to train on fewer samples, for `--case samples`."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.features.pruning.model_size import flops_per_sample
from dlio.features.skipping.skip_rule import EASY, SHARE
from dlio.train.model import normalised
from dlio.train.networks.resnet import SmallResNet

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

    The loader has batches (uint8 images, labels) in dlio's own order; `begin` sets its epoch.
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
        """Return the loss of the loader's last batch, a scalar, for the model's input of shape
        (n, 3, h, w) and classes of shape (n,)."""
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


@torch.no_grad()
def accuracy_on(model: nn.Module, held_out: dlio.DataLoader) -> float:
    """Return the share of samples whose class a model finds; it stays in evaluation mode."""
    model.eval()
    right = sum(int((model(x).argmax(1) == labels).sum()) for x, labels in batches(held_out))
    return right / len(held_out.data)


def batches(loader: dlio.DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (input of the model, labels) of each batch."""
    for images, labels in loader:
        inputs = normalised(images, CPU).contiguous(memory_format=torch.channels_last)
        yield inputs, cast(torch.Tensor, labels)


class OwnSkipping(SkippingContender):
    """`dlio.SampleSkipper`: skip samples as `dlio train --skip-samples` does; with `share`, such a
    share of an epoch's samples, easy or not."""

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


def choose(
    losses: npt.NDArray[np.float32], share: float, generator: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Return the weight of each sample in an epoch, 0 for those that it skips; shape (n,).

    Of the samples whose last loss, shape (n,), is below the mean, `share` are skipped at random and
    the others weighted by 1 / (1 - share).
    """
    weights = np.ones(len(losses), np.float32)
    low = np.flatnonzero(losses < losses.mean())
    weights[low] = 0
    kept = generator.choice(low, int((1 - share) * len(low)), replace=False)
    weights[kept] = 1 / (1 - share)
    return weights


class InfoBatch(SkippingContender):
    """InfoBatch, after the paper and its authors' code: skip half of the samples with a loss below
    the mean until 7/8 of the epochs are done.

    Source: Qin et al., arXiv 2303.04947.

    Weights are not brought to a mean of 1, which has the effect of a larger learning rate.

    The authors' r is 0.5, and their delta 0.875.
    """

    def __init__(self, loader: dlio.DataLoader, epochs: int, seed: int) -> None:
        super().__init__(loader, epochs, seed)
        self._losses = np.zeros(self.total, np.float32)
        self._weights = np.ones(self.total, np.float32)

    def begin(self, epoch: int) -> None:
        if epoch == 0 or epoch + 1 > 0.875 * self.epochs:
            self._weights[:] = 1
            self.loader.set_epoch(epoch)
            return
        generator = np.random.default_rng((self.seed, epoch))
        self._weights = choose(self._losses, 0.5, generator)
        self.loader.set_epoch(epoch, self._weights > 0)

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        samples = self.loader.last_samples
        self._losses[samples] = losses.detach().numpy()
        return losses * torch.from_numpy(self._weights[samples])


# Instance-dependent early stopping


_THRESHOLD: Final = 2e-3
"""The authors' for CIFAR-100."""
_WINDOW: Final = 3
_LOSSES: Final = 3
"""Losses that a second difference takes."""


class LossHistory:
    """The last losses of so many samples, and the second differences between them."""

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
    """Instance-dependent early stopping, after the authors' code: stop the training on samples
    that are mastered, as long as they are.

    Source: Yuan et al., arXiv 2502.07547.

    Mastered samples get a forward pass after each epoch, in evaluation mode, so that they are
    trained on again if their losses change. Their mean second difference is at most `threshold`,
    the authors' delta.
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


# Partial forward blocking


_KERNELS: Final = 64
_RATE: Final = 0.01
"""Of the moving averages of centres and variances."""
_NOISE: Final = 0.01
_BLOCKED: Final = 0.4
"""Share of each batch that is blocked."""
_FROM, _TO = 1 / 20, 7 / 8
"""Fractions of the epochs between which samples are blocked."""
_TINY: Final = 1e-12


class Density:
    """A kernel density estimate of features, whose centres follow the features.

    Gaussian kernels with a diagonal bandwidth by Silverman's rule, weighted by the number of
    features that were nearest to each centre. The first features are the centres.
    """

    def __init__(self, kernels: int = _KERNELS) -> None:
        self._kernels = kernels
        self._centres: torch.Tensor | None = None
        self._variances = torch.ones(0)
        self._counts = torch.ones(0)

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """Return the density at each of the features (n, d), up to a common factor; shape (n,)."""
        if self._centres is None:
            self._centres = features[: self._kernels].clone()
            self._variances = features.var(0)
            self._counts = torch.ones(len(self._centres))
        count, size = len(self._centres), features.shape[1]
        silverman = (4 / (count * (size + 2))) ** (1 / (size + 4))
        widths = silverman * (self._variances + _TINY).sqrt()
        squares = torch.cdist(features / widths, self._centres / widths).square()
        return (-squares / 2).exp() @ (self._counts / self._counts.sum())

    def follow(self, features: torch.Tensor) -> None:
        """Move the centres towards the features that are nearest to them; shape (n, d)."""
        assert self._centres is not None
        widths = (self._variances + _TINY).sqrt()
        nearest = torch.cdist(features / widths, self._centres / widths).argmin(1)
        counts = torch.bincount(nearest, minlength=len(self._centres)).float()
        sums = torch.zeros_like(self._centres).index_add_(0, nearest, features)
        means = sums / counts.clamp(min=1)[:, None]
        near = counts > 0
        self._centres[near] += _RATE * (means - self._centres)[near]
        self._variances += _RATE * (features.var(0) - self._variances)
        self._counts += counts


def shallow(model: SmallResNet) -> nn.Module:
    """Return the stem and the first stage."""
    return nn.Sequential(model.stem, model.stages[0])


def deep(model: SmallResNet) -> nn.Module:
    """Return the rest of the network."""
    return nn.Sequential(model.stages[1:], nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head)


class DensityBlocking(SkippingContender):
    """Partial forward blocking: train on the samples of each batch whose shallow features are in
    the least dense places.

    Reconstructed from summaries of the paper (Wu et al., arXiv 2506.23674): its authors' code for
    residual networks is not published. The number of kernels, the rate of their averages and the
    epochs that block samples are the defaults of their code for Swin transformers.

    All samples pass the stem and the first stage. The features of those that are kept are used
    again for the rest of the network, and for the backward pass.
    """

    def __init__(self, loader: dlio.DataLoader, epochs: int, seed: int) -> None:
        super().__init__(loader, epochs, seed)
        self._blocks = False
        self._density = Density()
        self._generator = torch.Generator().manual_seed(seed)
        self._shallow: float | None = None
        """Cost of the shallow part, relative to the network's."""

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._blocks = _FROM * self.epochs <= epoch < _TO * self.epochs - 1

    def loss(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, SmallResNet)
        if not self._blocks:
            return super().loss(model, images, labels)
        if self._shallow is None:
            part, whole = shallow(model), images[:2]
            self._shallow = flops_per_sample(part, whole) / flops_per_sample(model, whole)
        features = shallow(model)(images)
        kept = self._kept(features.detach().mean((2, 3)))
        outputs = deep(model)(features[kept])
        self.work.forward += len(kept) + self._shallow * (len(images) - len(kept))
        self.work.backward += len(kept)
        return cross_entropy(outputs, labels[kept])

    def _kept(self, features: torch.Tensor) -> torch.Tensor:
        """Return the positions in the batch that are kept, by features' means over each image;
        shape (n, channels)."""
        count = math.ceil((1 - _BLOCKED) * len(features))
        density = self._density.of(features)
        noise = _NOISE * torch.rand(len(features), generator=self._generator)
        importance = 1 / (density + noise * density.max() + _TINY)
        kept = importance.topk(count).indices.sort().values
        self._density.follow(features[kept])
        return kept
