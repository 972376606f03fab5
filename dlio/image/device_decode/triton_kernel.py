"""`crop_batch` as one Triton kernel: a program makes some pixels of one image.

The arithmetic is that of the form in torch's operations (`crops`), number for number. Floats are
therefore not multiplied and added in one step.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from dlio.image.tensors import Normalize

_BLOCK: Final = 256
"""Pixels of one program."""
_EVEN: Final = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a float32 and subtracted again, it rounds to the nearest even integer."""


def crop(
    pixels: torch.Tensor,
    images: torch.Tensor,
    boxes: torch.Tensor,
    factors: torch.Tensor | None,
    out: torch.Tensor,
    normal: Normalize | None,
) -> None:
    """Launch the kernel on the current stream; arguments as for `crop_batch`, which checks them.
    `out` has shape (n, height, width, 3), and is contiguous."""
    count, height, width = out.shape[:3]
    mean, std = ([0.0] * 3, [1.0] * 3) if normal is None else normal.scaled()
    grid = (count, triton.cdiv(height * width, _BLOCK))
    options = {
        "HAS_FACTORS": factors is not None,
        "IS_NORMAL": normal is not None,
        "BLOCK": _BLOCK,
        "enable_fp_fusion": False,
    }
    given = boxes if factors is None else factors
    _kernel[grid](pixels, images, boxes, given, out, height, width, *mean, *std, **options)


def _pixel(
    image: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    factor: tl.tensor,
    used: tl.tensor,
) -> tl.tensor:
    """Pixels of an image that is shrunk by a factor: (red, green, blue), int32."""
    red = row * 0
    green = row * 0
    blue = row * 0
    for down in range(factor):
        y = tl.minimum(row * factor + down, rows - 1)
        for right in range(factor):
            x = tl.minimum(column * factor + right, columns - 1)
            at = image + 3 * (y.to(tl.int64) * columns + x)
            red += tl.load(at, mask=used, other=0).to(tl.int32)
            green += tl.load(at + 1, mask=used, other=0).to(tl.int32)
            blue += tl.load(at + 2, mask=used, other=0).to(tl.int32)
    area = factor * factor
    half = area // 2
    return (red + half) // area, (green + half) // area, (blue + half) // area


_one: Any = triton.jit(_pixel)


