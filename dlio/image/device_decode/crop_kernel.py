"""Crop, resize, mirror and normalise a batch of decoded images, on the device where they lie.

Resizing follows the rules of the CPU decoder (`dlio.image.decoder`): linear with half-pixel
centres,
and the mean of the area that a pixel covers where both sides shrink by 2 or more. In place of the
CPU's decoding at a half, a quarter or an eighth, an image can be shrunk to the means of its blocks
of 2, 4 or 8 pixels a side first.

- linear: the fixed-point arithmetic of OpenCV's INTER_LINEAR for 8 bits, with its pixels.
- area: exact sums in integers, rounded half up. OpenCV's INTER_AREA sums in float32; the results
  differ by at most 1 of 255.

There are two forms with the same pixels: one Triton kernel a batch for CUDA (torch's wheels for
CUDA bring Triton), and operations of torch for every other device. Tests compare both with OpenCV.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Final

import torch

from dlio.errors import UsageError
from dlio.image.crop import NUMBERS
from dlio.image.tensors import Normalize

IMAGE: Final = 3
"""Numbers of an image: first byte, height, width."""
FACTORS: Final = (1, 2, 4, 8)
"""By which an image can be shrunk first."""
_MOST_SIDE: Final = 32767
"""Largest side of a crop: areas are counted in 1 / (its side), in 32 bits."""


def crop_batch(
    pixels: torch.Tensor,
    images: torch.Tensor,
    boxes: torch.Tensor,
    size: tuple[int, int],
    out: torch.Tensor | None = None,
    normal: Normalize | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cut a crop out of each image of a batch, and resize it.

    On CUDA with Triton this is one kernel, whose launch depends on shapes alone and which reads no
    number on the host: a CUDA graph can hold it. Without Triton, boxes are read on the host.

    Args:
        pixels: uint8, flat: RGB images, interleaved, one after another in any order.
        images: int64, shape (n, 3): first byte in `pixels`, height, width.
        boxes: int32, shape (n, 6): top, left, height, width, flip (exchange left and right), upend
            (exchange top and bottom). They lie within their images. A box of height 0 gives a
            black crop, for rows of a batch that are not used.
        size: (height, width) of the crops.
        out: memory for the result, shape (n, 3, height, width) in channels-last memory.
        normal: None for uint8 pixels.
        factors: int32, shape (n,): 1, 2, 4 or 8. Each image is shrunk by its factor first, to the
            means of blocks of pixels, of which the last row and column may reach beyond its edge
            (which is repeated); its box is in pixels of that smaller image. None for 1.

    Returns: the crops, in channels-last memory; uint8, or of `normal`'s dtype.

    Raises UsageError for tensors of other shapes, dtypes or devices, and for boxes on the host that
    lie outside their image.
    """
    count = len(boxes)
    _check(pixels, images, boxes, factors, size)
    out = _memory(out, (count, *size, 3), torch.uint8 if normal is None else normal.dtype, pixels)
    if count:
        library = find_triton() if pixels.is_cuda else None
        if library is not None:
            library.crop(pixels, images, boxes, factors, out.permute(0, 2, 3, 1), normal)
        else:
            _crop(pixels, images, boxes, factors, out.permute(0, 2, 3, 1), normal)
    return out


@functools.cache
def find_triton() -> ModuleType | None:
    """Return `triton_crops`; None where Triton is not installed."""
    try:
        from dlio.image.device_decode import triton_kernel
    except ImportError:
        return None
    return triton_kernel


def _check(
    pixels: torch.Tensor,
    images: torch.Tensor,
    boxes: torch.Tensor,
    factors: torch.Tensor | None,
    size: tuple[int, int],
) -> None:
    wanted: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("pixels", pixels, torch.uint8, (pixels.numel(),)),
        ("images", images, torch.int64, (len(boxes), IMAGE)),
        ("boxes", boxes, torch.int32, (len(boxes), NUMBERS)),
    ]
    if factors is not None:
        wanted.append(("factors", factors, torch.int32, (len(boxes),)))
    for name, tensor, dtype, shape in wanted:
        alike = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
        if not alike or tensor.device != pixels.device:
            raise UsageError(
                f"crop_batch: {name} is {tensor.dtype} of shape {tuple(tensor.shape)} on "
                f"{tensor.device}: give contiguous {dtype} of shape {shape} on {pixels.device}"
            )
    if not all(1 <= side <= _MOST_SIDE for side in size):
        raise UsageError(f"crop_batch: size={size}: give sides from 1 to {_MOST_SIDE}")
    if pixels.device.type == "cpu":
        _check_boxes(pixels, images, boxes, factors)


