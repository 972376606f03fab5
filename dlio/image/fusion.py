"""Fusing the crop that a transform begins with into the decoder."""

from typing import Any, Final

from dlio.errors import UsageError
from dlio.image.crop import Crop
from dlio.image.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToFloat,
    Transform,
)

__all__ = ["check_pixelwise", "fused"]

_BATCHWISE: Final = (Normalize, ToFloat)
_MOVING: Final = (
    *("RandomResizedCrop", "RandomCrop", "CenterCrop", "FiveCrop", "TenCrop", "Resize", "Pad"),
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotation", "RandomAffine"),
    *("RandomPerspective", "ElasticTransform", "RandomZoomOut", "RandomIoUCrop", "ScaleJitter"),
    *("RandomShortestSize", "RandomResize", "RandAugment", "TrivialAugmentWide", "AutoAugment"),
    "AugMix",
)
"""Names of transforms, of dlio and torchvision, that move pixels."""


def check_pixelwise(transform: Transform | None, path: str) -> None:
    """Raise UsageError if a transform of crops has a known step that moves pixels.

    Args:
        path: of the data set, for the message.
    """
    steps = getattr(transform, "transforms", None)
    for step in steps if isinstance(steps, list | tuple) else [transform]:
        name = type(step).__name__
        if name in _MOVING:
            raise UsageError(
                f"transform={name}: it would move the pixels of {path} and leave its boxes and "
                "masks behind: begin the transform with Compose([RandomResizedCrop(...), "
                "RandomHorizontalFlip()]), with which they move, or transform both in data.map()"
            )
        if step is not transform:
            check_pixelwise(step, path)


def fused(
    transform: Transform | None,
) -> tuple[Crop | None, Transform | None, Transform | None]:
    """Split a transform into (crop, rest for each sample, rest for a whole batch).

    The crop is the one that the transform begins with, which the decoder does; None if it begins
    with anything else. A transform of another library is returned as the rest for each sample.
    """
    steps: list[Any] = list(transform.transforms) if type(transform) is Compose else [transform]
    crop: Crop | None = None
    if steps and type(steps[0]) is RandomResizedCrop:
        first = steps.pop(0)
        flips: dict[Any, float] = {RandomHorizontalFlip: 0.0, RandomVerticalFlip: 0.0}
        while steps and type(steps[0]) in flips and not flips[type(steps[0])]:
            step = steps.pop(0)
            flips[type(step)] = step.p
        height, width = first.size
        probabilities = flips[RandomHorizontalFlip], flips[RandomVerticalFlip]
        crop = Crop(height, True, first.scale, first.ratio, *probabilities, across=width)
    elif len(steps) > 1 and type(steps[0]) is Resize and type(steps[1]) is CenterCrop:
        resize, middle = steps[0], steps[1]
        if isinstance(resize.size, int) and resize.size >= max(middle.size):
            del steps[:2]
            height, width = middle.size
            crop = Crop(height, False, resize=resize.size, across=width)
    if crop is None:
        return None, transform, None
    if steps and all(isinstance(step, _BATCHWISE) for step in steps):
        return crop, None, Compose(steps)
    return crop, Compose(steps) if steps else None, None
