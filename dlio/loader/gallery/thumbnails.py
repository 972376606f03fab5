"""Arrays as pictures in a page: data URIs, and SVG on top of them."""

import base64
import colorsys
from collections.abc import Sequence
from html import escape
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.image.decoder import opencv
from dlio.util.printable import printable

_QUALITY: Final = 85
_LEAST_JPEG: Final = 64
"""Shorter pictures are PNGs, whose pixels stay as they are."""
_GOLDEN: Final = 0.618034
_OPAQUE: Final = 120
_POINTS: Final = 240
"""Points of a plot, at most."""
_U8 = npt.NDArray[np.uint8]


def colour(number: int) -> str:
    """Return a colour for a class or an instance, far from those of its neighbours."""
    red, green, blue = (round(255 * part) for part in _rgb(number))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _rgb(number: int) -> tuple[float, float, float]:
    return colorsys.hls_to_rgb((number * _GOLDEN) % 1.0, 0.55, 0.85)


def picture_uri(pixels: _U8, most: int) -> str:
    """Return a picture as a data URI, shrunk to a longer side in pixels.

    Args:
        pixels: RGB of shape (height, width, 3), or grey values of shape (height, width).
    """
    cv2 = opencv()
    height, width = pixels.shape[:2]
    scale = most / max(height, width, 1)
    pixels = np.ascontiguousarray(pixels)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    if pixels.ndim == 3:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    if min(height, width) < _LEAST_JPEG:
        return _encoded(".png", pixels, [])
    return _encoded(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])


def mask_uri(mask: _U8, most: int) -> str:
    """Return a mask as a data URI that is laid over a picture: 0 is clear, others have colours.

    Args:
        mask: numbers of classes or instances; shape (height, width).
    """
    cv2 = opencv()
    scale = most / max(*mask.shape, 1)
    if scale < 1:
        size = (max(1, round(mask.shape[1] * scale)), max(1, round(mask.shape[0] * scale)))
        mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
    table = np.zeros((256, 4), np.uint8)
    for number in np.unique(mask).tolist():
        if number:
            red, green, blue = (round(255 * part) for part in _rgb(number))
            table[number] = blue, green, red, _OPAQUE
    return _encoded(".png", table[mask], [])


def _encoded(extension: str, pixels: _U8, options: list[int]) -> str:
    done, data = opencv().imencode(extension, pixels, options)
    if not done:
        raise ValueError(f"OpenCV cannot encode {pixels.shape}")
    kind = "jpeg" if extension == ".jpg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data.tobytes()).decode('ascii')}"


def stretched(values: npt.NDArray[np.generic]) -> tuple[_U8, str]:
    """Return (values as 0 to 255, a note on what 0 and 255 stand for).

    uint8 values stay as they are, and the note is empty then. Values that are not finite are 0.
    """
    if values.dtype == np.uint8:
        return np.asarray(values, np.uint8), ""
    floats = _real(values)
    finite = np.isfinite(floats)
    if not finite.any():
        return np.zeros(floats.shape, np.uint8), "no finite value"
    low, high = float(floats[finite].min()), float(floats[finite].max())
    scaled = (np.where(finite, floats, low) - low) / ((high - low) or 1.0)
    left = int(floats.size - finite.sum())
    note = f"{low:.4g} to {high:.4g}" + (f", {left:,} not finite" if left else "")
    return np.asarray(np.round(255 * scaled), np.uint8), note


def _real(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    plain: npt.ArrayLike = np.abs(values) if np.iscomplexobj(values) else values
    return np.asarray(plain, np.float64)


def svg_over(height: int, width: int, parts: Sequence[str]) -> str:
    """Return an SVG that lies over a picture, in the picture's pixels."""
    if not parts:
        return ""
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none">{inner}</svg>'


def outlines(
    boxes: npt.NDArray[np.float32],
    names: Sequence[str],
    numbers: Sequence[int],
    size: float,
    keypoints: npt.NDArray[np.float32] | None,
) -> list[str]:
    """Return the SVG of boxes, with names, and of keypoints.

    Args:
        boxes: left, top, right, bottom; shape (n, 4).
        names: of each box.
        numbers: of the class of each box, for its colour.
        size: height of letters, in pixels of the picture.
        keypoints: x, y, visibility; shape (n, k, 3).
    """
    parts = []
    for k, (left, top, right, bottom) in enumerate(boxes.tolist()):
        paint = colour(numbers[k] % 255 + 1)
        parts.append(
            f'<g class="box"><rect x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" '
            f'height="{bottom - top:.2f}" stroke="{paint}"/>'
        )
        if names[k]:
            # Within the picture, also for a box at its top.
            at = top - 0.3 * size if top > 1.3 * size else top + size
            parts.append(
                f'<text x="{left + 0.2 * size:.2f}" y="{at:.2f}" font-size="{size:.2f}" '
                f'fill="{paint}">{escape(printable(names[k]))}</text>'
            )
        parts.append("</g>")
        for x, y, seen in keypoints[k].tolist() if keypoints is not None else ():
            if seen > 0:
                fill = paint if seen > 1 else "none"
                parts.append(
                    f'<circle class="keypoint" cx="{x:.2f}" cy="{y:.2f}" '
                    f'r="{0.25 * size:.2f}" fill="{fill}" stroke="{paint}"/>'
                )
    return parts


def line_plot(values: npt.NDArray[np.generic], width: int = 280, height: int = 80) -> str:
    """Return an SVG of values over their numbers, least and greatest of each stretch.

    Args:
        values: numbers; shape (n,).
    """
    floats = _real(values)
    floats = floats[np.isfinite(floats)]
    if not len(floats):
        return ""
    if len(floats) > _POINTS:
        stretches = np.array_split(floats, _POINTS // 2)
        floats = np.array([edge(each) for each in stretches for edge in (np.min, np.max)])
    low, high = float(floats.min()), float(floats.max())
    x = np.linspace(2, width - 2, len(floats)) if len(floats) > 1 else np.array([width / 2])
    y = height - 4 - (floats - low) / ((high - low) or 1.0) * (height - 8)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<polyline points="{points}"/></svg>'
    )
