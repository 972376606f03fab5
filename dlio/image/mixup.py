"""Mixtures of the images of a batch and of their labels: MixUp and CutMix.

Called with a batch, as in a training loop or a collate_fn, they do as torchvision does: one mixture
for the whole batch, and each image's partner is the one before it. In a loader each sample draws a
mixture of its own, which belongs to (seed, epoch, sample) whichever batch the sample is in.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from dlio.errors import UsageError
from dlio.image.picture import DescribedTransform
from dlio.image.random_source import RandomSource, current_draws
from dlio.util.arguments import named, number_in, one_of, whole_number


class MixtureDraw(NamedTuple):
    """The mixture of an image with its partner."""

    part: float
    """Share of the image itself, from 0 to 1; its label gets the same probability."""
    box: tuple[int, int, int, int] | None = None
    """(left, top, right, bottom) of the part that comes from the partner, in pixels; None to blend
    all pixels."""


class MixingTransform(DescribedTransform):
    """A transform of a batch (images, labels), whose labels become probabilities.

    Args:
        alpha: of the distribution Beta(alpha, alpha) of the share.
        num_classes: width of the probabilities. In a loader None stands for the data set's classes;
            elsewhere for labels that are probabilities already.
        partners: in a loader, `step` mixes each sample with the one before it in the step's global
            batch, so that pixels do not depend on the number of ranks; a partner that another rank
            has is decoded once more. `rank` mixes within the rank's own batch, as torchvision does.
    """

    _shown = ("alpha", "num_classes", "partners")

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        num_classes: int | None = None,
        partners: Literal["step", "rank"] = "step",
    ) -> None:
        self.partners = one_of("partners", partners, ("step", "rank"))
        self.alpha = number_in("alpha", alpha, 0, "a number")
        if not self.alpha:
            raise UsageError(f"{named('alpha', alpha)}: give a number above 0")
        if num_classes is not None:
            num_classes = whole_number("num_classes", num_classes, 1)
        self.num_classes = num_classes

    def draw(self, draws: RandomSource, height: int, width: int) -> MixtureDraw:
        """Draw a mixture for images of this size in pixels."""
        raise NotImplementedError

    def __call__(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a batch, with one mixture for all images.

        Args:
            batch: images and labels, or a list of the two: a float tensor of shape (n, channels,
                height, width), and an integer tensor of shape (n,) or a float tensor of shape (n,
                classes).

        Returns: (images, probabilities of shape (n, classes)).

        Raises UsageError for other batches.
        """
        images, labels = _pair(type(self).__name__, batch)
        mixture = self.draw(current_draws(), int(images.shape[-2]), int(images.shape[-1]))
        return self.mix(images, labels, [mixture] * len(images))

    def mix(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        mixtures: Sequence[MixtureDraw],
        partners: torch.Tensor | None = None,
        classes: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image of a batch with its partner.

        Args:
            mixtures: one for each of the first images; as many are returned.
            partners: index of each one's partner in the batch; the image before it for None.
            classes: number of classes, where `num_classes` is None.
        """
        count = len(mixtures)
        if not images.dtype.is_floating_point and any(each.box is None for each in mixtures):
            raise UsageError(
                f"{type(self).__name__} of {images.dtype} pixels: it blends floats; put ToTensor() "
                "or Normalize before it"
            )
        probabilities = self._probabilities(labels, classes)
        if partners is None:
            partners = torch.arange(count).roll(1)
        parts = torch.tensor([each.part for each in mixtures], dtype=torch.float32)
        # A box is cut out below; until then the image is its own.
        shares = torch.tensor([each.part if each.box is None else 1.0 for each in mixtures])
        blends = bool((shares < 1).any())
        mixed = _blended(images, shares, partners) if blends else images[:count].clone()
        for k, (each, other) in enumerate(zip(mixtures, partners.tolist(), strict=True)):
            if each.box is not None:
                left, top, right, bottom = each.box
                mixed[k, ..., top:bottom, left:right] = images[other, ..., top:bottom, left:right]
        return mixed, _blended(probabilities, parts, partners)

    def _probabilities(self, labels: torch.Tensor, classes: int | None) -> torch.Tensor:
        """Labels as probabilities; shape (n, classes)."""
        if labels.ndim == 2 and labels.dtype.is_floating_point:
            return labels
        name, count = type(self).__name__, self.num_classes or classes
        if labels.ndim != 1 or labels.dtype.is_floating_point:
            raise UsageError(
                f"{name} of labels of shape {tuple(labels.shape)} and {labels.dtype}: give whole "
                "numbers of shape (n,), or probabilities of shape (n, classes)"
            )
        if count is None:
            raise UsageError(f"{name} makes probabilities of labels: give num_classes=")
        # On a device the check would wait for it; one_hot has checks of its own there.
        if labels.device.type == "cpu" and len(labels) and int(labels.max()) >= count:
            raise UsageError(f"num_classes={count}: there is a label {int(labels.max())}")
        return torch.nn.functional.one_hot(labels.long(), count).float()


class MixUp(MixingTransform):
    """Blend each image with another one, by a share of Beta(alpha, alpha).

    Source: Zhang and others, "mixup: Beyond Empirical Risk Minimization", arXiv 1710.09412.
    """

    def draw(self, draws: RandomSource, height: int, width: int) -> MixtureDraw:
        return MixtureDraw(draws.beta(self.alpha))


class CutMix(MixingTransform):
    """Paste a rectangle of another image into each image, of a share of Beta(alpha, alpha).

    Source: Yun and others, "CutMix", arXiv 1905.04899.
    """

    def draw(self, draws: RandomSource, height: int, width: int) -> MixtureDraw:
        reach = 0.5 * math.sqrt(1 - draws.beta(self.alpha))
        x, y = draws.below(width), draws.below(height)
        across, down = int(reach * width), int(reach * height)
        left, top = max(0, x - across), max(0, y - down)
        right, bottom = min(width, x + across), min(height, y + down)
        part = 1 - (right - left) * (bottom - top) / (width * height)
        return MixtureDraw(part, (left, top, right, bottom))


def _blended(values: torch.Tensor, shares: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """Blend the first rows with their partners: share x row + (1 - share) x partner.

    Each product and sum is rounded by itself, so that results are the same in batches of any size.
    """
    share = shares.view(-1, *[1] * (values.ndim - 1)).to(values.device, values.dtype)
    others = values[partners.to(values.device)].mul_(1 - share)
    return values[: len(shares)].mul(share).add_(others)


def _pair(name: str, batch: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of a batch. Raises UsageError; `name` is the transform's."""
    if len(batch) == 1 and isinstance(batch[0], list | tuple):
        batch = tuple(batch[0])
    if len(batch) != 2 or not all(isinstance(each, torch.Tensor) for each in batch):
        raise UsageError(f"{name} takes a batch: its images and its labels, as two tensors")
    images, labels = batch
    if images.ndim < 4 or not labels.ndim or len(images) != len(labels):
        raise UsageError(
            f"{name} of shapes {tuple(images.shape)} and {tuple(labels.shape)}: give a batch of "
            "images, shape (n, channels, height, width), and as many labels"
        )
    return images, labels
