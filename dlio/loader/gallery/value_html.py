"""Values of samples as HTML: pictures, volumes, plots, numbers and texts."""

import base64
import colorsys
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.image.decoder import opencv, shrunk
from dlio.loader.picture_targets import Target
from dlio.util.printable import as_html

_MOST_TEXT: Final = 400
_MOST_BYTES: Final = 32
_MOST_ITEMS: Final = 8
_DEEPEST: Final = 4
_LEAST_SIDE: Final = 8
"""Shorter arrays are shown as numbers."""
_MOST_SIDE: Final = 480
_COLOURS: Final = 255
_LETTERS: Final = 13
"""Height of letters on the screen, in pixels."""
_LEAST_SHOWN: Final = 160
"""Narrower pictures are enlarged."""
_QUALITY: Final = 85
_LEAST_JPEG: Final = 64
"""Shorter pictures are PNGs, whose pixels stay as they are."""
_GOLDEN: Final = 0.618034
_OPAQUE: Final = 120
_POINTS: Final = 240
"""Points of a plot, at most."""
_U8 = npt.NDArray[np.uint8]


# Arrays as data URIs, and SVG on top of them


def colour(number: int) -> str:
    """Return a colour for a class or an instance, far from those of its neighbours."""
    red, green, blue = (round(255 * part) for part in _rgb(number))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _rgb(number: int) -> tuple[float, float, float]:
    return colorsys.hls_to_rgb((number * _GOLDEN) % 1.0, 0.55, 0.85)


def picture_uri(pixels: _U8, most: int) -> str:
    """Return a picture as a data URI, shrunk to a longer side in pixels. Pixels are RGB of shape
    (height, width, 3), or grey values of shape (height, width)."""
    cv2 = opencv()
    sides = pixels.shape[:2]
    pixels = shrunk(np.ascontiguousarray(pixels), most / max(*sides, 1), cv2.INTER_AREA)
    if pixels.ndim == 3:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    if min(sides) < _LEAST_JPEG:
        return _encoded(".png", pixels, [])
    return _encoded(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])


def mask_uri(mask: _U8, most: int) -> str:
    """Return a mask as a data URI that is laid over a picture: 0 is clear, others have colours. Its
    numbers are those of classes or instances; shape (height, width)."""
    mask = shrunk(mask, most / max(*mask.shape, 1), opencv().INTER_NEAREST)
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


def outlines(
    boxes: npt.NDArray[np.float32],
    names: Sequence[str],
    numbers: Sequence[int],
    size: float,
    keypoints: npt.NDArray[np.float32] | None,
) -> list[str]:
    """Return the SVG of boxes, with names, and of keypoints.

    Boxes are left, top, right, bottom; `numbers` are those of their classes, for colours. Letters
    are `size` pixels of the picture high, and keypoints x, y, visibility; shape (n, k, 3).
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
                f'fill="{paint}">{as_html(names[k])}</text>'
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


def line_plot(values: npt.NDArray[np.generic]) -> str:
    """Return an SVG of values over their numbers, least and greatest of each stretch."""
    width, height = 280, 80
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


# Values


def shortened(text: str, most: int = _MOST_TEXT) -> str:
    """Return a text as HTML: escaped, on one line, shortened in its end."""
    if len(text) > most:
        return as_html(text[:most]) + f"&hellip; <i>({len(text):,} characters)</i>"
    return as_html(text)


def figure(
    pixels: npt.NDArray[np.generic],
    caption: str,
    companion: Any = None,
    classes: Sequence[str] = (),
    parts: Sequence[tuple[str, Sequence[float]]] = (),
) -> str:
    """Return a picture with its boxes, masks and keypoints drawn on top.

    Pixels of other types than uint8 are stretched over the greys. `companion` is a Target, a mask,
    or the number of a class; `parts` are marked: (name, (left, top, width, height)).
    """
    shown, note = stretched(pixels)
    height, width = shown.shape[:2]
    shown_px = max(min(width, _MOST_SIDE * width // max(height, width)), 1)
    shown_px *= -(-_LEAST_SHOWN // shown_px) if max(height, width) < _LEAST_SHOWN else 1
    letters = _LETTERS * width / shown_px
    layers = [f'<img src="{picture_uri(shown, _MOST_SIDE)}" alt="">']
    masks, drawn = _layers(companion, letters, classes)
    layers += [f'<img class="mask" src="{mask_uri(mask, _MOST_SIDE)}" alt="">' for mask in masks]
    for name, (left, top, across, down) in parts:
        drawn.append(
            f'<rect class="part" x="{left}" y="{top}" width="{across}" height="{down}"/>'
            f'<text class="part" x="{left + 0.3 * letters:.2f}" '
            f'y="{top + down - 0.4 * letters:.2f}" font-size="{letters:.2f}">{as_html(name)}</text>'
        )
    if drawn:
        inner = "".join(drawn)
        view = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
        layers.append(f"<svg {view}>{inner}</svg>")
    lines = [as_html(caption), f"{width} &times; {height}"]
    if note:
        lines.append(f"{as_html(str(pixels.dtype))}, {as_html(note)}")
    return (
        f'<figure><div class="stack" style="width:{shown_px}px">{"".join(layers)}</div>'
        f"<figcaption>{' &middot; '.join(lines)}</figcaption></figure>"
    )


def _layers(
    companion: Any, letters: float, classes: Sequence[str]
) -> tuple[list[npt.NDArray[np.uint8]], list[str]]:
    """Return (masks, SVG) of a picture's targets."""
    if isinstance(companion, torch.Tensor) and companion.ndim == 2:
        return [companion.numpy().astype(np.uint8)], []
    if not isinstance(companion, Target):
        return [], []
    masks = []
    if "mask" in companion:
        masks.append(companion["mask"].numpy())
    if "masks" in companion and len(companion["masks"]):
        own = np.zeros(len(companion["masks"]), np.int64)
        if "labels" in companion:
            own = companion["labels"].numpy()
        own = own % _COLOURS + 1  # As boxes are painted.
        stacked = companion["masks"].numpy() * own[:, None, None].astype(np.uint8)
        masks.append(stacked.max(axis=0))
    labels = companion.get("labels")
    numbers = [int(label) for label in labels] if labels is not None else []
    boxes = companion["boxes"].numpy()
    numbers = numbers or [0] * len(boxes)
    names = [_class_name(number, classes) for number in numbers] if labels is not None else []
    keypoints = companion["keypoints"].numpy() if "keypoints" in companion else None
    return masks, outlines(boxes, names or [""] * len(boxes), numbers, letters, keypoints)


