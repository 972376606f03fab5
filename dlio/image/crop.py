"""What is cut out of an image, by torchvision's rules, from random numbers that are given. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TRIES: Final = 10
_TOP, _LEFT, _FLIP, _UPEND = (2 * _TRIES + k for k in range(4))
DRAWS: Final = 2 * _TRIES + 4
"""Random numbers a sample: (area, ratio) a try, then row, column, flip, upending."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an image, in its pixels."""

    top: int
    left: int
    height: int
    width: int
    flip: bool
    upend: bool = False


@dataclass(frozen=True, slots=True)
class Crop:
    """What is cut out of an image, and the size it gets.

    In training torchvision's RandomResizedCrop, with the image flipped with probability `flip`
    and upended with probability `upend`; otherwise Resize(resize) and CenterCrop.
    """

    size: int
    """Height of the result."""
    train: bool
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    upend: float = 0.0
    resize: int | None = None
    """Short side before the middle is cut out; 8/7 of the size by default: 256 for 224."""
    across: int | None = None
    """Width of the result; as its height by default."""

    @property
    def width(self) -> int:
        return self.size if self.across is None else self.across

    @property
    def draws(self) -> int:
        """Random numbers that `box` takes."""
        return DRAWS if self.train else 0

    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box:
        """The part of an image of this size that is cut out.

        Args:
            uniforms: `draws` numbers in [0, 1).
        """
        if not self.train:
            return self._middle(height, width)
        flip, upend = uniforms[_FLIP] < self.flip, uniforms[_UPEND] < self.upend
        area = height * width
        smallest, largest = self.scale
        log_low, log_high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for k in range(_TRIES):
            target = area * (smallest + (largest - smallest) * uniforms[2 * k])
            ratio = math.exp(log_low + (log_high - log_low) * uniforms[2 * k + 1])
            w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(uniforms[_TOP] * (height - h + 1))
                left = int(uniforms[_LEFT] * (width - w + 1))
                return Box(top, left, h, w, flip, upend)
        # No try fitted a very long image: its middle, as near to the ratios as it gets.
        if width / height < self.ratio[0]:
            h, w = min(height, round(width / self.ratio[0])), width
        elif width / height > self.ratio[1]:
            h, w = height, min(width, round(height * self.ratio[1]))
        else:
            h, w = height, width
        return Box((height - h) // 2, (width - w) // 2, h, w, flip, upend)

    def _middle(self, height: int, width: int) -> Box:
        short = min(height, width)
        # What the result covers of the image, before it is resized.
        scale = short * 7 / (8 * min(self.size, self.width))
        if self.resize is not None:
            scale = short / self.resize
        h = max(1, min(height, round(self.size * scale)))
        w = max(1, min(width, round(self.width * scale)))
        return Box((height - h) // 2, (width - w) // 2, h, w, False)
