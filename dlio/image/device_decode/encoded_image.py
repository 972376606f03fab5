"""The bytes of an image that a device decodes: those that its crops need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from dlio.data.schema import Buffer
from dlio.image import native
from dlio.image.crop import Box, CropRegion, enclosing
from dlio.image.decoder import MAX_PIXELS, Decoder, scaled
from dlio.image.jpeg import JpegFrame, cut, interval_starts, parse_frame, touched

_END: Final = 0xD9
_LEAST_BITS: Final = 2
"""Of a coded unit: a code for its mean, and one for its end."""
_WHOLE_SCAN: Final = b"\x00\x3f\x00"
"""The end of a scan's header: it has all coefficients, with all their bits."""


class JpegHeader(NamedTuple):
    """A JPEG that a device decodes, by its header."""

    frame: JpegFrame
    starts: npt.NDArray[np.int64] | None
    """Offsets of the restart intervals (`interval_starts`), if rows begin with one."""


@dataclass(slots=True)
class EncodedImage:
    """A part of a JPEG, to be decoded by a device."""

    data: npt.NDArray[np.uint8]
    """A JPEG, in memory that stays as it is."""
    part: Box
    """The part of it to decode, in pixels."""
    crops: tuple[tuple[Box, int], ...]
    """(box, factor) of each crop: the box is in pixels of the part after it is shrunk by 1, 2, 4
    or 8."""
    shown: CropRegion
    """The part of the image that the first crop shows."""
    name: object
    """Names the image in errors, as a str or by its `__str__`."""
    source: object = None
    """The part, as the decoder's library has it, once it has read the header."""


def header_of(image: Buffer) -> JpegHeader | None:
    """Return the header of a JPEG that all decoders of nvImageCodec take; None for other images.

    These are baseline JPEGs with 8 bits and one scan, grey or YCbCr, with all markers in place:
    truncated files, those with lost restart intervals, and those with too few bytes for the size
    in their header are left to the CPU and its errors.
    """
    frame = parse_frame(image)
    if frame is None or frame.height * frame.width > MAX_PIXELS or not _has_known_colours(image):
        return None
    units = frame.rows * frame.blocks_a_row * frame.units
    is_short = 8 * (len(image) - frame.scan_at) < _LEAST_BITS * units
    if is_short or bytes(memoryview(image)[frame.scan_at - 3 : frame.scan_at]) != _WHOLE_SCAN:
        return None
    if frame.intervals_a_row:
        starts = interval_starts(image, frame)
        return None if starts is None else JpegHeader(frame, starts)
    return JpegHeader(frame, None) if _has_its_markers(image, frame) else None


def _has_known_colours(image: Buffer) -> bool:
    """True if the image is grey or YCbCr, with 8 bits."""
    library = native.find()
    if library is not None:
        return library.shape(image) is not None
    try:
        _, _, colours, _ = simplejpeg.decode_jpeg_header(image)
    except (ValueError, KeyError):  # KeyError: subsampling such as 4:1:1, which has no name.
        return False
    return colours in ("Gray", "YCbCr")


def _has_its_markers(image: Buffer, frame: JpegFrame) -> bool:
    """True if the coded data have the markers that the header promises, and end."""
    blocks = frame.rows * frame.blocks_a_row
    restarts = (blocks - 1) // frame.restart_interval if frame.restart_interval else 0
    library = native.find()
    if library is not None:
        return library.ends(image, frame.scan_at, restarts)
    data = np.frombuffer(image, np.uint8)[frame.scan_at :]
    marks = np.flatnonzero(data[:-1] == 0xFF)
    kinds = data[marks + 1]
    kinds = kinds[(kinds != 0) & (kinds != 0xFF)]
    if len(kinds) <= restarts or int(kinds[restarts]) != _END:
        return False
    return np.array_equal(kinds[:restarts], 0xD0 + (np.arange(restarts) & 7))


def encoded(
    image: Buffer,
    header: JpegHeader,
    decoder: Decoder,
    uniforms: Sequence[float],
    name: object,
    memory: memoryview | None = None,
) -> EncodedImage:
    """Copy the bytes that the crops of an image need: of a JPEG whose rows are restart intervals,
    those that a crop touches.

    The crops are those of `Decoder.decode`, and of the same pixels: where it decodes at a fraction,
    they are cut out of an image that is shrunk by that factor.

    `header` is the result of `header_of`, and `uniforms` the image's row of `Decoder.draw`. The
    bytes go to `memory`, which is as long as the image; by default to fresh memory.
    """
    frame, starts = header

    def room(count: int) -> memoryview:
        return memoryview(bytearray(count)) if memory is None else memory[:count]

    size = frame.height, frame.width
    drawn = decoder.crop.boxes(*size, uniforms)
    factors = [decoder.factor(box) for box in drawn]
    boxes = [
        box if factor == 1 else scaled(box, factor, _decoded_shape(header, box, factor))
        for box, factor in zip(drawn, factors, strict=True)
    ]
    wholes = [box.times(factor) for box, factor in zip(boxes, factors, strict=True)]
    part = _within(enclosing(wholes), max(factors), size)
    crops = tuple(
        (
            replace(box, top=box.top - part.top // factor, left=box.left - part.left // factor),
            factor,
        )
        for box, factor in zip(boxes, factors, strict=True)
    )
    shown = CropRegion(wholes[0], *size)
    if starts is not None:
        bottom, right = part.top + part.height, part.left + part.width
        needed = touched(frame, part.top, bottom, part.left, right)
        rows, columns = needed.bottom - needed.top, needed.right - needed.left
        if rows < frame.rows or columns < frame.intervals_a_row:
            made, _, _ = cut(image, frame, starts, needed, room)
            top = part.top - needed.top * frame.block_height
            left = part.left - needed.left * frame.interval_width
            own = replace(part, top=top, left=left)
            return EncodedImage(np.frombuffer(made, np.uint8), own, crops, shown, name)
    copy = room(len(image))
    copy[:] = memoryview(image)  # numpy would release the interpreter's lock, and wait for it.
    return EncodedImage(np.frombuffer(copy, np.uint8), part, crops, shown, name)


def _decoded_shape(header: JpegHeader, box: Box, factor: int) -> tuple[int, int]:
    """Rows and columns to the end of the part that `Decoder` decodes for a box, at 1/factor."""
    frame, starts = header
    bottom, right = box.top + box.height, frame.width
    if starts is not None:
        right = -(-(box.left + box.width) // frame.interval_width) * frame.interval_width
    elif frame.restart_interval:
        bottom = frame.height
    bottom = -(-bottom // frame.block_height) * frame.block_height
    return -(-min(bottom, frame.height) // factor), -(-min(right, frame.width) // factor)


def _within(box: Box, factor: int, size: tuple[int, int]) -> Box:
    """Begin a part at multiples of a factor, and end it within the image."""
    top, left = box.top // factor * factor, box.left // factor * factor
    bottom = min(box.top + box.height, size[0])
    right = min(box.left + box.width, size[1])
    return Box(top, left, bottom - top, right - left, flip=False)
