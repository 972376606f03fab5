"""The parts that crops take, of many images at a time. Pure."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.image.crop import DRAWS, FLIP, LEFT, TOP, TRIES, UPEND, Crop

NUMBERS: Final = 6
"""Numbers of a box: top, left, height, width, flip, upend."""
_F64 = npt.NDArray[np.float64]
_I64 = npt.NDArray[np.int64]


def boxes_of(crop: Crop, heights: _I64, widths: _I64, uniforms: _F64) -> npt.NDArray[np.int32]:
    """Return the parts that `crop.boxes` gives for each image; shape (n, crops, 6).

    0.5 µs a box, in place of 2.6 µs one after another.

    Args:
        heights, widths: of the images, in pixels; shape (n,).
        uniforms: numbers in [0, 1); shape (n, crops x DRAWS), in training.
    """
    count = len(heights)
    if not crop.train:
        whole = [crop.box(height, width, ()) for height, width in _sides(heights, widths)]
        numbers = [[box.top, box.left, box.height, box.width, 0, 0] for box in whole]
        middle = np.array(numbers, np.int32).reshape(count, 1, NUMBERS)
        return np.repeat(middle, crop.crops, axis=1)
    drawn = uniforms.reshape(count * crop.crops, DRAWS)
    rows, columns = (np.repeat(sides, crop.crops) for sides in (heights, widths))
    boxes = np.empty((len(drawn), NUMBERS), np.int32)
    boxes[:, 4] = drawn[:, FLIP] < crop.flip
    boxes[:, 5] = drawn[:, UPEND] < crop.upend
    left = np.arange(len(drawn))
    (smallest, largest), (low, high) = crop.scale, map(math.log, crop.ratio)
    for k in range(TRIES):
        own, height, width = drawn[left], rows[left], columns[left]
        target = height * width * (smallest + (largest - smallest) * own[:, 2 * k])
        logs = low + (high - low) * own[:, 2 * k + 1]
        # numpy's exp may differ in the last bit.
        ratio = np.array([math.exp(each) for each in logs.tolist()])
        w, h = np.rint(np.sqrt(target * ratio)), np.rint(np.sqrt(target / ratio))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        h, w, chosen = h[fits], w[fits], left[fits]
        boxes[chosen, 0] = own[fits, TOP] * (height[fits] - h + 1)
        boxes[chosen, 1] = own[fits, LEFT] * (width[fits] - w + 1)
        boxes[chosen, 2], boxes[chosen, 3] = h, w
        left = left[~fits]
        if not len(left):
            break
    for k in left.tolist():
        box = crop.box(int(rows[k]), int(columns[k]), drawn[k].tolist())
        boxes[k, :4] = box.top, box.left, box.height, box.width
    return boxes.reshape(count, crop.crops, NUMBERS)


def _sides(heights: _I64, widths: _I64) -> list[tuple[int, int]]:
    return list(zip(heights.tolist(), widths.tolist(), strict=True))
