"""Operations on pixels, by Pillow's definitions.

Images are uint8 arrays of shape (height, width, 3) in RGB, or (height, width, 1). Each function
returns another array of the same shape, or the image itself where nothing changes. OpenCV does the
work and releases the GIL.

Tables (brightness, contrast, posterize, solarize, equalize, autocontrast, invert) and sharpness are
Pillow's results exactly, or differ by 1 where OpenCV rounds luminance another way. Nearest
neighbours of a rotation differ from Pillow's in some pixels of a thousand, where the centre of a
pixel falls on an edge. Hue is computed in floats, as torchvision does for tensors, and differs from
that by at most 1; Pillow, which has hue in 8 bits, differs from both by up to 16.
Source: PIL.ImageEnhance, PIL.ImageOps, torchvision.transforms.functional.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.image.decoder import opencv

Pixels = npt.NDArray[np.uint8]

_VALUES: Final = np.arange(256)
_TRUNCATED: Final = -0.499
"""Added before OpenCV rounds, this gives the truncation of Pillow's blending."""
_TIE: Final = 2.0**-11
"""Pixels; OpenCV's coordinates have 10 bits behind the point."""
_SMOOTH: Final = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


def brightness(pixels: Pixels, factor: float) -> Pixels:
    """Multiply by a factor: 0 is black, 1 the image itself."""
    return _looked_up(pixels, _blended(0, factor))


def contrast(pixels: Pixels, factor: float) -> Pixels:
    """Blend with the mean luminance: 0 is gray, 1 the image itself."""
    return _looked_up(pixels, _blended(int(_luminance(pixels).mean() + 0.5), factor))


def saturation(pixels: Pixels, factor: float) -> Pixels:
    """Blend with the luminance of each pixel: 0 is gray, 1 the image itself."""
    if pixels.shape[2] == 1:
        return pixels
    cv2 = opencv()
    gray = cv2.cvtColor(_luminance(pixels), cv2.COLOR_GRAY2RGB)
    return _shaped(cv2.addWeighted(pixels, factor, gray, 1 - factor, _TRUNCATED), pixels)


def hue(pixels: Pixels, shift: float) -> Pixels:
    """Turn the hue by a part of the whole circle, from -0.5 to 0.5."""
    if pixels.shape[2] == 1:
        return pixels
    cv2 = opencv()
    turned = cv2.cvtColor(pixels.astype(np.float32), cv2.COLOR_RGB2HSV)  # Hue in degrees.
    degrees = turned[..., 0]
    degrees += np.float32(shift * 360)
    degrees[degrees >= 360] -= 360
    degrees[degrees < 0] += 360
    made = cv2.cvtColor(turned, cv2.COLOR_HSV2RGB)
    return _shaped(np.rint(made, out=made).astype(np.uint8), pixels)


def sharpness(pixels: Pixels, factor: float) -> Pixels:
    """Blend with a smoothed image: 0 is smooth, 1 the image itself, 2 sharper."""
    if min(pixels.shape[:2]) <= 2:
        return pixels
    cv2 = opencv()
    smooth = _shaped(cv2.filter2D(pixels, -1, _SMOOTH), pixels)
    for edge in (np.s_[:1], np.s_[-1:], np.s_[:, :1], np.s_[:, -1:]):
        smooth[edge] = pixels[edge]
    return _shaped(cv2.addWeighted(pixels, factor, smooth, 1 - factor, _TRUNCATED), pixels)


def posterize(pixels: Pixels, bits: int) -> Pixels:
    """Keep the highest bits of each value."""
    return _looked_up(pixels, _VALUES & (0xFF << (8 - bits) & 0xFF))


def solarize(pixels: Pixels, threshold: float) -> Pixels:
    """Invert the values from a threshold on."""
    return _looked_up(pixels, np.where(threshold > _VALUES, _VALUES, 255 - _VALUES))


def invert(pixels: Pixels) -> Pixels:
    """Subtract from 255."""
    return _looked_up(pixels, 255 - _VALUES)


def grayscale(pixels: Pixels) -> Pixels:
    """Replace each pixel by its luminance, in as many channels."""
    if pixels.shape[2] == 1:
        return pixels
    cv2 = opencv()
    return _shaped(cv2.cvtColor(_luminance(pixels), cv2.COLOR_GRAY2RGB), pixels)


def autocontrast(pixels: Pixels) -> Pixels:
    """Stretch each channel to 0 to 255."""
    tables = []
    for counts in _histograms(pixels):
        used = np.flatnonzero(counts)
        low, high = int(used[0]), int(used[-1])
        if high <= low:
            tables.append(_VALUES)
            continue
        scale = 255.0 / (high - low)
        tables.append(np.clip((_VALUES * scale - low * scale).astype(np.int64), 0, 255))
    return _looked_up(pixels, *tables)


