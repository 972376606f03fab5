"""Fusing the crop that a transform begins with into the decoder."""

from typing import Any, Final

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

__all__ = ["fused"]

_BATCHWISE: Final = (Normalize, ToFloat)


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
