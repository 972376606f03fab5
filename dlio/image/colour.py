"""Transforms of colour, contrast and sharpness, with torchvision's parameters and distributions."""

from collections.abc import Sequence
from typing import Any, Final

from dlio.errors import UsageError
from dlio.image import pixels as paint
from dlio.image.picture import PixelChange, Pixels, PixelTransform, RandomChange, check_range
from dlio.image.random_source import RandomSource
from dlio.util.arguments import named, number_in, whole_number

Jitter = float | Sequence[float]
_JITTERS: Final = {
    "brightness": paint.brightness,
    "contrast": paint.contrast,
    "saturation": paint.saturation,
    "hue": paint.hue,
}


class ColorJitter(PixelTransform):
    """Change brightness, contrast, saturation and hue, in random order.

    Args:
        brightness, contrast, saturation: the factor is drawn uniformly from (1 - x, 1 + x), from 0
            on; or from the (least, largest) given.
        hue: the shift, as a part of the whole circle, is drawn from (-x, x), x at most 0.5; or from
            the (least, largest) given.
    """

    _shown = tuple(_JITTERS)

    def __init__(
        self,
        brightness: Jitter = 0,
        contrast: Jitter = 0,
        saturation: Jitter = 0,
        hue: Jitter = 0,
    ) -> None:
        self.brightness = _jitter("brightness", brightness)
        self.contrast = _jitter("contrast", contrast)
        self.saturation = _jitter("saturation", saturation)
        self.hue = _shift(hue)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        order = draws.permutation(len(_JITTERS))
        drawn: list[PixelChange | None] = []
        for name in _JITTERS:
            between = getattr(self, name)
            drawn.append(None if between is None else PixelChange(name, draws.uniform(*between)))
        return [change for change in map(drawn.__getitem__, order) if change is not None]

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return _JITTERS[change.name](pixels, change.value)


class GaussianBlur(PixelTransform):
    """Blur by a Gaussian of random width.

    Args:
        kernel_size: side of the kernel in pixels, odd, or (width, height).
        sigma: the Gaussian's, in pixels; drawn uniformly from (least, largest), or fixed.
    """

    _shown = ("kernel_size", "sigma")

    def __init__(
        self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)
    ) -> None:
        sides = kernel_size if isinstance(kernel_size, list | tuple) else (kernel_size,) * 2
        try:
            self.kernel_size = tuple(whole_number("kernel_size", side, 1) for side in sides)
        except UsageError:
            self.kernel_size = ()
        if len(self.kernel_size) != 2 or not all(side % 2 for side in self.kernel_size):
            raise UsageError(
                f"{named('kernel_size', kernel_size)}: give an odd number of pixels, or two"
            )
        ends = sigma if isinstance(sigma, list | tuple) else (sigma, sigma)
        self.sigma = check_range("sigma", ends, above=0)

    def draw(self, draws: RandomSource, height: int, width: int) -> list[PixelChange]:
        return [PixelChange("blur", draws.uniform(*self.sigma))]

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.blur(pixels, self.kernel_size, change.value)


class RandomGrayscale(RandomChange):
    """Replace colours by their luminance with probability `p`; channels stay."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.grayscale(pixels)


class RandomInvert(RandomChange):
    """Invert colours with probability `p`."""

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.invert(pixels)


class RandomPosterize(RandomChange):
    """Keep the `bits` highest bits of each value with probability `p`."""

    _shown = ("bits", "p")

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        self.bits = whole_number("bits", bits, 0, 8)

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.posterize(pixels, self.bits)


class RandomSolarize(RandomChange):
    """Invert values from `threshold` on with probability `p`; values are 0 to 255."""

    _shown = ("threshold", "p")

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        super().__init__(p)
        self.threshold = number_in("threshold", threshold, 0, "a value")

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.solarize(pixels, self.threshold)


class RandomAutocontrast(RandomChange):
    """Stretch each channel to its whole range with probability `p`."""

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.autocontrast(pixels)


class RandomEqualize(RandomChange):
    """Equalize each channel's histogram with probability `p`."""

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.equalize(pixels)


class RandomAdjustSharpness(RandomChange):
    """Change sharpness by a factor with probability `p`: 0 is smooth, 2 twice as sharp."""

    _shown = ("sharpness_factor", "p")

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        super().__init__(p)
        self.sharpness_factor = number_in("sharpness_factor", sharpness_factor, 0, "a factor")

    def paint(self, pixels: Pixels, change: PixelChange) -> Pixels:
        return paint.sharpness(pixels, self.sharpness_factor)


def _jitter(name: str, value: Any) -> tuple[float, float] | None:
    """Return the range of a factor; None if nothing changes. Raises UsageError."""
    if isinstance(value, list | tuple):
        low, high = check_range(name, value)
    else:
        spread = number_in(name, value, 0, "a number")
        low, high = max(0.0, 1 - spread), 1 + spread
    return None if low == high == 1 else (low, high)


def _shift(value: Any) -> tuple[float, float] | None:
    wrong = UsageError(
        f"{named('hue', value)}: give a number from 0 to 0.5, or the least and the largest shift, "
        "from -0.5 to 0.5"
    )
    if isinstance(value, list | tuple):
        ends = list(value)
    elif isinstance(value, int | float) and value >= 0:
        ends = [-value, value]
    else:
        raise wrong
    numbers = all(isinstance(end, int | float) for end in ends)
    if len(ends) != 2 or not numbers or not -0.5 <= ends[0] <= ends[1] <= 0.5:
        raise wrong
    return None if ends[0] == ends[1] == 0 else (float(ends[0]), float(ends[1]))
