"""Operations on pixels give Pillow's results, within tolerances that are stated here."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from dlio.image import pixels as paint

Array = npt.NDArray[np.uint8]
FACTORS = (0.0, 0.1, 0.73, 1.0, 1.31, 1.99)


def _pictures() -> list[Image.Image]:
    """Smooth, noisy, narrow, flat, dark, and of few values."""
    generator = np.random.default_rng(5)
    coarse = generator.integers(0, 256, (5, 7, 3)).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((93, 71), Image.Resampling.BICUBIC)
    noise = Image.fromarray(generator.integers(0, 256, (64, 48, 3)).astype(np.uint8))
    dark = Image.fromarray(generator.integers(10, 60, (33, 34, 3)).astype(np.uint8))
    few = Image.fromarray((generator.integers(0, 3, (20, 21, 3)) * 90).astype(np.uint8))
    flat = Image.new("RGB", (9, 8), (200, 30, 60))
    return [smooth, noise, smooth.crop((0, 0, 3, 71)), flat, dark, few]


PICTURES = _pictures()


def _gaps(
    ours: Callable[[Array], Array], theirs: Callable[[Image.Image], Image.Image]
) -> npt.NDArray[np.int64]:
    """Differences from Pillow, of all pictures' values."""
    gaps = []
    for picture in PICTURES:
        pixels = np.array(picture)
        before = pixels.copy()
        made = ours(pixels)
        assert made.shape == pixels.shape
        assert made.dtype == np.uint8
        assert np.array_equal(pixels, before)  # The image given is left as it was.
        gaps.append(np.abs(made.astype(np.int64) - np.asarray(theirs(picture)).astype(np.int64)))
    return np.concatenate([gap.reshape(-1) for gap in gaps])


def _enhanced(kind: Any, factor: float) -> Callable[[Image.Image], Image.Image]:
    return lambda picture: kind(picture).enhance(factor)


@pytest.mark.parametrize("factor", FACTORS)
def test_brightness_is_pillows(factor: float) -> None:
    gaps = _gaps(lambda p: paint.brightness(p, factor), _enhanced(ImageEnhance.Brightness, factor))
    assert gaps.max() == 0


@pytest.mark.parametrize("factor", FACTORS)
def test_contrast_is_pillows(factor: float) -> None:
    gaps = _gaps(lambda p: paint.contrast(p, factor), _enhanced(ImageEnhance.Contrast, factor))
    assert gaps.max() <= 1  # Where the mean luminance is rounded another way.


@pytest.mark.parametrize("factor", FACTORS)
def test_saturation_is_pillows_to_a_rounding(factor: float) -> None:
    gaps = _gaps(lambda p: paint.saturation(p, factor), _enhanced(ImageEnhance.Color, factor))
    assert gaps.max() <= 1
    assert gaps.mean() < 0.01


@pytest.mark.parametrize("factor", FACTORS)
def test_sharpness_is_pillows_to_a_rounding(factor: float) -> None:
    gaps = _gaps(lambda p: paint.sharpness(p, factor), _enhanced(ImageEnhance.Sharpness, factor))
    assert gaps.max() <= 1
    assert gaps.mean() < 0.001


SHIFTS = pytest.mark.parametrize("shift", [-0.5, -0.31, -0.02, 0.0, 0.1, 0.47])


@SHIFTS
def test_hue_is_torchvisions_of_tensors_to_a_rounding(shift: float) -> None:
    for picture in PICTURES:
        pixels = np.array(picture)
        gaps = np.abs(paint.hue(pixels, shift).astype(int) - _turned(pixels / 255, shift))
        assert gaps.max() <= 1


def _turned(pixels: npt.NDArray[np.float64], shift: float) -> npt.NDArray[np.float64]:
    """torchvision's hue of float tensors, by the formulas of HSV; pixels from 0 to 1."""
    high, low = pixels.max(-1), pixels.min(-1)
    spread = np.where(high == low, 1, high - low)
    red, green, blue = np.moveaxis((high[..., None] - pixels) / spread[..., None], -1, 0)
    r, g = pixels[..., 0], pixels[..., 1]
    sector = np.where(high == r, blue - green, np.where(high == g, 2 + red - blue, 4 + green - red))
    hue = np.where(high == low, 0, sector / 6 + shift) % 1 * 6
    # Each channel is a trapezium over the circle.
    made = [(5 + hue) % 6, (3 + hue) % 6, (1 + hue) % 6]
    parts = [high - (high - low) * np.clip(np.minimum(k, 4 - k), 0, 1) for k in made]
    turned: npt.NDArray[np.float64] = np.stack(parts, -1) * 255
    return turned


@SHIFTS
def test_hue_is_pillows_to_its_eight_bits(shift: float) -> None:
    def theirs(picture: Image.Image) -> Image.Image:
        """torchvision.transforms.functional.adjust_hue of a picture."""
        hue, saturation, value = picture.convert("HSV").split()
        turned = np.array(hue) + np.int32(shift * 255).astype(np.uint8)
        return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")

    gaps = _gaps(lambda p: paint.hue(p, shift), theirs)
    assert gaps.max() <= 16
    assert gaps.mean() < 2


@pytest.mark.parametrize("bits", [0, 1, 3, 4, 7, 8])
def test_posterize_is_pillows(bits: int) -> None:
    def theirs(picture: Image.Image) -> Image.Image:
        return ImageOps.posterize(picture, bits) if bits else Image.new("RGB", picture.size)

    assert _gaps(lambda p: paint.posterize(p, bits), theirs).max() == 0


