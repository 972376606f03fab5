"""Transforms of tensors: conversions, normalisation and erasing, of one image or a whole batch.

A loader does them for the whole batch, on the device where it lies.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from dlio.errors import UsageError
from dlio.image.crop import TRIES
from dlio.image.picture import (
    DescribedTransform,
    Picture,
    check_probability,
    check_range,
    numbers_in,
)
from dlio.image.random_source import RandomSource, current_draws
from dlio.util.arguments import check_flag, named
from dlio.util.units import counted


class ToDtype(DescribedTransform):
    """Convert to another type of pixels.

    Args:
        dtype: of the result.
        scale: from the whole range of one type to that of the other: 0 to 255 for uint8, 0 to 1 for
            floats. Otherwise values stay.
    """

    _shown: tuple[str, ...] = ("dtype", "scale")

    def __init__(self, dtype: torch.dtype, scale: bool = False) -> None:
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"{named('dtype', dtype)}: give a type of torch, such as torch.uint8")
        check_flag("scale", scale)
        self.dtype, self.scale = dtype, scale

    def __call__(self, img: Picture) -> torch.Tensor:
        pixels = _tensor(img)
        if not self.scale or pixels.dtype == self.dtype:
            return pixels.to(self.dtype)
        return _scaled(pixels, self.dtype)


class ConvertImageDtype(ToDtype):
    """Convert to another type of pixels and scale to its range: ToDtype(dtype, scale=True)."""

    _shown: tuple[str, ...] = ("dtype",)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype, scale=True)


class ToFloat(ConvertImageDtype):
    """Scale pixels to 0 to 1, like torchvision's ToTensor and ToDtype(scale=True)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(_floating(dtype))


class ToTensor(ToFloat):
    """Make a float tensor of pixels from 0 to 1, shape (channels, height, width)."""

    _shown = ()

    def __init__(self) -> None:
        super().__init__(torch.float32)


class PILToTensor(DescribedTransform):
    """Make a uint8 tensor of shape (channels, height, width); a tensor stays as it is."""

    def __call__(self, img: Picture) -> torch.Tensor:
        return _tensor(img)


class ToImage(PILToTensor):
    """Make a uint8 tensor, as torchvision's v2 pipelines begin; a tensor stays as it is."""


class ToPureTensor(PILToTensor):
    """Make a plain tensor of a torchvision tv_tensor; the loader's tensors are plain."""

    def __call__(self, img: Picture) -> torch.Tensor:
        return _tensor(img).as_subclass(torch.Tensor)


class Normalize(DescribedTransform):
    """Compute (pixel / 255 - mean) / std for an image or a batch, on the device where it is.

    Args:
        mean, std: of each channel, for pixels from 0 to 1.
        dtype: of the result.
    """

    _shown = ("mean", "std")

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
            self.mean, self.std = numbers_in("mean", mean), numbers_in("std", std)
        except UsageError:
            raise wrong from None
        if len(self.mean) != len(self.std) or not self.mean or not all(self.std):
            raise wrong
        self.dtype = _floating(dtype)

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor of shape (..., channels, height, width).

        uint8 pixels are 0 to 255; float pixels are 0 to 1, as for torchvision's Normalize.
        """
        if not isinstance(img, torch.Tensor):
            raise UsageError("Normalize takes a tensor: put ToTensor() before it")
        top = 255.0 if img.dtype == torch.uint8 else 1.0
        mean = torch.tensor(self.mean, dtype=self.dtype, device=img.device) * top
        std = torch.tensor(self.std, dtype=self.dtype, device=img.device) * top
        made = img.to(self.dtype, copy=True)
        if made.ndim == 4 and made.shape[1] == len(mean) and made.device.type == "cpu":
            last = made.permute(0, 2, 3, 1)
            if last.is_contiguous():
                # In whole rows of pixels: torch is slow at loops over three channels.
                width = last.shape[2]
                last.flatten(2).sub_(mean.repeat(width)).div_(std.repeat(width))
                return made
        return made.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    def scaled(self) -> tuple[list[float], list[float]]:
        """Return (mean, std) for pixels from 0 to 255, rounded to float32."""
        mean, std = torch.tensor(self.mean) * 255.0, torch.tensor(self.std) * 255.0
        return mean.tolist(), std.tolist()

    def of_bytes(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels from 0 to 255 of shape (..., channels), computing in float32."""
        mean, std = (torch.tensor(each, device=pixels.device) for each in self.scaled())
        return ((pixels.float() - mean) / std).to(self.dtype)