def _class_name(number: int, classes: Sequence[str]) -> str:
    if 0 <= number < len(classes) and classes[number]:
        return classes[number]
    return str(number)


def rows_of(companion: Any, classes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, HTML) of the text below a picture."""
    if isinstance(companion, bool | int):
        return [("class", f"{_named(int(companion), classes)}")]
    if isinstance(companion, torch.Tensor):
        numbers = np.unique(companion.numpy()).tolist()
        shown = ", ".join(_named(int(number), classes) for number in numbers[:_MOST_ITEMS])
        return [("mask", shown + ("&hellip;" if len(numbers) > _MOST_ITEMS else ""))]
    if not isinstance(companion, Target):
        return []
    rows = [("boxes", f"{len(companion['boxes'])}")]
    if "labels" in companion:
        counts: dict[str, int] = {}
        for label in companion["labels"].tolist():
            name = _class_name(int(label), classes)
            counts[name] = counts.get(name, 0) + 1
        top = sorted(counts.items(), key=lambda item: -item[1])
        shown = ", ".join(
            shortened(name, 60) + (f" &times;{n}" if n > 1 else "") for name, n in top[:_MOST_ITEMS]
        )
        rows[0] = ("boxes", f"{rows[0][1]}: {shown}" if shown else rows[0][1])
    special = ("boxes", "labels", "masks", "mask", "keypoints")
    rows += [(name, value_html(value)) for name, value in companion.items() if name not in special]
    return rows


def _named(number: int, classes: Sequence[str]) -> str:
    name = _class_name(number, classes)
    return str(number) if name == str(number) else f"{shortened(name, 80)} <i>({number})</i>"


def value_html(value: Any, depth: int = 0) -> str:
    """Return any value of a sample as HTML."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        plain = plain.float() if plain.dtype == torch.bfloat16 else plain
        return _array_html(plain.cpu().numpy())
    if isinstance(value, np.ndarray):
        return _array_html(value)
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:_MOST_BYTES]).hex(" ")
        more = "&hellip;" if len(value) > _MOST_BYTES else ""
        return f"<code>{head}{more}</code> <i>({len(value):,} bytes)</i>"
    if isinstance(value, dict | list | tuple) and depth < _DEEPEST:
        return _nested_html(value, depth)
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(str(value))


def _nested_html(value: Any, depth: int) -> str:
    try:
        return f"<code>{shortened(json.dumps(value, ensure_ascii=False))}</code>"
    except (TypeError, ValueError, RecursionError):
        pass  # Tensors in it, for example.
    rows = named_values(value, depth + 1, _MOST_ITEMS)
    more = f"<i>and {len(value) - _MOST_ITEMS:,} more</i>" if len(value) > _MOST_ITEMS else ""
    return f"<table>{rows}</table>{more}"


def named_values(value: Any, depth: int = 0, most: int | None = None) -> str:
    """Return the items of a dictionary or a list as rows of a table: names or numbers, and
    values."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return "".join(
        f"<tr><th>{shortened(str(key), 60)}</th><td>{value_html(item, depth)}</td></tr>"
        for key, item in items[:most]
    )


def _array_html(array: npt.NDArray[Any]) -> str:
    """Return an array as a picture, slices of a volume, a plot, or its numbers."""
    kind = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
    if array.ndim == 0:
        return shortened(str(array[()]))
    if array.dtype.kind not in "biufc" or not array.size:
        return f"<code>{as_html(kind)}</code>"
    image = _as_image(array)
    if image is not None:
        return figure(image, kind)
    if array.ndim >= 3 and min(array.shape[-3:]) >= 2 and max(array.shape[-3:]) >= _LEAST_SIDE:
        return _slices(array.reshape(-1, *array.shape[-3:])[0], kind)
    if array.ndim == 1 and len(array) > _MOST_ITEMS:
        _, note = stretched(np.asarray(array, np.float64) if array.dtype.kind != "c" else array)
        return f"{line_plot(array)}<br><i>{as_html(kind)}, {as_html(note)}</i>"
    text = np.array2string(array, precision=4, threshold=64, edgeitems=3, separator=", ")
    return f"<code>{shortened(' '.join(text.split()))}</code> <i>({as_html(kind)})</i>"


def _as_image(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return an array as a picture of shape (height, width) or (height, width, 3); None if it is
    not one."""
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    return array if fits and min(array.shape[:2]) >= _LEAST_SIDE else None


def _slices(volume: npt.NDArray[Any], kind: str) -> str:
    """Return the middle slices of a volume along its three axes."""
    figures = []
    for axis, count in enumerate(volume.shape):
        middle = np.take(volume, count // 2, axis=axis)
        figures.append(figure(middle, f"axis {axis}, slice {count // 2} of {count}"))
    return f"<div class='row'>{''.join(figures)}</div><i>{as_html(kind)}</i>"
