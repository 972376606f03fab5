"""`crop_batch` as one Triton kernel: a program makes some pixels of one image.

The arithmetic is that of the form in torch's operations (`crops`), number for number. Floats are
therefore not multiplied and added in one step.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from dlio.image.device.normal import Normal

__all__ = ["crop"]

_BLOCK: Final = 256
"""Pixels of one program."""
_EVEN: Final = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a float32 and subtracted again, it rounds to the nearest even integer."""


def crop(
    pixels: torch.Tensor,
    images: torch.Tensor,
    boxes: torch.Tensor,
    out: torch.Tensor,
    normal: Normal | None,
) -> None:
    """Launch the kernel on the current stream; arguments as for `crop_batch`, which checks them.

    Args:
        out: shape (n, height, width, 3), contiguous.
    """
    count, height, width = out.shape[:3]
    mean, std = ([0.0] * 3, [1.0] * 3) if normal is None else normal.scaled()
    grid = (count, triton.cdiv(height * width, _BLOCK))
    options = {"IS_NORMAL": normal is not None, "BLOCK": _BLOCK, "enable_fp_fusion": False}
    _kernel[grid](pixels, images, boxes, out, height, width, *mean, *std, **options)


def _crops(
    pixels: tl.tensor,
    images: tl.tensor,
    boxes: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    mean_red: tl.tensor,
    mean_green: tl.tensor,
    mean_blue: tl.tensor,
    std_red: tl.tensor,
    std_green: tl.tensor,
    std_blue: tl.tensor,
    IS_NORMAL: tl.constexpr,  # noqa: N803 (Triton's convention for constants)
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    y, x = place // width, place % width
    columns = tl.load(images + 3 * image + 2)
    top, left = tl.load(boxes + 6 * image), tl.load(boxes + 6 * image + 1)
    high, wide = tl.load(boxes + 6 * image + 2), tl.load(boxes + 6 * image + 3)
    flip, upend = tl.load(boxes + 6 * image + 4), tl.load(boxes + 6 * image + 5)
    x = tl.where(flip != 0, width - 1 - x, x)
    y = tl.where(upend != 0, height - 1 - y, y)
    begin = tl.load(images + 3 * image) + 3 * (top * columns + left)
    red = tl.full([BLOCK], 0, tl.int32)
    green = tl.full([BLOCK], 0, tl.int32)
    blue = tl.full([BLOCK], 0, tl.int32)
    if high > 0:
        if (high >= 2 * height) & (wide >= 2 * width):
            # Sums of what a pixel covers, in units of 1 / (height * width) of a pixel.
            reds = tl.full([BLOCK], 0, tl.int64)
            greens = tl.full([BLOCK], 0, tl.int64)
            blues = tl.full([BLOCK], 0, tl.int64)
            for row in range(high // height + 2):
                from_row = y * high // height + row
                end = tl.minimum((from_row + 1) * height, (y + 1) * high)
                rows = tl.maximum(end - tl.maximum(from_row * height, y * high), 0)
                row_red = tl.full([BLOCK], 0, tl.int32)
                row_green = tl.full([BLOCK], 0, tl.int32)
                row_blue = tl.full([BLOCK], 0, tl.int32)
                for column in range(wide // width + 2):
                    from_column = x * wide // width + column
                    last = tl.minimum((from_column + 1) * width, (x + 1) * wide)
                    some = tl.maximum(last - tl.maximum(from_column * width, x * wide), 0)
                    at = pixels + begin + 3 * (from_row * columns + from_column)
                    used = inside & (rows > 0) & (some > 0)
                    row_red += tl.load(at, mask=used, other=0).to(tl.int32) * some
                    row_green += tl.load(at + 1, mask=used, other=0).to(tl.int32) * some
                    row_blue += tl.load(at + 2, mask=used, other=0).to(tl.int32) * some
                reds += row_red.to(tl.int64) * rows
                greens += row_green.to(tl.int64) * rows
                blues += row_blue.to(tl.int64) * rows
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
            p00 = pixels + begin + 3 * (y0 * columns + x0)
            p01 = pixels + begin + 3 * (y0 * columns + x1)
            p10 = pixels + begin + 3 * (y1 * columns + x0)
            p11 = pixels + begin + 3 * (y1 * columns + x1)
            for channel in tl.static_range(3):
                above = tl.load(p00 + channel, mask=inside, other=0).to(tl.int32) * left_weight
                above += tl.load(p01 + channel, mask=inside, other=0).to(tl.int32) * right_weight
                below = tl.load(p10 + channel, mask=inside, other=0).to(tl.int32) * left_weight
                below += tl.load(p11 + channel, mask=inside, other=0).to(tl.int32) * right_weight
                mixed = ((above >> 4) * upper_weight >> 16) + ((below >> 4) * lower_weight >> 16)
                mixed = tl.minimum(tl.maximum((mixed + 2) >> 2, 0), 255)
                if channel == 0:
                    red = mixed
                elif channel == 1:
                    green = mixed
                else:
                    blue = mixed
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
