"""Transforms made of transforms: all of them, some by chance, or one of several."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dlio.errors import UsageError
from dlio.image.mixup import MixingTransform, MixtureDraw
from dlio.image.picture import (
    Picture,
    PixelChange,
    Pixels,
    PixelTransform,
    Transform,
    check_probability,
    numbers_in,
)
from dlio.image.random_source import RandomSource, current_draws
from dlio.util.arguments import check_callable, named


def is_pixelwise(transform: object) -> bool:
    """True for a transform of pixels alone, in any nesting, which keeps the size."""
    if isinstance(transform, RandomApply | RandomChoice):
        return all(map(is_pixelwise, transform.transforms))
    return isinstance(transform, PixelTransform)


def _crops(transform: Transform) -> int:
    return transform.crops if isinstance(transform, MultiCropTransform) else 1


def stacked(images: list[Picture]) -> Picture:
    """Return tensors as one, with a new first dimension; a list of anything else as it is."""
    return torch.stack(images) if all(map(torch.is_tensor, images)) else images


class MultiCropTransform:
    """A transform that makes one image of each, or several."""

    crops = 1
    """Number of images; those of more than one are stacked, or in a list."""


class Compose(MultiCropTransform):
    """Apply transforms one after the other; to each crop by itself behind several crops."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = _checked(transforms)
        self.crops = max((_crops(each) for each in self.transforms), default=1)

    def __call__(self, img: Picture) -> Picture:
        for number, transform in enumerate(self.transforms, 1):
            img = transform(img)
            if _crops(transform) > 1:
                rest = Compose(self.transforms[number:])
                return stacked([rest(each) for each in img])
        return img

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"


class _MemberTransform(PixelTransform):
    """Changes of pixels that are drawn and made by transforms in it."""

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        member, inner = change.value
        painted: Pixels = member.paint(pixels, inner)
        return painted


class RandomApply(_MemberTransform):
    """Apply transforms one after the other, all of them with probability `p`, or none."""

    def __init__(self, transforms: Sequence[Transform], p: float = 0.5) -> None:
        self.transforms = _checked(transforms)
        self.p = check_probability("RandomApply", p)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        if draws.uniform() >= self.p:
            return []
        return [
            PixelChange(change.name, (member, change))
            for member in self.transforms
            for change in _member(member).draw(draws, height, width)
        ]

    def __call__(self, img: Picture) -> Picture:
        if is_pixelwise(self):
            return super().__call__(img)
        if current_draws().uniform() < self.p:
            for transform in self.transforms:
                img = transform(img)
        return img

    def __repr__(self) -> str:
        return f"RandomApply({self.transforms}, p={self.p})"


class RandomChoice(_MemberTransform):
    """Apply one of several transforms, chosen at random: of images, or MixUp and CutMix of batches.

    Args:
        p: weight of each; even for None.
    """

    def __init__(self, transforms: Sequence[Transform], p: Sequence[float] | None = None) -> None:
        self.transforms = _checked(transforms)
        if not self.transforms:
            raise UsageError(f"{named('transforms', transforms)}: give one transform at least")
        self.p = None if p is None else numbers_in("p", p)
        if self.p is not None and (
            len(self.p) != len(self.transforms) or min(self.p) < 0 or not sum(self.p)
        ):
            raise UsageError(f"{named('p', p)}: give a weight of each transform, from 0")

    @property
    def mixes(self) -> bool:
        """True if it chooses among mixtures of batches."""
        return all(isinstance(each, MixingTransform) for each in self.transforms)

    @property
    def partners(self) -> str:
        """The choice of partners that the mixtures share."""
        return "step" if any(each.partners == "step" for each in self.transforms) else "rank"

    def choose(self, draws: RandomSource) -> Transform:
        """Draw one of the transforms."""
        members: list[Transform] = self.transforms
        if self.p is None:
            return members[draws.below(len(members))]
        left = draws.uniform(0, sum(self.p))
        for member, weight in zip(members, self.p, strict=True):
            if left < weight:
                return member
            left -= weight
        return members[max(k for k, weight in enumerate(self.p) if weight)]

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        member = self.choose(draws)
        changes = _member(member).draw(draws, height, width)
        return [PixelChange(change.name, (member, change)) for change in changes]

    def draw_mixture(self, draws: RandomSource, height: int, width: int) -> MixtureDraw:
        """Draw a mixture of one of the transforms, which all mix batches."""
        member = self.choose(draws)
        assert isinstance(member, MixingTransform)
        return member.draw(draws, height, width)

    def __call__(self, *img: Picture) -> Picture:
        if is_pixelwise(self):
            return super().__call__(*img)
        return self.choose(current_draws())(*img)

    def __repr__(self) -> str:
        return f"RandomChoice({self.transforms}, p={self.p})"


def _member(transform: object) -> PixelTransform:
    assert isinstance(transform, PixelTransform)
    return transform


def _checked(transforms: object) -> list[Any]:
    if not isinstance(transforms, Iterable) or isinstance(transforms, torch.Tensor):
        raise UsageError(f"{named('transforms', transforms)}: give a list of transforms")
    steps = list(transforms)
    for each in steps:
        check_callable("transforms", each)
    return steps