def _check_boxes(
    pixels: torch.Tensor, images: torch.Tensor, boxes: torch.Tensor, factors: torch.Tensor | None
) -> None:
    first, sides = images[:, 0], images[:, 1:]
    corner, extent = boxes[:, :2].long(), boxes[:, 2:4].long()
    ends = first + 3 * sides.prod(1)  # Of the image as it is.
    if factors is not None:
        if not bool(torch.isin(factors, torch.tensor(FACTORS, dtype=torch.int32)).all()):
            raise UsageError(f"crop_batch: factors={factors.tolist()}: give one of {FACTORS} each")
        sides = -(-sides // factors[:, None])
    used = extent[:, 0] > 0
    inside = (corner >= 0).all(1) & (corner + extent <= sides).all(1) & (extent[:, 1] > 0)
    inside &= (first >= 0) & (ends <= pixels.numel())
    if bool((used & ~inside).any()):
        k = int((used & ~inside).nonzero()[0])
        raise UsageError(
            f"crop_batch: box {boxes[k].tolist()} of image {images[k].tolist()} is outside the "
            f"image, or the image outside the {pixels.numel()} bytes: give (top, left, height, "
            "width, flip, upend) and (first byte, height, width)"
        )


def _memory(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, pixels: torch.Tensor
) -> torch.Tensor:
    """Return `out`, checked, or new memory of shape (n, 3, height, width)."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=pixels.device).permute(0, 3, 1, 2)
    last = out.permute(0, 2, 3, 1) if out.ndim == 4 else out
    alike = last.shape == shape and last.is_contiguous() and out.dtype == dtype
    if not alike or out.device != pixels.device:
        raise UsageError(
            f"crop_batch: out is {out.dtype} of shape {tuple(out.shape)} on {out.device}: give "
            f"{dtype} of shape {(shape[0], 3, *shape[1:3])} in channels-last memory on "
            f"{pixels.device}"
        )
    return out


def _crop(
    pixels: torch.Tensor,
    images: torch.Tensor,
    boxes: torch.Tensor,
    factors: torch.Tensor | None,
    out: torch.Tensor,
    normal: Normalize | None,
) -> None:
    """The form in operations of torch; `out` has shape (n, height, width, 3)."""
    height, width = out.shape[1:3]
    shrunk = [1] * len(boxes) if factors is None else factors.tolist()
    for k, (image, box) in enumerate(zip(images.tolist(), boxes.tolist(), strict=True)):
        first, rows, columns = image
        top, left, high, wide, flip, upend = box
        if not high:
            made = torch.zeros((height, width, 3), dtype=torch.int32, device=pixels.device)
        else:
            whole = pixels.as_strided((rows, columns, 3), (3 * columns, 3, 1), first)
            part = _shrunk(whole, (top, left, high, wide), shrunk[k])
            shrinks = high >= 2 * height and wide >= 2 * width
            made = (_area if shrinks else _linear)(part, height, width)
            mirrored = [axis for axis, does in ((0, upend), (1, flip)) if does]
            made = made.flip(mirrored) if mirrored else made
        out[k] = made if normal is None else normal.of_bytes(made)


def _shrunk(image: torch.Tensor, box: tuple[int, int, int, int], factor: int) -> torch.Tensor:
    """Return a box of an image that is shrunk by a factor; int32."""
    top, left, high, wide = box
    if factor == 1:
        return image[top : top + high, left : left + wide].int()
    rows = torch.arange(factor * top, factor * (top + high), device=image.device)
    columns = torch.arange(factor * left, factor * (left + wide), device=image.device)
    part = image[rows.clamp_(max=len(image) - 1)][:, columns.clamp_(max=image.shape[1] - 1)]
    blocks = part.view(high, factor, wide, factor, 3).sum((1, 3), dtype=torch.int32)
    return (blocks + factor * factor // 2) // (factor * factor)


def _linear(part: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize linearly; int32, shapes (rows, columns, 3) and (height, width, 3)."""
    device = part.device
    x, right, left_weight, right_weight = _between(part.shape[1], width, device)
    beyond = (x < 0) | (x >= part.shape[1] - 1)  # Columns at the edge are not mixed.
    left_weight = left_weight.masked_fill(beyond, 2048)[:, None]
    right_weight = right_weight.masked_fill(beyond, 0)[:, None]
    x = x.clamp(0, part.shape[1] - 1)
    rows = (part[:, x] * left_weight + part[:, right] * right_weight) >> 4
    y, below, upper_weight, lower_weight = _between(part.shape[0], height, device)
    y = y.clamp(0, part.shape[0] - 1)
    upper, lower = upper_weight[:, None, None], lower_weight[:, None, None]
    mixed = ((rows[y] * upper) >> 16) + ((rows[below] * lower) >> 16)
    return ((mixed + 2) >> 2).clamp_(0, 255)


def _between(
    pixels: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (first pixel, pixel behind it, their weights in 1/2048) for each of `count` pixels.

    The first pixel may be -1; the one behind it is within the image.
    """
    place = torch.arange(count, dtype=torch.float64, device=device)
    at = ((place + 0.5) * (1.0 / (count / pixels)) - 0.5).float()
    first = at.floor()
    at = at - first
    weights = (((1.0 - at) * 2048).round().int(), (at * 2048).round().int())
    first = first.int()
    return first, (first + 1).clamp(0, pixels - 1), *weights


def _area(part: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize to the mean of the area under each pixel; shapes as for `_linear`."""
    area = part.shape[0] * part.shape[1]
    rows = _covered(part, 0, height)
    total = _covered(rows.long(), 1, width)
    return ((2 * total + area) // (2 * area)).int()


def _covered(part: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """Sum the pixels under each of `count` along an axis, in units of 1/count of a pixel."""
    size = part.shape[axis]
    begin = torch.arange(count, device=part.device) * size
    shape: Sequence[int] = (-1, 1, 1) if axis == 0 else (-1, 1)
    total = None
    for tap in range(size // count + 2):
        source = begin // count + tap
        end = torch.minimum((source + 1) * count, begin + size)
        weight = (end - torch.maximum(source * count, begin)).clamp_(min=0)
        taken = part.index_select(axis, source.clamp(max=size - 1))
        term = taken * weight.to(part.dtype).view(shape)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total
