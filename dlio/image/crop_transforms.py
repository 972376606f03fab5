"""Transforms with torchvision's names, parameters and distributions, made for dlio's decoder.

    from dlio import transforms as T

    transform = T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.TrivialAugmentWide(),
        T.Normalize(mean, std), T.RandomErasing(0.1)])
    data = dlio.open("/data/imagenet/train", transform=transform)

The crop is drawn before an image is decoded. Only its rows are decoded, straight into the batch.
Transforms of pixels change them there, as uint8 and without the GIL; the steps behind them
(`Normalize`, `RandomErasing`, `MixUp`) transform the whole batch at once, on the device if the
loader has one. All random numbers belong to the sample, so that any number of ranks and workers
gives the same pixels.

Each transform can also be called with an image: a uint8 or float tensor of shape (..., 3, height,
width), or an image of Pillow. It then draws from torch's random numbers, as torchvision does.
Source of the distributions: torchvision.transforms.
"""

import math
from collections.abc import Sequence

import torch

from dlio.errors import UsageError
from dlio.image import pixels as paint
from dlio.image.colour import (
    ColorJitter,
    GaussianBlur,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from dlio.image.composition import Compose, MultiCropTransform, RandomApply, RandomChoice, stacked
from dlio.image.crop import TRIES, Crop
from dlio.image.mixup import CutMix, MixUp
from dlio.image.picture import (
    DescribedTransform,
    Picture,
    PixelChange,
    Pixels,
    RandomChange,
    check_crops,
    check_range,
    shape_of,
)
from dlio.image.policy import RandAugment, TrivialAugmentWide
from dlio.image.random_source import current_draws
from dlio.image.tensors import (
    ConvertImageDtype,
    Normalize,
    PILToTensor,
    RandomErasing,
    ToDtype,
    ToFloat,
    ToImage,
    ToPureTensor,
    ToTensor,
)
from dlio.util.arguments import named, whole_number

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "ConvertImageDtype",
    "CutMix",
    "GaussianBlur",
    "MixUp",
    "Normalize",
    "PILToTensor",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
    "ToFloat",
    "ToImage",
    "ToPureTensor",
    "ToTensor",
    "TrivialAugmentWide",
]


class RandomResizedCrop(MultiCropTransform):
    """Cut out a part of random area and aspect ratio, and resize it.

    Args:
        size: side of the result in pixels, or (height, width).
        scale: least and largest share of the image's area.
        ratio: least and largest aspect ratio.
        crops: number of crops of each image, drawn independently, as self-supervised learning
            takes them. Samples of more than one have shape (crops, 3, height, width), and the
            steps behind draw for each crop. A loader decodes an image once for them, and the
            first crop is the one that it makes without `crops`.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        crops: int = 1,
    ) -> None:
        self.size = _size(size)
        self.crops = check_crops(crops)
        self.scale = check_range("scale", scale, above=0)
        self.ratio = check_range("ratio", ratio, above=0)

    @staticmethod
    def get_params(
        img: Picture, scale: Sequence[float], ratio: Sequence[float]
    ) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of a part of an image, in pixels."""
        (height, width), draws = shape_of(img), current_draws()
        area = height * width
        log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
        for _ in range(TRIES):
            target = area * draws.uniform(scale[0], scale[1])
            aspect = math.exp(draws.uniform(log_low, log_high))
            w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < w <= width and 0 < h <= height:
                return draws.below(height - h + 1), draws.below(width - w + 1), h, w
        crop = Crop(1, True, check_range("scale", scale), check_range("ratio", ratio))
        box = crop.box(height, width, [2.0] * crop.draws)  # No try fits: take its middle.
        return box.top, box.left, box.height, box.width

    def __call__(self, img: Picture) -> Picture:
        """Return a crop; of several crops one tensor of shape (crops, ...), or a list of images of
        Pillow."""
        made = [
            _resized(img, self.size, self.get_params(img, self.scale, self.ratio))
            for _ in range(self.crops)
        ]
        return made[0] if self.crops == 1 else stacked(made)

    def __repr__(self) -> str:
        more = "" if self.crops == 1 else f", crops={self.crops}"
        return f"RandomResizedCrop(size={self.size}, scale={self.scale}, ratio={self.ratio}{more})"


class Resize(DescribedTransform):
    """Resize to (height, width) in pixels; a single number is the length of the short side."""

    _shown = ("size",)

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = size if isinstance(size, int) else _size(size)
        _size(size)

    def __call__(self, img: Picture) -> Picture:
        height, width = shape_of(img)
        if not isinstance(self.size, int):
            return _resized(img, self.size, (0, 0, height, width))
        short, long = self.size, int(self.size * max(height, width) / min(height, width))
        size = (short, long) if height <= width else (long, short)
        return _resized(img, size, (0, 0, height, width))


class CenterCrop(DescribedTransform):
    """Cut out the middle; a smaller image gets a black border."""

    _shown = ("size",)

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _size(size)

    def __call__(self, img: Picture) -> Picture:
        height, width = shape_of(img)
        missing = [max(0, side - own) for side, own in zip(self.size, (height, width), strict=True)]
        if any(missing):
            (above, before), (below, behind) = (
                [each // 2 for each in missing],
                [(each + 1) // 2 for each in missing],
            )
            if isinstance(img, torch.Tensor):
                img = torch.nn.functional.pad(img, (before, behind, above, below))
            else:
                from PIL import ImageOps

                img = ImageOps.expand(img, (before, above, behind, below))
            height, width = shape_of(img)
        top = round((height - self.size[0]) / 2)
        left = round((width - self.size[1]) / 2)
        height, width = self.size
        if isinstance(img, torch.Tensor):
            return img[..., top : top + height, left : left + width]
        return img.crop((left, top, left + width, top + height))


class _Flip(RandomChange):
    _axis = 0
    """Axis of a tensor of shape (..., height, width), from its end."""

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.flip(pixels, self._axis + 2)

    def __call__(self, img: Picture) -> Picture:
        if not self.draw(current_draws(), *shape_of(img)):
            return img
        if isinstance(img, torch.Tensor):
            return img.flip(self._axis)
        # Pillow's FLIP_LEFT_RIGHT, FLIP_TOP_BOTTOM.
        return img.transpose(0 if self._axis == -1 else 1)


class RandomHorizontalFlip(_Flip):
    """Exchange left and right with probability `p`."""

    _axis = -1


class RandomVerticalFlip(_Flip):
    """Exchange top and bottom with probability `p`."""

    _axis = -2


def _resized(img: Picture, size: tuple[int, int], box: tuple[int, int, int, int]) -> Picture:
    top, left, height, width = box
    if not isinstance(img, torch.Tensor):
        from PIL import Image

        area = (left, top, left + width, top + height)
        return img.resize(size[::-1], Image.Resampling.BILINEAR, box=area)
    part = img[..., top : top + height, left : left + width]
    whole = part if part.ndim == 4 else part[None]
    if not whole.is_floating_point() and whole.dtype != torch.uint8:
        whole = whole.float()
    made = torch.nn.functional.interpolate(
        whole, size, mode="bilinear", antialias=True, align_corners=False
    )
    if made.dtype != img.dtype:
        made = made.round_().to(img.dtype)
    return made if img.ndim == 4 else made[0]


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