class RandomErasing(DescribedTransform):
    """Overwrite a rectangle of random area and aspect ratio.

    Args:
        p: probability.
        scale: least and largest share of the image's area.
        ratio: least and largest aspect ratio, height to width.
        value: of the erased pixels, one or one per channel; `random` for normally distributed ones.
        inplace: overwrite the tensor given, and not a copy.

    Source: Zhong and others, "Random Erasing Data Augmentation", arXiv 1708.04896.
    """

    _shown = ("p", "scale", "ratio", "value", "inplace")

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0,
        inplace: bool = False,
    ) -> None:
        self.p = check_probability("RandomErasing", p)
        self.scale = check_range("scale", scale)
        if self.scale[1] > 1:
            raise UsageError(f"{named('scale', scale)}: give shares of the area, from 0 to 1")
        self.ratio = check_range("ratio", ratio, above=0)
        check_flag("inplace", inplace)
        self.value, self.inplace = value, inplace
        self._values: list[float] | None = None
        if isinstance(value, str) and value != "random":
            raise UsageError(f"{named('value', value)}: give numbers, or 'random'")
        if value != "random":
            self._values = numbers_in("value", [value] if isinstance(value, int | float) else value)

    def draw(
        self, draws: RandomSource, height: int, width: int
    ) -> tuple[int, int, int, int] | None:
        """Draw (top, left, height, width) of the rectangle in pixels; None to erase nothing."""
        if draws.uniform() >= self.p:
            return None
        area, (flat, tall) = height * width, map(math.log, self.ratio)
        for _ in range(TRIES):
            target = area * draws.uniform(*self.scale)
            aspect = math.exp(draws.uniform(flat, tall))
            h, w = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if h < height and w < width:
                return draws.below(height - h + 1), draws.below(width - w + 1), h, w
        return None

    def __call__(self, img: torch.Tensor) -> torch.Tensor:
        """Erase in a tensor of shape (..., channels, height, width); in all images of a batch
        alike, as torchvision does."""
        if not isinstance(img, torch.Tensor):
            raise UsageError("RandomErasing takes a tensor: put ToTensor() before it")
        made, draws = img if self.inplace else img.clone(), current_draws()
        self._erase(made, draws)
        return made

    def erase_each(self, images: torch.Tensor, draws: Sequence[RandomSource]) -> torch.Tensor:
        """Erase in each image of a batch, in place; `draws` are the images' own."""
        for image, own in zip(images, draws, strict=True):
            self._erase(image, own)
        return images

    def _erase(self, img: torch.Tensor, draws: RandomSource) -> None:
        box = self.draw(draws, int(img.shape[-2]), int(img.shape[-1]))
        if box is None:
            return
        top, left, height, width = box
        channels = int(img.shape[-3])
        if self._values is None:
            value = torch.from_numpy(draws.normal(channels, height, width))
        elif len(self._values) in (1, channels):
            value = torch.tensor(self._values)[:, None, None]
        else:
            raise UsageError(
                f"{named('value', self.value)}: the image has {counted(channels, 'channel')}"
            )
        part = img[..., top : top + height, left : left + width]
        part.copy_(value.to(img.device))


def _tensor(img: Picture) -> torch.Tensor:
    """Return a picture as a tensor of shape (..., channels, height, width)."""
    if isinstance(img, torch.Tensor):
        return img
    pixels: Any = np.array(img)
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def _scaled(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert between floats from 0 to 1 and integers, as torchvision does."""
    if pixels.dtype.is_floating_point:
        if dtype.is_floating_point:
            return pixels.to(dtype)
        top = torch.iinfo(dtype).max
        # Each integer gets the same part of 0 to 1.
        return pixels.mul(top + 1.0 - 1e-3).to(dtype)
    most = torch.iinfo(pixels.dtype).max
    if dtype.is_floating_point:
        return pixels.to(dtype).div_(most)
    top = torch.iinfo(dtype).max
    if most > top:
        return torch.div(pixels, (most + 1) // (top + 1), rounding_mode="floor").to(dtype)
    return pixels.to(dtype).mul_((top + 1) // (most + 1))


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"{named('dtype', dtype)}: give a type of torch, such as torch.float32")
    return dtype
