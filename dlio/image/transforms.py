"""Transforms with torchvision's names, parameters and distributions, made for dlio's decoder.

    from dlio import transforms as T

    transform = T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.Normalize(mean, std)])
    data = dlio.open("/data/imagenet/train", transform=transform)

The crop is drawn before an image is decoded. Only its rows are decoded, straight into the batch,
and its random numbers belong to the sample, so that any number of ranks and workers gives the same
pixels. The steps behind it (`Normalize`) transform the whole batch at once. The batch is uint8
until then, and already on the device if the loader has one.

Each transform can also be called with an image: a uint8 or float tensor of shape (..., 3, height,
width), or an image of Pillow. It then draws from torch's random numbers, as torchvision does.
Source of the distributions: torchvision.transforms.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from dlio.errors import UsageError
from dlio.image.crop import Crop
from dlio.image.decode import opencv
from dlio.util.arguments import check_callable, named, number_in, whole_number

__all__ = [
    "CenterCrop",
    "Compose",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToFloat",
]

_TRIES: Final = 10
Picture = Any
"""A uint8 or float tensor of shape (..., 3, height, width), or an image of Pillow, which is not
imported here."""
Transform = Callable[[Any], Any]
"""A function of a picture, or of whatever the transform before it returns."""


class RandomResizedCrop:
    """Cut out a part of random area and aspect ratio, and resize it.

    Args:
        size: side of the result in pixels, or (height, width).
        scale: least and largest share of the image's area.
        ratio: least and largest aspect ratio.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
    ) -> None:
        self.size = _size(size)
        self.scale, self.ratio = _range(scale, "scale"), _range(ratio, "ratio")

    @staticmethod
    def get_params(
        img: Picture, scale: Sequence[float], ratio: Sequence[float]
    ) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of a part of an image, in pixels."""
        height, width = _shape(img)
        area = height * width
        log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
        for _ in range(_TRIES):
            target = area * _uniform(scale[0], scale[1])
            aspect = math.exp(_uniform(log_low, log_high))
            w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                top = int(torch.randint(0, height - h + 1, (1,)).item())
                left = int(torch.randint(0, width - w + 1, (1,)).item())
                return top, left, h, w
        crop = Crop(1, True, _pair(scale), _pair(ratio))
        box = crop.box(height, width, [2.0] * crop.draws)  # No try fits: take its middle.
        return box.top, box.left, box.height, box.width

    def __call__(self, img: Picture) -> Picture:
        top, left, height, width = self.get_params(img, self.scale, self.ratio)
        return _resized(img, self.size, (top, left, height, width))

    def __repr__(self) -> str:
        return f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio})"


class Resize:
    """Resize to (height, width) in pixels; a single number is the length of the short side."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = size if isinstance(size, int) else _size(size)
        _size(size)

    def __call__(self, img: Picture) -> Picture:
        height, width = _shape(img)
        if not isinstance(self.size, int):
            return _resized(img, self.size, (0, 0, height, width))
        short, long = self.size, int(self.size * max(height, width) / min(height, width))
        size = (short, long) if height <= width else (long, short)
        return _resized(img, size, (0, 0, height, width))

    def __repr__(self) -> str:
        return f"Resize(size={self.size})"