def _crops(
    pixels: tl.tensor,
    images: tl.tensor,
    boxes: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    mean_red: tl.tensor,
    mean_green: tl.tensor,
    mean_blue: tl.tensor,
    std_red: tl.tensor,
    std_green: tl.tensor,
    std_blue: tl.tensor,
    HAS_FACTORS: tl.constexpr,  # noqa: N803 (Triton's convention for constants)
    IS_NORMAL: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    y, x = place // width, place % width
    rows = tl.load(images + 3 * image + 1).to(tl.int32)
    columns = tl.load(images + 3 * image + 2).to(tl.int32)
    factor = tl.full([], 1, tl.int32)
    if HAS_FACTORS:
        factor = tl.load(factors + image)
    top, left = tl.load(boxes + 6 * image), tl.load(boxes + 6 * image + 1)
    high, wide = tl.load(boxes + 6 * image + 2), tl.load(boxes + 6 * image + 3)
    flip, upend = tl.load(boxes + 6 * image + 4), tl.load(boxes + 6 * image + 5)
    x = tl.where(flip != 0, width - 1 - x, x)
    y = tl.where(upend != 0, height - 1 - y, y)
    begin = pixels + tl.load(images + 3 * image)
    red = tl.full([BLOCK], 0, tl.int32)
    green = tl.full([BLOCK], 0, tl.int32)
    blue = tl.full([BLOCK], 0, tl.int32)
    if high > 0:
        if (high >= 2 * height) & (wide >= 2 * width):
            # Sums of the area under a pixel, in units of 1 / (height * width) of a pixel.
            reds = tl.full([BLOCK], 0, tl.int64)
            greens = tl.full([BLOCK], 0, tl.int64)
            blues = tl.full([BLOCK], 0, tl.int64)
            for row in range(high // height + 2):
                from_row = y * high // height + row
                end = tl.minimum((from_row + 1) * height, (y + 1) * high)
                many = tl.maximum(end - tl.maximum(from_row * height, y * high), 0)
                row_red = tl.full([BLOCK], 0, tl.int32)
                row_green = tl.full([BLOCK], 0, tl.int32)
                row_blue = tl.full([BLOCK], 0, tl.int32)
                for column in range(wide // width + 2):
                    from_column = x * wide // width + column
                    last = tl.minimum((from_column + 1) * width, (x + 1) * wide)
                    some = tl.maximum(last - tl.maximum(from_column * width, x * wide), 0)
                    used = inside & (many > 0) & (some > 0)
                    one_red, one_green, one_blue = _one(
                        begin, top + from_row, left + from_column, rows, columns, factor, used
                    )
                    row_red += one_red * some
                    row_green += one_green * some
                    row_blue += one_blue * some
                reds += row_red.to(tl.int64) * many
                greens += row_green.to(tl.int64) * many
                blues += row_blue.to(tl.int64) * many
            area = high.to(tl.int64) * wide
            red = ((2 * reds + area) // (2 * area)).to(tl.int32)
            green = ((2 * greens + area) // (2 * area)).to(tl.int32)
            blue = ((2 * blues + area) // (2 * area)).to(tl.int32)
        else:
            across = 1.0 / (width.to(tl.float64) / wide.to(tl.float64))
            at_x = ((x.to(tl.float64) + 0.5) * across - 0.5).to(tl.float32)
            floor_x = tl.floor(at_x)
            at_x = at_x - floor_x
            first_x = floor_x.to(tl.int32)
            is_edge = (first_x < 0) | (first_x >= wide - 1)
            at_x = tl.where(is_edge, 0.0, at_x)
            x0 = tl.minimum(tl.maximum(first_x, 0), wide - 1)
            x1 = tl.minimum(x0 + 1, wide - 1)
            left_weight = (((1.0 - at_x) * 2048 + _EVEN) - _EVEN).to(tl.int32)
            right_weight = ((at_x * 2048 + _EVEN) - _EVEN).to(tl.int32)
            down = 1.0 / (height.to(tl.float64) / high.to(tl.float64))
            at_y = ((y.to(tl.float64) + 0.5) * down - 0.5).to(tl.float32)
            floor_y = tl.floor(at_y)
            at_y = at_y - floor_y
            first_y = floor_y.to(tl.int32)
            y0 = tl.minimum(tl.maximum(first_y, 0), high - 1)
            y1 = tl.minimum(tl.maximum(first_y + 1, 0), high - 1)
            upper_weight = (((1.0 - at_y) * 2048 + _EVEN) - _EVEN).to(tl.int32)
            lower_weight = ((at_y * 2048 + _EVEN) - _EVEN).to(tl.int32)
            for k in tl.static_range(2):
                source = top + (y0 if k == 0 else y1)
                weight = upper_weight if k == 0 else lower_weight
                r0, g0, b0 = _one(begin, source, left + x0, rows, columns, factor, inside)
                r1, g1, b1 = _one(begin, source, left + x1, rows, columns, factor, inside)
                red += (((r0 * left_weight + r1 * right_weight) >> 4) * weight) >> 16
                green += (((g0 * left_weight + g1 * right_weight) >> 4) * weight) >> 16
                blue += (((b0 * left_weight + b1 * right_weight) >> 4) * weight) >> 16
            red = tl.minimum(tl.maximum((red + 2) >> 2, 0), 255)
            green = tl.minimum(tl.maximum((green + 2) >> 2, 0), 255)
            blue = tl.minimum(tl.maximum((blue + 2) >> 2, 0), 255)
    to = out + 3 * (image.to(tl.int64) * height * width + place)
    if IS_NORMAL:
        made_red = tl.div_rn(red.to(tl.float32) - mean_red, std_red)
        made_green = tl.div_rn(green.to(tl.float32) - mean_green, std_green)
        made_blue = tl.div_rn(blue.to(tl.float32) - mean_blue, std_blue)
        tl.store(to, made_red.to(out.dtype.element_ty), mask=inside)
        tl.store(to + 1, made_green.to(out.dtype.element_ty), mask=inside)
        tl.store(to + 2, made_blue.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(to, red.to(tl.uint8), mask=inside)
        tl.store(to + 1, green.to(tl.uint8), mask=inside)
        tl.store(to + 2, blue.to(tl.uint8), mask=inside)


_kernel: Any = triton.jit(_crops, do_not_specialize=["height", "width"])
