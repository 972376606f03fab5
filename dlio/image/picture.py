"""Pictures as transforms get them: the base of transforms of pixels, and checks of arguments."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import UsageError
from dlio.image.random_source import RandomSource, current_draws
from dlio.util.arguments import named, number_in, whole_number

Picture = Any
"""A uint8 or float tensor of shape (..., channels, height, width), or an image of Pillow, which is
not imported here."""
Transform = Callable[[Any], Any]
"""A function of a picture, or of whatever the transform before it returns."""
Pixels = npt.NDArray[np.uint8]
_MOST_CROPS: Final = 256


class PixelChange(NamedTuple):
    """One change of an image's pixels, as drawn."""

    name: str
    value: Any = None


class DescribedTransform:
    """A transform whose repr is its name and its arguments, as attributes have them."""

    _shown: tuple[str, ...] = ()
    """Names of the attributes."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)
        return f"{type(self).__name__}({shown})"


class PixelTransform(DescribedTransform):
    """A transform of pixels that keeps the size, in two steps: draw the changes, and do them."""

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        """Draw the changes of an image of this size in pixels, in their order."""
        raise NotImplementedError

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        """Do one change to an image of shape (height, width, 3 or 1); returns a new array, or the
        image itself if it stays as it is."""
        raise NotImplementedError

    def apply(self, pixels: Pixels, draws: RandomSource) -> Pixels:
        """Draw the changes and do them."""
        return reduce(self.paint, self.draw(draws, *pixels.shape[:2]), pixels)

    def __call__(self, img: Picture) -> Picture:
        """Transform a picture; all images of a batch alike, as torchvision does."""
        changes = self.draw(current_draws(), *shape_of(img))
        if not changes:
            return img
        return on_pixels(type(self).__name__, lambda each: reduce(self.paint, changes, each), img)


class RandomChange(PixelTransform):
    """One change, made with probability `p`."""

    _shown: tuple[str, ...] = ("p",)

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(type(self).__name__, p)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        return [PixelChange(type(self).__name__)] if draws.uniform() < self.p else []


def on_pixels(name: str, paint: Callable[[Pixels], Pixels], img: Picture) -> Picture:
    """Call a function of uint8 pixels of shape (height, width, channels) for any picture.

    Float pixels from 0 to 1 are rounded to 8 bits on the way.

    Raises UsageError for other pixels; `name` is the transform's.
    """
    if not isinstance(img, torch.Tensor):
        from PIL import Image

        if img.mode not in ("RGB", "L"):
            raise UsageError(
                f"{name} of an image of mode {img.mode}: call its convert('RGB') first"
            )
        pixels = np.array(img)
        painted = paint(pixels if pixels.ndim == 3 else pixels[..., None])
        return Image.fromarray(painted[..., 0] if pixels.ndim == 2 else painted, img.mode)
    if img.dtype != torch.uint8:
        low, high = img.aminmax() if img.numel() else (0, 0)
        if not img.dtype.is_floating_point or low < 0 or high > 1:
            raise UsageError(
                f"{name} of a tensor of {img.dtype}: it takes pixels from 0 to 255 in uint8, or "
                "from 0 to 1 as floats; put it before Normalize"
            )
        whole = img.mul(255).round().to(torch.uint8)
        return on_pixels(name, paint, whole).to(img.dtype).div_(255)
    if img.ndim < 3 or img.shape[-3] not in (1, 3):
        raise UsageError(
            f"{name} of a tensor of shape {tuple(img.shape)}: it takes (..., 3 or 1, height, width)"
        )
    flat = img.cpu().reshape(-1, *img.shape[-3:]).permute(0, 2, 3, 1)
    images = [paint(np.ascontiguousarray(each.numpy())) for each in flat]
    made = np.stack(images) if len(images) > 1 else images[0][None]
    return torch.from_numpy(made).permute(0, 3, 1, 2).reshape(img.shape).to(img.device)


def shape_of(img: Picture) -> tuple[int, int]:
    """Return (height, width) in pixels. Raises UsageError for anything but a picture."""
    if isinstance(img, torch.Tensor) and img.ndim >= 2:
        return int(img.shape[-2]), int(img.shape[-1])
    try:
        return int(img.height), int(img.width)
    except AttributeError:
        kind = (
            f"tensor of shape {tuple(img.shape)}" if hasattr(img, "shape") else type(img).__name__
        )
        raise UsageError(
            f"a transform of images got a {kind}: give it an image of Pillow, or a tensor of "
            "shape (..., channels, height, width)"
        ) from None


def check_probability(name: str, p: object) -> float:
    """Return a probability. Raises UsageError; `name` is the transform's."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise UsageError(f"{name}(p={p!r}): give a probability from 0 to 1")
    return p


def check_crops(crops: object, train: bool = True) -> int:
    """Return the number of crops of each image, which are random with `train`. Raises
    UsageError."""
    number = whole_number("crops", crops, 1, _MOST_CROPS, "crops")
    if number > 1 and not train:
        raise UsageError(
            f"crops={number}, train=False: all crops would be the middle of an image: leave one out"
        )
    return number


def numbers_in(name: str, values: object) -> list[float]:
    """Return a list of finite numbers. Raises UsageError."""
    try:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError
        numbers = [float(each) for each in values]
    except (TypeError, ValueError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{named(name, values)}: give a list of numbers")
    return numbers


def check_range(name: str, values: object, above: float | None = None) -> tuple[float, float]:
    """Return (least, largest), which must be from 0, or above a bound. Raises UsageError."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != 2:
        raise UsageError(f"{named(name, values)}: give two numbers, the least and the largest")
    low, high = (number_in(name, value, 0, "numbers") for value in values)
    if not low <= high or (above is not None and low <= above):
        more = "" if above is None else f", both above {above:g}"
        raise UsageError(f"{named(name, values)}: give the least and the largest{more}")
    return low, high
