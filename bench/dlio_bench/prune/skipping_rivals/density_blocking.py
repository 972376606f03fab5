"""Partial forward blocking (PFB; Wu et al., arXiv 2506.23674).

Reconstructed from summaries of the paper: its authors' code for residual networks is not published.
The number of kernels, the rate of their averages and the epochs that block samples are the defaults
of their code for Swin transformers.
"""

import math
from typing import Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
from dlio.features.pruning.model_size import flops_per_sample
from dlio.train.networks.resnet import SmallResNet
from dlio_bench.prune.skipping_rivals.contender import SkippingContender

_SHARE: Final = 0.4
_KERNELS: Final = 64
_RATE: Final = 0.01
_NOISE: Final = 0.01
_FROM, _TO = 1 / 20, 7 / 8
"""Fractions of the epochs between which samples are blocked."""
_TINY: Final = 1e-12


class Density:
    """A kernel density estimate of features, whose centres follow the features.

    Gaussian kernels with a diagonal bandwidth by Silverman's rule, weighted by the number of
    features that were nearest to each centre.

    Args:
        kernels: number of centres, taken from the first features.
        rate: rate of the moving averages of centres and variances.
    """

    def __init__(self, kernels: int = _KERNELS, rate: float = _RATE) -> None:
        self._kernels, self._rate = kernels, rate
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
        self._centres[near] += self._rate * (means - self._centres)[near]
        self._variances += self._rate * (features.var(0) - self._variances)
        self._counts += counts


def shallow(model: SmallResNet) -> nn.Module:
    """Return the stem and the first stage."""
    return nn.Sequential(model.stem, model.stages[0])


def deep(model: SmallResNet) -> nn.Module:
    """Return the rest of the network."""
    return nn.Sequential(model.stages[1:], nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head)


class DensityBlocking(SkippingContender):
    """Train on the samples of each batch whose shallow features are in the least dense places.

    All samples pass the stem and the first stage. The features of those that are kept are used
    again for the rest of the network, and for the backward pass.

    Args:
        share: share of each batch to block.
    """

    def __init__(
        self, loader: dlio.DataLoader, epochs: int, seed: int, share: float = _SHARE
    ) -> None:
        super().__init__(loader, epochs, seed)
        self._share, self._blocks = share, False
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
        """Return the positions in the batch that are kept.

        Args:
            features: means over each image; shape (n, channels).
        """
        count = math.ceil((1 - self._share) * len(features))
        density = self._density.of(features)
        noise = _NOISE * torch.rand(len(features), generator=self._generator)
        importance = 1 / (density + noise * density.max() + _TINY)
        kept = importance.topk(count).indices.sort().values
        self._density.follow(features[kept])
        return kept
