"""Masks: files of them, and the polygons and run lengths of COCO's instances.

A file's pixels are numbers of classes, read as they are stored: the grey values, or the numbers
that a palette gives colours to, for which a picture's decoder would return the colours.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.errors import DecodeError
from dlio.image.decoder import (
    MAX_PIXELS,
    StoredPixels,
    check_strips,
    damaged,
    image_size,
    note_oddity,
    opencv_pixels,
    tiff_header,
    tiff_numbers,
    tiff_pixels,
)
from dlio.image.file_headers import (
    ALPHA,
    ASSOCIATED,
    BITS,
    GIF,
    ORIENTATION,
    PALETTE,
    PHOTOMETRIC,
    PNG,
    PNM,
    RGB,
    SAMPLES,
    TIFF,
    UNASSOCIATED,
    WHITE_IS_ZERO,
    TiffHeader,
    bmp_is_regular,
    pnm_as_stored,
    turned,
    with_numbers,
    without_animation,
)
from dlio.image.image_warnings import WARNINGS
from dlio.image.pillow_pictures import as_numbers, by_pillow

_BLACK_IS_ZERO: Final = 1
_JPEG: Final = b"\xff\xd8"
_LOSSY_WEBP: Final = b"WEBPVP8 "
_GREY, _PALETTE = 0, 3
_GREY_AND_ALPHA: Final = 2
_PNG_BITS: Final = 24
"""Where a PNG says how many bits a number has."""
_UPSAMPLED: Final = 5
"""Times that COCO's tools refine polygons before they draw them."""
_LEAST_POINTS: Final = 3
_FURTHEST: Final = 1 << 20
_MOST_POINTS: Final = 1 << 24
"""Points on an instance's outlines, at most; the outline of a picture of 8,192 pixels has 2**18."""
_POINTS_A_PIXEL: Final = 16
_FEW_POINTS: Final = 1 << 18
"""The same of an instance of a small picture: these, and some for each pixel."""
_AT_ONCE: Final = 1 << 18
"""Points of which outlines are made at a time."""
Mask = npt.NDArray[np.uint8]


def decode_mask(image: Buffer, name: object) -> Mask:
    """Return the numbers in an image file; shape (height, width).

    Raises DecodeError when the file is damaged, in colour, or has numbers above 255.
    """
    height, width = image_size(image, name)
    if bytes(image[:2]) == _JPEG or bytes(image[8:16]) == _LOSSY_WEBP:
        WARNINGS.note(
            name, "it is a mask in a format that changes numbers: store masks as PNG", "lossy"
        )
    try:
        pixels, bits = _stored(image, name)
    except DecodeError as error:
        raise _invalid(name, _reason(str(error).removeprefix(f"{name} "))) from error
    if pixels.shape[:2] != (height, width):
        raise _invalid(name, "its pixels are not as many as its header says")
    if pixels.ndim == 3:
        if (pixels[..., 0] != pixels[..., 1]).any() or (pixels[..., 0] != pixels[..., 2]).any():
            raise _invalid(name, "it is in colour: store the number of each pixel's class")
        pixels = pixels[..., 0]
    numbers: Mask = np.ascontiguousarray(pixels, np.uint8)
    if pixels.dtype != np.uint8 and (wrong := pixels != numbers).any():
        number = pixels[wrong][0]
        raise _invalid(name, f"it has the number {number:g}, and masks are of 0 to 255")
    if bits < 8:  # The decoder has stretched them to the full range of grey.
        numbers //= 255 // ((1 << bits) - 1)
    return numbers


def _stored(image: Buffer, name: object) -> tuple[StoredPixels, int]:
    """Return (pixels, bits of each): below 8 bits they are stretched to 255. Raises DecodeError."""
    if bytes(image[:6]) in GIF:  # OpenCV gives its colours, and not its numbers.
        picture = by_pillow(image, MAX_PIXELS)
        if picture is None:
            raise damaged(name, "Pillow cannot decode it")
        return as_numbers(picture), 8
    try:
        return _stored_by_opencv(image, name)
    except DecodeError:
        picture = None if bytes(image[:2]) in PNM else by_pillow(image, MAX_PIXELS)
        header = TiffHeader.parse(image) if picture and picture.format == "TIFF" else None
        if picture is None or (header is not None and _has_deep_alpha(image, header)):
            raise
        note_oddity(image, name)
        bits = 8
        if picture.mode == "L" and picture.format == "PNG":
            bits = min(bits, image[_PNG_BITS])
        elif picture.mode == "L" and header is not None:
            bits = min(bits, header.value(image, BITS, 1))
        return as_numbers(picture), bits