def equalize(pixels: Pixels) -> Pixels:
    """Make each channel's histogram uniform."""
    tables = []
    for counts in _histograms(pixels):
        used = counts[counts > 0]
        step = (int(used.sum()) - int(used[-1])) // 255
        if len(used) <= 1 or not step:
            tables.append(_VALUES)
            continue
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        tables.append(np.clip((step // 2 + before) // step, 0, 255))
    return _looked_up(pixels, *tables)


def blur(pixels: Pixels, kernel: Sequence[int], sigma: float) -> Pixels:
    """Convolve with a Gaussian of `sigma` pixels, mirrored at the edges; `kernel` is (width,
    height) in pixels, odd."""
    cv2 = opencv()
    across, down = (_gaussian(size, sigma) for size in kernel)
    made = cv2.sepFilter2D(pixels, -1, across, down, borderType=cv2.BORDER_REFLECT_101)
    return _shaped(made, pixels)


def rotation(degrees: float, height: int, width: int) -> tuple[float, ...]:
    """Return the matrix for `affine` of a turn about the image's centre, against the clock."""
    turn = -math.radians(degrees)
    a, b, d, e = math.cos(turn), math.sin(turn), -math.sin(turn), math.cos(turn)
    x, y = width / 2, height / 2
    return a, b, x - a * x - b * y, d, e, y - d * x - e * y


def affine(
    pixels: Pixels,
    matrix: Sequence[float],
    fill: Sequence[float] = (0.0,),
    bilinear: bool = False,
) -> Pixels:
    """Fetch each pixel (x, y) of the result from (a x + b y + c, d x + e y + f) of the image.

    Pixels have their centres at a half. `fill` has the values of pixels from outside of the image,
    one or one per channel. With `bilinear`, four pixels are interpolated; otherwise the nearest one
    is taken.
    """
    cv2 = opencv()
    a, b, c, d, e, f = matrix
    # OpenCV's pixels have whole coordinates. It rounds where Pillow rounds down from their middle,
    # and would decide ties by chance.
    x, y = c + (a + b - 1) / 2, f + (d + e - 1) / 2
    if not bilinear:
        x, y = x + _TIE, y + _TIE
    whole = np.array([[a, b, x], [d, e, y]])
    made = cv2.warpAffine(
        pixels,
        whole,
        pixels.shape[1::-1],
        flags=cv2.WARP_INVERSE_MAP | (cv2.INTER_LINEAR if bilinear else cv2.INTER_NEAREST),
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=tuple(fill) * (3 if len(fill) == 1 else 1),
    )
    return _shaped(made, pixels)


def flip(pixels: Pixels, axis: int) -> Pixels:
    """Exchange left and right (axis 1), or top and bottom (axis 0)."""
    return _shaped(opencv().flip(pixels, axis), pixels)


def _blended(value: int, factor: float) -> npt.NDArray[np.int64]:
    """Table of a blend of each value with a constant one; Pillow computes in single precision."""
    single = np.float32(value) + np.float32(factor) * (_VALUES - value).astype(np.float32)
    table: npt.NDArray[np.int64] = np.clip(single, 0, 255).astype(np.int64)
    return table


def _luminance(pixels: Pixels) -> Pixels:
    """ITU-R 601-2 luma; shape (height, width)."""
    if pixels.shape[2] == 1:
        return pixels[..., 0]
    cv2 = opencv()
    gray: Pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return gray


def _histograms(pixels: Pixels) -> list[npt.NDArray[np.int64]]:
    """Counts of the values of each channel; shape (256,)."""
    cv2 = opencv()
    return [
        cv2.calcHist([pixels], [channel], None, [256], [0, 256]).reshape(-1).astype(np.int64)
        for channel in range(pixels.shape[2])
    ]


def _looked_up(pixels: Pixels, *tables: npt.NDArray[Any]) -> Pixels:
    """Replace values by a table of all channels, or one of each."""
    table = np.stack([table.astype(np.uint8) for table in tables], axis=-1)
    table = table[:, 0] if len(tables) == 1 else table[:, None]
    return _shaped(opencv().LUT(pixels, table), pixels)


def _shaped(made: Pixels, pixels: Pixels) -> Pixels:
    """Give an image of one channel its last axis back, which OpenCV drops."""
    return made.reshape(pixels.shape)


def _gaussian(size: int, sigma: float) -> npt.NDArray[np.float64]:
    values = np.exp(-0.5 * ((np.arange(size) - (size - 1) / 2) / sigma) ** 2)
    weights: npt.NDArray[np.float64] = values / values.sum()
    return weights
