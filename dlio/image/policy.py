"""Automatic augmentation: RandAugment and TrivialAugmentWide.

Operations and magnitudes are those of torchvision.transforms.autoaugment. Sources: Cubuk and
others, "RandAugment", arXiv 1909.13719; Mueller and Hutter, "TrivialAugment", arXiv 2103.10158.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.image import pixels as paint
from dlio.image.picture import PixelChange, Pixels, PixelTransform, numbers_in
from dlio.image.random_source import RandomSource
from dlio.util.arguments import named, whole_number

Interpolation = str | int | Enum
"""`nearest` or `bilinear`, Pillow's number of one, or torchvision's InterpolationMode."""
_Space = dict[str, npt.NDArray[np.float32] | None]
"""Magnitudes of each operation, shape (num_magnitude_bins,); None for one without."""
_MOVES: Final = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_SIGNED: Final = (*_MOVES, "Brightness", "Color", "Contrast", "Sharpness")
"""Operations whose magnitudes are negative in half of the cases."""
_PAINTS: Final[dict[str, Callable[[Pixels, float], Pixels]]] = {
    "Identity": lambda pixels, _: pixels,
    "Brightness": lambda pixels, size: paint.brightness(pixels, 1 + size),
    "Color": lambda pixels, size: paint.saturation(pixels, 1 + size),
    "Contrast": lambda pixels, size: paint.contrast(pixels, 1 + size),
    "Sharpness": lambda pixels, size: paint.sharpness(pixels, 1 + size),
    "Posterize": lambda pixels, size: paint.posterize(pixels, int(size)),
    "Solarize": paint.solarize,
    "AutoContrast": lambda pixels, _: paint.autocontrast(pixels),
    "Equalize": lambda pixels, _: paint.equalize(pixels),
}
_MODES: Final = {"nearest": False, "bilinear": True, "0": False, "2": True}
"""Names of interpolations, and Pillow's numbers."""


class _AugmentationPolicy(PixelTransform):
    def __init__(self, bins: int, interpolation: Interpolation, fill: Any) -> None:
        self.num_magnitude_bins = whole_number("num_magnitude_bins", bins, 2)
        self.interpolation = interpolation
        self.fill = fill
        bilinear = is_bilinear(interpolation)
        if bilinear is None:
            raise UsageError(
                f"{named('interpolation', interpolation)}: choose 'nearest' or 'bilinear'"
            )
        self._bilinear = bilinear
        values = (0.0,) if fill is None else (fill,) if isinstance(fill, int | float) else fill
        self._fill = tuple(numbers_in("fill", values))
        if len(self._fill) not in (1, 3):
            raise UsageError(f"{named('fill', fill)}: give one value, or one per channel")
        self._spaces: dict[tuple[int, int], _Space] = {}

    def space(self, height: int, width: int) -> _Space:
        """Return the operations and magnitudes for an image of this size in pixels."""
        raise NotImplementedError

    def _change(
        self, draws: RandomSource, height: int, width: int, level: int | None
    ) -> PixelChange:
        """Draw an operation, and its magnitude unless `level` chooses it."""
        space = self._spaces.get((height, width))
        if space is None:
            space = self.space(height, width)
            if len(self._spaces) < 16:  # Images of many sizes do not fill the memory.
                self._spaces[height, width] = space
        name = list(space)[draws.below(len(space))]
        magnitudes, magnitude = space[name], 0.0
        if magnitudes is not None:
            chosen = draws.below(len(magnitudes)) if level is None else level
            magnitude = float(magnitudes[chosen])
        if name in _SIGNED and draws.below(2):
            magnitude = -magnitude
        return PixelChange(name, magnitude)

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        name, size = change
        if name in _PAINTS:
            return _PAINTS[name](pixels, size)
        return paint.affine(pixels, _matrix(name, size, pixels), self._fill, self._bilinear)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_spaces": {}}


class RandAugment(_AugmentationPolicy):
    """Do `num_ops` random operations, all of one strength.

    Args:
        num_ops: operations on each image, which may be equal.
        magnitude: strength, from 0 to `num_magnitude_bins` - 1.
        interpolation: `nearest` or `bilinear`, of rotations and shears; or torchvision's.
        fill: value of pixels from outside of the image, one or one per channel; black for None.
    """

    _shown = ("num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill")

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Interpolation = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_magnitude_bins, interpolation, fill)
        self.num_ops = whole_number("num_ops", num_ops)
        self.magnitude = whole_number("magnitude", magnitude, 0, self.num_magnitude_bins - 1)

    def space(self, height: int, width: int) -> _Space:
        part = 150.0 / 331.0
        limits = (0.3, 0.3, part * width, part * height, 30.0, 0.9, 0.9, 0.9, 0.9)
        return _space(self.num_magnitude_bins, limits, least_bits=4)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        return [self._change(draws, height, width, self.magnitude) for _ in range(self.num_ops)]


class TrivialAugmentWide(_AugmentationPolicy):
    """Do one random operation of random strength. Arguments as for `RandAugment`."""

    _shown = ("num_magnitude_bins", "interpolation", "fill")

    def __init__(
        self,
        num_magnitude_bins: int = 31,
        interpolation: Interpolation = "nearest",
        fill: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_magnitude_bins, interpolation, fill)

    def space(self, height: int, width: int) -> _Space:
        limits = (0.99, 0.99, 32.0, 32.0, 135.0, 0.99, 0.99, 0.99, 0.99)
        return _space(self.num_magnitude_bins, limits, least_bits=2)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        return [self._change(draws, height, width, None)]


def is_bilinear(interpolation: object) -> bool | None:
    """True for bilinear, False for nearest, None for others: words, numbers of Pillow, or members
    of torchvision's InterpolationMode."""
    return _MODES.get(str(getattr(interpolation, "value", interpolation)).lower())


def _space(bins: int, limits: Sequence[float], least_bits: int) -> _Space:
    space: _Space = {"Identity": None}
    for name, limit in zip(_SIGNED, limits, strict=True):
        space[name] = np.linspace(0.0, limit, bins, dtype=np.float32)
    steps = np.arange(bins, dtype=np.float32) / np.float32((bins - 1) / (8 - least_bits))
    space["Posterize"] = 8 - np.rint(steps)
    space["Solarize"] = np.linspace(255.0, 0.0, bins, dtype=np.float32)
    return space | {"AutoContrast": None, "Equalize": None}


def _matrix(name: str, size: float, pixels: Pixels) -> tuple[float, ...]:
    if name == "Rotate":
        return paint.rotation(size, *pixels.shape[:2])
    shift = float(-int(size))
    return {
        "ShearX": (1.0, size, 0.0, 0.0, 1.0, 0.0),
        "ShearY": (1.0, 0.0, 0.0, size, 1.0, 0.0),
        "TranslateX": (1.0, 0.0, shift, 0.0, 1.0, 0.0),
        "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, shift),
    }[name]