def _stored_by_opencv(image: Buffer, name: object) -> tuple[StoredPixels, int]:
    head, bits = bytes(image[:4]), 8
    if head in TIFF:
        header = tiff_header(image, name)
        check_strips(image, name, header)
        height, width, padded = header.padded(image, MAX_PIXELS)
        if padded is not None:
            pixels, bits = _stored(padded, name)
            return turned(pixels[:height, :width], header.value(image, ORIENTATION, 1)), bits
        kind, packed = header.value(image, PHOTOMETRIC, RGB), header.packed_bits(image)
        if packed > 1 or (packed and kind == PALETTE):
            numbers = tiff_numbers(image, name, header)
            return (1 << packed) - 1 - numbers if kind == WHITE_IS_ZERO else numbers, 8
        bits = 1 if header.value(image, BITS, 1) == 1 else 8
        changes = {PHOTOMETRIC: _BLACK_IS_ZERO} if kind == PALETTE else {}
        if header.value(image, ALPHA, 0) == UNASSOCIATED:
            changes[ALPHA] = ASSOCIATED
        image = header.changed(image, changes)
        if _has_deep_alpha(image, header):
            raise damaged(name, "it has 16 bits of grey and of alpha: store masks without alpha")
        return tiff_pixels(image, name, header), bits
    if head[:2] in (b"P1", b"P4"):
        bits = 1
    elif head[:1] == b"P":
        image = pnm_as_stored(image)
    elif head[:2] == b"BM":
        if not bmp_is_regular(image):
            raise damaged(name, "its header is not as the format says")
        # As stored, those of OS/2 would be grey, also if they are in colour.
        return opencv_pixels(with_numbers(image), name), bits
    else:
        image, bits = _as_grey(without_animation(image))
    return opencv_pixels(image, name, as_stored=True), bits


def _has_deep_alpha(image: Buffer, header: TiffHeader) -> bool:
    """True for 16 bits of grey and of alpha, whose numbers Pillow gives for some codecs alone."""
    return header.value(image, SAMPLES, 1) == _GREY_AND_ALPHA and header.value(image, BITS, 1) > 8


def draw_instance(shape: object, height: int, width: int, name: object) -> Mask:
    """Draw the mask of an instance from its `segmentation` in COCO's format, as pycocotools does.

    `shape` is polygons, each a list of x and y in turn; or `{"size", "counts"}`, run lengths down
    the columns as a list or as COCO's text; or `{"relative"}`, polygons in shares of the picture's
    width and height. Polygons of fewer than three points are left out.

    Returns ones and zeros, of shape (height, width). Raises DecodeError.
    """
    try:
        if isinstance(shape, Mapping):
            if "relative" not in shape:
                return _unrolled(shape, height, width)
            polygons = [each * (width, height) for each in _polygons(shape["relative"])]
        else:
            polygons = _polygons(shape)
        mask = np.zeros((height, width), np.uint8)
        left = min(_MOST_POINTS, _FEW_POINTS + _POINTS_A_PIXEL * height * width)
        for polygon in polygons:
            left -= _fill(mask, polygon, left)
        return mask
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _invalid(name, f"segmentation: {error}") from error


def _as_grey(image: Buffer) -> tuple[Buffer, int]:
    """Return (image, bits of a pixel); a PNG with a palette as one of grey values.

    Both store one number a pixel in the same way: only the header differs.
    """
    head = bytes(image[:29])
    if head[:8] != PNG or head[12:16] != b"IHDR" or len(head) < 29:
        return image, 8
    bits, colours = head[24], head[25]
    if colours == _GREY:
        return image, min(bits, 8)
    if colours != _PALETTE:
        return image, 8
    made = bytearray(image)
    made[25] = _GREY
    made[29:33] = struct.pack(">I", zlib.crc32(made[12:29]))
    at, parts = 33, [bytes(made[:33])]
    while at + 8 <= len(made):
        length = int.from_bytes(made[at : at + 4], "big")
        end = at + 12 + length
        if bytes(made[at + 4 : at + 8]) not in (b"PLTE", b"tRNS", b"bKGD", b"hIST"):
            parts.append(bytes(made[at:end]))
        at = end
    return b"".join(parts), bits


def _reason(text: str) -> str:
    """Return the reason in an error about a picture, without its remedies."""
    if text.startswith("is "):
        return f"it {text.partition(': convert')[0].partition(' (')[0]}"
    return text.partition(": ")[2].partition(" (repair")[0]