class CenterCrop:
    """Cut out the middle. Raises UsageError for a smaller image."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _size(size)

    def __call__(self, img: Picture) -> Picture:
        height, width = _shape(img)
        if height < self.size[0] or width < self.size[1]:
            raise UsageError(f"CenterCrop({self.size}) of {height} x {width} pixels: resize first")
        top = round((height - self.size[0]) / 2)
        left = round((width - self.size[1]) / 2)
        return _cut(img, top, left, *self.size)

    def __repr__(self) -> str:
        return f"CenterCrop(size={self.size})"


class _Flip:
    def __init__(self, p: float = 0.5) -> None:
        if not isinstance(p, int | float) or not 0 <= p <= 1:
            raise UsageError(f"{type(self).__name__}(p={p!r}): give a probability from 0 to 1")
        self.p = p

    def _turned(self, img: Picture, axis: int) -> Picture:
        if torch.rand(1).item() >= self.p:
            return img
        if isinstance(img, torch.Tensor):
            return img.flip(axis)
        return img.transpose(0 if axis == -1 else 1)  # Pillow's FLIP_LEFT_RIGHT, FLIP_TOP_BOTTOM.

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


class RandomHorizontalFlip(_Flip):
    """Exchange left and right with probability `p`."""

    def __call__(self, img: Picture) -> Picture:
        return self._turned(img, -1)


class RandomVerticalFlip(_Flip):
    """Exchange top and bottom with probability `p`."""

    def __call__(self, img: Picture) -> Picture:
        return self._turned(img, -2)


class Normalize:
    """Compute (pixel / 255 - mean) / std for an image or a batch, on the device where it is.

    Args:
        mean, std: of each channel, for pixels from 0 to 1.
        dtype: of the result.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        wrong = UsageError(
            f"Normalize(mean={mean!r}, std={std!r}): give a number per channel, std without 0"
        )
        try:
            self.mean, self.std = [float(each) for each in mean], [float(each) for each in std]
        except (TypeError, ValueError):
            raise wrong from None
        if len(self.mean) != len(self.std) or not all(self.std):
            raise wrong
        self.dtype = _dtype(dtype)

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor of shape (..., channels, height, width).

        uint8 pixels are 0 to 255; float pixels are 0 to 1, as for torchvision's Normalize.
        """
        top = 255.0 if img.dtype == torch.uint8 else 1.0
        mean = torch.tensor(self.mean, dtype=self.dtype, device=img.device).view(-1, 1, 1) * top
        std = torch.tensor(self.std, dtype=self.dtype, device=img.device).view(-1, 1, 1) * top
        return img.to(self.dtype).sub_(mean).div_(std)

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"


class ToFloat:
    """Scale pixels to 0 to 1, like torchvision's ToTensor and ToDtype(scale=True)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = _dtype(dtype)

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        return img.to(self.dtype).div_(255) if img.dtype == torch.uint8 else img.to(self.dtype)

    def __repr__(self) -> str:
        return f"ToFloat(dtype={self.dtype})"


class Compose:
    """Apply transforms one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        if not isinstance(transforms, Iterable):
            raise UsageError(f"{named('transforms', transforms)}: give a list of transforms")
        self.transforms = list(transforms)
        for each in self.transforms:
            check_callable("transforms", each)

    def __call__(self, img: Picture) -> Picture:
        for transform in self.transforms:
            img = transform(img)
        return img

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"


def _resized(img: Picture, size: tuple[int, int], box: tuple[int, int, int, int]) -> Picture:
    top, left, height, width = box
    if not isinstance(img, torch.Tensor):
        from PIL import Image

        area = (left, top, left + width, top + height)
        return img.resize(size[::-1], Image.Resampling.BILINEAR, box=area)
    part = img[..., top : top + height, left : left + width]
    if img.dtype == torch.uint8 and img.ndim == 3:
        cv2 = opencv()
        shrinks = height >= 2 * size[0] and width >= 2 * size[1]
        plain = np.ascontiguousarray(part.permute(1, 2, 0).numpy())
        how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        made = cv2.resize(plain, size[::-1], interpolation=how)
        return torch.from_numpy(made.reshape(*size, -1)).permute(2, 0, 1)
    whole = part if part.ndim == 4 else part[None]
    made = torch.nn.functional.interpolate(
        whole.float(), size, mode="bilinear", antialias=True, align_corners=False
    )
    if img.dtype == torch.uint8:
        made = made.round_().clamp_(0, 255)
    made = made.to(img.dtype)
    return made if img.ndim == 4 else made[0]


def _cut(img: Picture, top: int, left: int, height: int, width: int) -> Picture:
    if isinstance(img, torch.Tensor):
        return img[..., top : top + height, left : left + width]
    return img.crop((left, top, left + width, top + height))


def _shape(img: Picture) -> tuple[int, int]:
    if isinstance(img, torch.Tensor):
        return int(img.shape[-2]), int(img.shape[-1])
    return int(img.height), int(img.width)


def _uniform(low: float, high: float) -> float:
    return float(torch.empty(1).uniform_(low, high).item())


def _dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"{named('dtype', dtype)}: give a type of torch, such as torch.float32")
    return dtype


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, list | tuple) else (size,)
    if len(sides) == 1:
        sides *= 2
    try:
        height, width = (whole_number("size", side, 1, 8192) for side in sides)
    except ValueError:  # UsageError, or another number of sides.
        raise UsageError(
            f"{named('size', size)}: give a number of pixels from 1 to 8192, or (height, width)"
        ) from None
    return height, width


def _range(values: Sequence[float], name: str) -> tuple[float, float]:
    low, high = _pair(values)
    if not 0 < low <= high:
        raise UsageError(f"{name}={values}: give the least and the largest, both above 0")
    return low, high


def _pair(values: Sequence[float]) -> tuple[float, float]:
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise UsageError(f"{values!r}: give two numbers, the least and the largest")
    low, high = (number_in("range", value, 0, "numbers") for value in values)
    return low, high