@pytest.mark.parametrize("threshold", [0.0, 0.5, 100, 127.5, 255, 256])
def test_solarize_is_pillows(threshold: float) -> None:
    theirs: Any = ImageOps.solarize  # Its types allow whole numbers alone.
    gaps = _gaps(lambda p: paint.solarize(p, threshold), lambda i: theirs(i, threshold))
    assert gaps.max() == 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (paint.autocontrast, ImageOps.autocontrast),
        (paint.equalize, ImageOps.equalize),
        (paint.invert, ImageOps.invert),
    ],
)
def test_tables_are_pillows(ours: Any, theirs: Any) -> None:
    assert _gaps(ours, theirs).max() == 0


def test_grayscale_is_pillows_to_a_rounding() -> None:
    gaps = _gaps(paint.grayscale, lambda i: i.convert("L").convert("RGB"))
    assert gaps.max() <= 1
    assert gaps.mean() < 0.01


def _affine_gaps(matrix: tuple[float, ...], fill: tuple[float, ...]) -> npt.NDArray[np.int64]:
    colour = tuple(int(each) for each in fill) * (3 if len(fill) == 1 else 1)

    def theirs(picture: Image.Image) -> Image.Image:
        kind, how = Image.Transform.AFFINE, Image.Resampling.NEAREST
        return picture.transform(picture.size, kind, matrix, how, fillcolor=colour)

    return _gaps(lambda pixels: paint.affine(pixels, matrix, fill), theirs)


@pytest.mark.parametrize("size", [-0.99, -0.3, 0.11, 0.85])
@pytest.mark.parametrize("fill", [(0.0,), (7.0, 8.0, 250.0)])
def test_shears_are_pillows(size: float, fill: tuple[float, ...]) -> None:
    for matrix in ((1.0, size, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, size, 1.0, 0.0)):
        assert (_affine_gaps(matrix, fill) > 0).mean() < 0.005


@pytest.mark.parametrize("by", [-31.0, -1.0, 0.0, 2.0, 17.0])
def test_translations_are_pillows(by: float) -> None:
    for matrix in ((1.0, 0.0, by, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0, 1.0, by)):
        assert _affine_gaps(matrix, (0.0,)).max() == 0


@pytest.mark.parametrize("degrees", [-135.0, -90.0, -30.5, 0.0, 9.0, 90.0, 135.0])
def test_rotations_are_pillows_but_for_ties(degrees: float) -> None:
    def ours(pixels: Array) -> Array:
        return paint.affine(pixels, paint.rotation(degrees, *pixels.shape[:2]))

    gaps = _gaps(ours, lambda i: i.rotate(degrees, Image.Resampling.NEAREST))
    assert (gaps > 0).mean() < 0.01


@pytest.mark.parametrize("degrees", [-30.5, 9.0, 77.0])
def test_bilinear_rotations_are_pillows_but_at_the_edge(degrees: float) -> None:
    """Pillow truncates, and repeats the pixels of an image's edge, which is blended with the fill
    here."""

    def ours(pixels: Array) -> Array:
        return paint.affine(pixels, paint.rotation(degrees, *pixels.shape[:2]), bilinear=True)

    picture = PICTURES[0]
    made = ours(np.array(picture)).astype(int)
    gaps = np.abs(made - np.asarray(picture.rotate(degrees, Image.Resampling.BILINEAR)))
    assert (gaps > 1).mean() < 0.05
    assert gaps.mean() < 2


@pytest.mark.parametrize("kernel", [(3, 3), (5, 9), (23, 23)])
@pytest.mark.parametrize("sigma", [0.1, 0.9, 2.0])
def test_blur_is_torchvisions_to_a_rounding(kernel: tuple[int, int], sigma: float) -> None:
    """Compared with torchvision.transforms.functional.gaussian_blur, by its formulas."""
    pixels = np.array(PICTURES[0])
    weights = []
    for size in kernel:
        half = (size - 1) * 0.5
        values = torch.exp(-0.5 * (torch.linspace(-half, half, size) / sigma) ** 2)
        weights.append(values / values.sum())
    square = torch.mm(weights[1][:, None], weights[0][None]).expand(3, 1, *kernel[::-1])
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    x, y = kernel[0] // 2, kernel[1] // 2
    padded = torch.nn.functional.pad(image, [x, x, y, y], mode="reflect")
    theirs = torch.nn.functional.conv2d(padded, square, groups=3).round()[0].permute(1, 2, 0)
    gaps = np.abs(paint.blur(pixels, kernel, sigma).astype(int) - theirs.numpy())
    assert gaps.max() <= 1
    assert gaps.mean() < 0.01


def test_images_of_one_channel_stay_so() -> None:
    gray = np.array(PICTURES[0])[..., :1]
    for made in (
        paint.brightness(gray, 0.5),
        paint.contrast(gray, 0.5),
        paint.saturation(gray, 0.5),
        paint.hue(gray, 0.3),
        paint.sharpness(gray, 0.5),
        paint.equalize(gray),
        paint.autocontrast(gray),
        paint.affine(gray, paint.rotation(30, *gray.shape[:2])),
        paint.blur(gray, (3, 3), 1.0),
        paint.flip(gray, 1),
        paint.grayscale(gray),
    ):
        assert made.shape == gray.shape
    assert math.isclose(float(paint.grayscale(gray).mean()), float(gray.mean()))