def _polygons(shape: object) -> list[npt.NDArray[np.float64]]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError("it is neither polygons nor run lengths")
    polygons = [np.asarray(each, np.float64) for each in shape]
    for each in polygons:
        if each.ndim != 1 or not np.isfinite(each).all():
            raise ValueError("a polygon is numbers in a row, as x, y, x, y, ...")
        if np.abs(each).max(initial=0) > _FURTHEST:
            raise ValueError("a polygon reaches far beyond the picture")
    return [each[: len(each) // 2 * 2].reshape(-1, 2) for each in polygons if has_area(each)]


def has_area(polygon: Sequence[float] | npt.NDArray[np.float64]) -> bool:
    """True for a polygon of three points or more; COCO's tools draw nothing of one of fewer, and
    leave out a last number that has no partner."""
    return len(polygon) // 2 >= _LEAST_POINTS


def _fill(mask: Mask, points: npt.NDArray[np.float64], most: int) -> int:
    """Fill a polygon with ones, by the rules of COCO's `rleFrPoly`; return the points on its
    outline. Raises ValueError for more than `most`."""
    height, width = mask.shape
    corners = (points * _UPSAMPLED + 0.5).astype(np.int64)
    begins, ends = corners, np.roll(corners, -1, axis=0)
    spans = np.abs(ends - begins)
    wide = spans[:, 0] >= spans[:, 1]
    turned = np.where(wide, begins[:, 0] > ends[:, 0], begins[:, 1] > ends[:, 1])
    low = np.where(turned[:, None], ends, begins)
    high = np.where(turned[:, None], begins, ends)
    lengths = spans.max(axis=1)
    counts = lengths + 1
    total = int(counts.sum())
    if total > most:
        raise ValueError("a polygon reaches far beyond the picture, or passes it too often")
    across = np.where(wide, high[:, 1] - low[:, 1], high[:, 0] - low[:, 0])
    slope = across / np.maximum(lengths, 1)
    ends = np.cumsum(counts)
    parts = []
    first = 0
    while first < len(points):
        # Whole edges, of which the next one begins where the last one ends.
        stop = int(np.searchsorted(ends, int(ends[first] - counts[first]) + _AT_ONCE, "right"))
        stop = max(stop, first + 1)
        own = counts[first:stop]
        # Every point of the outline, edge by edge, each in its own direction.
        edge = np.repeat(np.arange(first, stop), own)
        step = np.arange(len(edge)) - np.repeat(np.cumsum(own) - own, own)
        step = np.where(turned[edge], lengths[edge] - step, step)
        base = np.where(wide, low[:, 1], low[:, 0])[edge]
        other = (base + slope[edge] * step + 0.5).astype(np.int64)
        along = np.where(wide, low[:, 0], low[:, 1])[edge] + step
        x, y = np.where(wide[edge], along, other), np.where(wide[edge], other, along)
        # Where the outline passes the middle of a column of pixels, inside and outside change.
        passes = np.flatnonzero(np.diff(x))
        before, after = x[passes], x[passes + 1]
        column = (np.where(after < before, after, after - 1) + 0.5) / _UPSAMPLED - 0.5
        row = (np.minimum(y[passes], y[passes + 1]) + 0.5) / _UPSAMPLED - 0.5
        right = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
        rows = np.ceil(np.clip(row[right], 0, height)).astype(np.int64)
        parts.append((rows, column[right].astype(np.int64)))
        first = stop
    rows, columns = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(rows):
        return total
    # A column is passed an even number of times, so that only the polygon's own part is drawn.
    top, left = int(rows.min()), int(columns.min())
    shape = int(columns.max()) - left + 1, int(rows.max()) - top + 1
    at = (columns - left) * shape[1] + rows - top
    changes = np.bincount(at, minlength=shape[0] * shape[1]).astype(np.uint8).reshape(shape)
    inside = np.cumsum(changes, axis=1, dtype=np.uint8) & 1
    mask[top : top + shape[1] - 1, left : left + shape[0]] |= inside[:, :-1].T
    return total


def _unrolled(shape: Mapping[str, Any], height: int, width: int) -> Mask:
    if [int(side) for side in shape["size"]] != [height, width]:
        raise ValueError(f"its size is {shape['size']}, and the picture's {[height, width]}")
    counts = shape["counts"]
    runs = _counts(counts) if isinstance(counts, str | bytes) else np.asarray(counts, np.int64)
    if runs.ndim != 1 or (runs < 0).any() or int(runs.sum()) != height * width:
        raise ValueError("its runs do not add up to the picture's pixels")
    ones = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8)
    return ones.reshape(width, height).T


def _counts(text: str | bytes) -> npt.NDArray[np.int64]:
    """Decode COCO's text of run lengths: numbers of 5 bits a character, as differences."""
    data = text.encode("ascii") if isinstance(text, str) else text
    runs: list[int] = []
    value = shift = 0
    for code in data:
        digit = code - 48
        if not 0 <= digit < 64 or shift > 30:
            raise ValueError("its run lengths are damaged")
        value |= (digit & 0x1F) << shift
        shift += 5
        if not digit & 0x20:
            if digit & 0x10:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return np.array(runs, np.int64)


def run_lengths(mask: npt.NDArray[np.bool_]) -> str:
    """Return COCO's text of the run lengths of a mask, shape (height, width), down its columns."""
    flat = np.concatenate([[False], mask.T.reshape(-1)])
    ends = np.concatenate([np.flatnonzero(flat[1:] != flat[:-1]), [mask.size]])
    runs = np.diff(ends, prepend=0).tolist()
    made = bytearray()
    for k, run in enumerate(runs):
        value = run - runs[k - 2] if k > 2 else run
        more = True
        while more:
            digit = value & 0x1F
            value >>= 5
            more = value != (-1 if digit & 0x10 else 0)
            made.append((digit | 0x20 * more) + 48)
    return made.decode("ascii")


def _invalid(name: object, reason: str) -> DecodeError:
    return DecodeError(
        f"mask of {name} cannot be used: {reason} (repair or remove it; --on-error skip leaves "
        "such samples out)"
    )
