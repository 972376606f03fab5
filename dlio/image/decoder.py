"""Decoding image files into crops, in the batch's own memory.

Baseline JPEGs go through dlio's own decoder where it was built (dlio.image.native), other JPEGs
through libjpeg-turbo (simplejpeg), everything else through OpenCV. The crop is drawn
before decoding, from random numbers that belong to the sample (seed, epoch, sample), so a run
gives the same pixels on any number of ranks and threads; and because it is known, a crop that is
at least twice the size it is shrunk to is decoded at a half, a quarter or an eighth, which the
inverse DCT does for less than nothing.

A JPEG for which libjpeg has a warning is read, as every other loader reads it; one whose end is
missing is not. Neither depends on the crop: of a JPEG with unexpected markers the whole is decoded.

dlio's own decoder transforms no other blocks than the crop's. Huffman coding forces libjpeg-turbo
through every row above the crop, but not through those below it: the copy of a plain baseline JPEG
(one scan, no restart markers) that it decodes has its height lowered to the crop's last row, and it
stops there. What follows is only searched for its end, so a truncated file is still found. Of a
JPEG whose rows of blocks are restart intervals, as `dlio pack` writes them, both decode only the
intervals that the crop touches. Several crops of one image are cut out of one decoded part of it.
All the work releases the GIL.
"""

import functools
import math
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from dlio.data.schema import Buffer
from dlio.errors import DecodeError
from dlio.image import native
from dlio.image.crop import Box, Crop, CropRegion, are_near, enclosing
from dlio.image.file_headers import (
    ALPHA,
    ASSOCIATED,
    BITS,
    COLOURS,
    FORMAT,
    GIF,
    ORIENTATION,
    PALETTE,
    PHOTOMETRIC,
    PNM,
    RGB,
    SAMPLES,
    TIFF,
    UNASSOCIATED,
    WHITE_IS_ZERO,
    TiffHeader,
    bmp_bits,
    bmp_is_regular,
    gif_size,
    has_more_frames,
    is_odd,
    is_pnm,
    pnm_as_stored,
    pnm_most,
    turned,
    unread_format,
    without_animation,
    without_transparency,
)
from dlio.image.image_warnings import WARNINGS
from dlio.image.jpeg import (
    cut,
    ends,
    ends_after,
    gains_by_restarts,
    good_interval,
    interval_starts,
    parse_frame,
    touched,
    with_kept_starts,
    without_markers,
)
from dlio.image.pillow_pictures import MOST_CHANNELS, as_rgb, by_pillow, limited_grey
from dlio.image.tiff_strips import strips_are_whole
from dlio.image.tiff_tiles import planes_of, with_wide_tiles
from dlio.plan.order import keyed_uniforms
from dlio.util.child_processes import variable
from dlio.util.forks import new_lock
from dlio.util.limits import LFS_POINTER, is_lfs_pointer
from dlio.util.settings import settings
from dlio.util.units import counted

MAX_PIXELS: Final = settings().max_pixels
"""Most pixels of an image: half a gigabyte of RGB, and twice the size of which Pillow warns."""

StoredPixels = npt.NDArray[Any]
"""Pixels of a file's own type: grey, or BGR and alpha."""
_JPEG: Final = b"\xff\xd8"
_MOST_16_BITS: Final = 0xFFFF
_FACTORS = (8, 4, 2)
"""Fractions at which libjpeg-turbo has fast inverse transforms; the others are slower than 1/1."""
_READABLE = (
    "Corrupt JPEG data",
    "Inconsistent progression sequence",
    "Invalid SOS parameters",
    "Unknown Adobe color transform",
    "Warning: unknown JFIF revision",
)
"""Beginnings of libjpeg's warnings, after which it goes on to the last row, and so do all loaders.
Its errors and the missing end of a file are none of them."""
_SKIPPED = "extraneous bytes before marker 0xd9"
"""libjpeg's warning about rows below a lowered height. In a whole image it means damage."""


class Decoder:
    """Decodes images into crops. Thread-safe; picklable. With `kept` they are decoded in two steps,
    `prepare` and `finish`, so that a tier can keep the result of the first. Training crops are then
    cut out of a smaller version of the image, whether or not it comes from the tier."""

    def __init__(self, crop: Crop, seed: int, kept: bool = False) -> None:
        self.crop = crop
        self.seed = seed
        self.kept = kept
        self._short = round(min(crop.size, crop.width) * 8 / 7)

    @property
    def recipe(self) -> str:
        """Name of the result of `prepare`, for the folder of a tier."""
        if self.crop.train:
            return f"short{self._short}"
        exact = "exact" if self.crop.exact else ""
        return f"middle{self.crop.size}x{self.crop.width}r{self.crop.resize or 0}{exact}"

    def prepare(self, image: Buffer, name: object) -> npt.NDArray[np.uint8]:
        """Decode as far as the result is the same in every epoch: RGB, shape (rows, columns, 3).

        In training this is the whole image, shrunk to a short side of 8/7 of the crop's if it is
        larger; otherwise it is the crop. Raises as `decode` does.
        """
        if not self.crop.train:
            out = np.empty(self.crop.shape, np.uint8)
            self._cut_out(image, name, (), out)
            return out
        size = _jpeg_size(image, name)
        if size is None:
            pixels = _decode_other(image, name)
        else:
            factor = next((f for f in _FACTORS if min(size) >= f * self._short), 1)
            pixels, _, _ = _decode_jpeg(image, name, size, Box(0, 0, *size, flip=False), factor)
        small = resized(pixels, self._short)
        return pixels.copy() if small is pixels else small

    def finish(
        self,
        pixels: npt.NDArray[np.uint8],
        uniforms: npt.NDArray[np.float64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Cut the crops out of the result of `prepare`; arguments as for `decode`."""
        if not self.crop.train:
            out[:] = pixels
            return
        boxes = self.crop.boxes(pixels.shape[0], pixels.shape[1], uniforms.tolist())
        for box, part in zip(boxes, _parts(out), strict=True):
            _resize(pixels, box, part)

    def draw(self, epoch: int, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the random numbers of samples' crops; shape (n, numbers per sample)."""
        if not self.crop.draws:
            return np.zeros((len(samples), 0))
        return keyed_uniforms(self.seed, epoch, samples, self.crop.draws)

    def decode(
        self,
        image: Buffer,
        name: object,
        uniforms: npt.NDArray[np.float64],
        out: npt.NDArray[np.uint8],
    ) -> CropRegion | None:
        """Decode, crop and resize one image into `out`; return the part of it that `out` shows.

        Of several crops it is the first one's part. None if the image was decoded in two steps, as
        the part is one of a smaller version then.

        `name` names the image in errors, as a str or by its `__str__`; `uniforms` is its row of
        `draw`, and `out` RGB, of the crop's shape, contiguous.

        Raises DecodeError when the file is not an image, or is damaged, truncated or too large.
        """
        if self.kept:
            self.finish(self.prepare(image, name), uniforms, out)
            return None
        return self._cut_out(image, name, uniforms.tolist(), out)

    def _cut_out(
        self, image: Buffer, name: object, uniforms: Sequence[float], out: npt.NDArray[np.uint8]
    ) -> CropRegion:
        size, parts = _jpeg_size(image, name), _parts(out)
        if self.crop.exact:
            return self._cut_exactly(image, name, size, uniforms, parts)
        if size is None:
            pixels = _decode_other(image, name)
            size = pixels.shape[0], pixels.shape[1]
            boxes = self.crop.boxes(*size, uniforms)
            for box, part in zip(boxes, parts, strict=True):
                _resize(pixels, box, part)
            return CropRegion(boxes[0], *size)
        boxes = self.crop.boxes(*size, uniforms)
        shown = boxes[0]
        for factor, numbers in self._decodes(image, boxes, size[1]):
            first = boxes[numbers[0]]
            together = enclosing([boxes[k] for k in numbers]) if len(numbers) > 1 else first
            pixels, top, left = _decode_jpeg(image, name, size, together, factor)
            for k in numbers:
                box = boxes[k]
                if factor > 1:
                    whole = (pixels.shape[0] + top // factor, pixels.shape[1] + left // factor)
                    box = scaled(box, factor, whole)
                    shown = shown if k else box.times(factor)
                box = replace(box, top=box.top - top // factor, left=box.left - left // factor)
                _resize(pixels, box, parts[k])
        return CropRegion(shown, *size)

    def _cut_exactly(
        self,
        image: Buffer,
        name: object,
        size: tuple[int, int] | None,
        uniforms: Sequence[float],
        parts: npt.NDArray[np.uint8],
    ) -> CropRegion:
        """Do `_cut_out` with the pixels of Pillow and torchvision; `size` is that of a JPEG."""
        crop, top, left = self.crop, 0, 0
        pixels = _decode_other(image, name, exact=True) if size is None else None
        height, width = pixels.shape[:2] if size is None and pixels is not None else size or (0, 0)
        boxes = crop.boxes(height, width, uniforms)
        if pixels is None:
            whole = Box(0, 0, height, width, flip=False)
            shown = enclosing(boxes) if crop.train else whole
            pixels, top, left = _decode_jpeg(image, name, (height, width), shown, 1, exact=True)
        for box, part in zip(boxes, parts, strict=True):
            if crop.train:
                y, x = box.top - top, box.left - left
                made = resampled(pixels[y : y + box.height, x : x + box.width], part.shape[:2])
            else:
                tall, wide, y, x = crop.middle(height, width)
                made = resampled(pixels[:height, :width], (tall, wide))
                made = made[y : y + crop.size, x : x + crop.width]
            part[:] = made[:: -1 if box.upend else 1, :: -1 if box.flip else 1]
        return CropRegion(boxes[0], height, width)

    def _decodes(
        self, image: Buffer, boxes: Sequence[Box], width: int
    ) -> list[tuple[int, list[int]]]:
        """Return (factor, numbers of the boxes that are cut out) for each decoding of a JPEG of
        this width. Pixels are those of decoding for each box alone."""
        if len(boxes) == 1:
            return [(self.factor(boxes[0]), [0])]
        groups: dict[int, list[int]] = {}
        alone: list[tuple[int, list[int]]] = []
        for k, box in enumerate(boxes):
            factor = self.factor(box)
            if factor > 1 and not _is_free(box, factor):
                alone.append((factor, [k]))
            else:
                groups.setdefault(factor, []).append(k)
        whole = groups.get(1, [])
        if len(whole) > 1 and not are_near([boxes[k] for k in whole], width):
            library = native.find()
            # Other decoders go through all rows above a part, and through all columns.
            if library is not None and library.shape(image) is not None:
                alone += [(1, [k]) for k in groups.pop(1)]
        return [*groups.items(), *alone]

    def factor(self, box: Box) -> int:
        """Return the fraction at which a JPEG is decoded for a crop: 1, 2, 4 or 8 for 1/8."""
        for factor in _FACTORS:
            if box.height >= factor * self.crop.size and box.width >= factor * self.crop.width:
                return factor
        return 1


# Several images by one call of dlio's own decoder. A thread that releases the interpreter's lock
# has to wait for it afterwards, behind all others, and on many cores most waits wake a sleeping
# thread: with 16 threads, a call for each image cost most of the threads' gain (docs/LOG.md).


def decode_all(
    decoder: Decoder,
    images: Sequence[Buffer],
    names: Sequence[object],
    uniforms: Sequence[npt.NDArray[np.float64]],
    outs: Sequence[npt.NDArray[np.uint8]],
) -> list[CropRegion | Exception | None]:
    """Do `decoder.decode` for several images; return its results, or errors in their places."""
    shown: list[CropRegion | Exception | None] = [None] * len(images)
    alone = list(range(len(images)))
    crop = decoder.crop
    library = None if decoder.kept or crop.crops > 1 or crop.exact else _library()
    if library is not None:
        cuts: dict[int, native.NativeCrop] = {}
        alone = []
        for k, image in enumerate(images):
            shape = library.shape(image)
            # One of too many pixels gets its error below.
            if shape is not None and shape.height * shape.width <= MAX_PIXELS:
                box = decoder.crop.box(shape.height, shape.width, uniforms[k].tolist())
                if decoder.factor(box) == 1:
                    cuts[k] = native.NativeCrop(np.frombuffer(image, np.uint8), shape, box, outs[k])
                    shown[k] = CropRegion(box, shape.height, shape.width)
                    continue
            alone.append(k)
        alone += _refused(library, cuts)
    for k in alone:
        try:
            shown[k] = decoder.decode(images[k], names[k], uniforms[k], outs[k])
        except Exception as error:
            shown[k] = error
    return shown


def finish_all(
    decoder: Decoder,
    images: Sequence[npt.NDArray[np.uint8]],
    uniforms: Sequence[npt.NDArray[np.float64]],
    outs: Sequence[npt.NDArray[np.uint8]],
) -> None:
    """Do `decoder.finish` for several images."""
    crop = decoder.crop
    alone = list(range(len(images)))
    library = _library() if crop.train and crop.crops == 1 else None
    if library is not None:
        cuts: dict[int, native.NativeCrop] = {}
        alone = []
        for k, pixels in enumerate(images):
            box = crop.box(pixels.shape[0], pixels.shape[1], uniforms[k].tolist())
            if decoder.factor(box) > 1 or pixels.strides[1:] != (3, 1):
                alone.append(k)
                continue
            cuts[k] = native.NativeCrop(pixels, None, box, outs[k])
        alone += _refused(library, cuts)
    for k in alone:
        decoder.finish(images[k], uniforms[k], outs[k])


def _refused(library: native.NativeLibrary, cuts: dict[int, native.NativeCrop]) -> list[int]:
    """Make crops by one call; return the numbers of those that have to be made otherwise."""
    if not cuts:
        return []
    made = library.crops(list(cuts.values()))
    return [k for k, is_made in zip(cuts, made, strict=True) if not is_made]


def _library() -> native.NativeLibrary | None:
    """Return dlio's own decoder; None if it is not in use or does not resize as OpenCV does."""
    library = native.find()
    if library is None or not native.resizes_alike(library, opencv().resize):
        return None
    return library


def resizes_natively() -> bool:
    """True if dlio's own decoder makes crops here, with the pixels of OpenCV's resizing."""
    return _library() is not None


# Whole images, and parts of JPEGs


def decode_whole(image: Buffer, name: object, exact: bool = False) -> npt.NDArray[np.uint8]:
    """Decode a whole image: RGB, shape (height, width, 3); with Pillow's pixels if `exact`. Raises
    DecodeError."""
    size = _jpeg_size(image, name)
    if size is not None:
        whole = Box(0, 0, *size, flip=False)
        return _decode_jpeg(image, name, size, whole, 1, exact)[0].copy()
    return _decode_other(image, name, exact)


def check_image(image: Buffer, name: object) -> None:
    """Raise DecodeError for an image that `decode_whole` refuses; of most JPEGs only the first rows
    are decoded for that, as the verdict is the same for every part."""
    size = _jpeg_size(image, name)
    if size is None:
        _decode_other(image, name)
    else:
        _decode_jpeg(image, name, size, Box(0, 0, 1, 1, flip=False), 1)


def image_size(image: Buffer, name: object) -> tuple[int, int]:
    """Return (height, width) of an image, of most formats from its header. Raises DecodeError."""
    size = _jpeg_size(image, name)
    if size is None and bytes(image[:2]) != _JPEG:
        size = _declared_size(image, name)
    if size is None:
        pixels = _decode_other(image, name)
        size = pixels.shape[0], pixels.shape[1]
    return size


def _resize(pixels: npt.NDArray[np.uint8], box: Box, out: npt.NDArray[np.uint8]) -> None:
    """Resize the box of an image into `out`, and mirror it if the box says so."""
    cv2 = opencv()
    part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    height, width = out.shape[:2]
    shrinks = box.height >= 2 * height and box.width >= 2 * width
    library = None if shrinks else _library()
    if library is not None and library.resize(part, box.flip, box.upend, out):
        return
    cv2.resize(
        part,
        (width, height),
        dst=out,
        interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
    )
    if box.flip or box.upend:
        cv2.flip(out, (-1 if box.upend else 1) if box.flip else 0, dst=out)


def resampled(pixels: npt.NDArray[np.uint8], size: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Resize to (height, width), as torchvision does with antialias, and Pillow to within 1."""
    import torch  # Here: launchers of ranks come without it.

    given = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(
        given, size, mode="bilinear", antialias=True, align_corners=False
    )
    return made[0].permute(1, 2, 0).numpy()


def _parts(out: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The crops of an image, shape (crops, height, width, 3), in the same memory."""
    return out.reshape(-1, *out.shape[-3:])


def _is_free(box: Box, factor: int) -> bool:
    """True if the box at 1/factor lies within the pixels that any decoding of the box has, so that
    `_scaled` does not depend on what else is decoded."""
    sides = (box.top, box.height), (box.left, box.width)
    return all(
        round(first / factor) + round(count / factor) <= -(-(first + count) // factor)
        for first, count in sides
    )


def scaled(box: Box, factor: int, shape: tuple[int, ...]) -> Box:
    """Return the box in an image of shape (rows, columns) that was decoded at 1/factor, to the
    nearest pixel."""
    top, left = round(box.top / factor), round(box.left / factor)
    return Box(
        top,
        left,
        max(1, min(round(box.height / factor), shape[0] - top)),
        max(1, min(round(box.width / factor), shape[1] - left)),
        box.flip,
        box.upend,
    )


def _jpeg_size(image: Buffer, name: object) -> tuple[int, int] | None:
    """(height, width) of a JPEG that simplejpeg decodes whole; None for everything else. Raises
    DecodeError when the header declares more pixels than the limit."""
    if bytes(image[:2]) == _JPEG:
        library = native.find()
        shape = None if library is None else library.shape(image)
        if shape is not None:
            check_size(shape.height, shape.width, name)
            return shape.height, shape.width
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(image)
        except (ValueError, KeyError) as error:
            _check_scans(image, (1, MAX_PIXELS), name)
            if isinstance(error, ValueError):
                if by_pillow(image, MAX_PIXELS) is None:
                    raise damaged(name, f"its JPEG header cannot be read: {error}") from error
                # simplejpeg ends at a warning about the header: before the first pixel.
                WARNINGS.note(name, str(error))
            return None  # Others have subsampling that it has no name for, such as 4:4:1.
        check_size(height, width, name)
        if colours in ("CMYK", "YCCK"):
            _check_scans(image, (height, width), name)
        return None if colours in ("CMYK", "YCCK") else (height, width)
    size = _declared_size(image, name)
    if size is not None:
        check_size(*size, name)
    return None


def _declared_size(image: Buffer, name: object) -> tuple[int, int] | None:
    """(height, width) in the header of a file other than a JPEG; None for formats whose pixels
    cannot be many more than their bytes: WebP has at most 16,383 pixels a side, PPM is not
    compressed."""
    head = bytes(image[:32])
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    if head[:6] in GIF and len(head) >= 10:
        return gif_size(image)[:2]
    if head[:2] == b"BM" and len(head) >= 26:
        is_core = head[14:18] == b"\x0c\0\0\0"  # Of OS/2 1, with sides of 16 bits.
        width, height = struct.unpack_from("<HH" if is_core else "<ii", head, 18)
        return abs(height), width
    if head[:4] in TIFF:
        try:
            header = TiffHeader.parse(image)
        except (struct.error, IndexError):
            return None  # Pillow may read it.
        return header.size(image) if header.is_regular(image) else None
    if (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or head[:2] in PNM:
        return None
    if is_lfs_pointer(image):
        raise DecodeError(f"{name} {LFS_POINTER}")
    if kind := unread_format(image):
        raise _unread(name, kind)
    raise damaged(name, "it is not an image that dlio knows" if len(image) else "it is empty")


def _unread(name: object, kind: str) -> DecodeError:
    remedy = "store them as .npy" if " channel" in kind else "convert it to PNG or JPEG"
    return DecodeError(
        f"{name} is {kind}, which dlio does not decode: {remedy} (`dlio "
        "verify` lists all such files, --on-error skip leaves them out)"
    )


def damaged(name: object, reason: str) -> DecodeError:
    """Return the error of an image that cannot be decoded."""
    return DecodeError(
        f"{name} cannot be decoded: {reason} (repair or remove it; `dlio verify` lists all such "
        "files, --on-error skip leaves them out)"
    )


def check_size(height: int, width: int, name: object) -> None:
    """Raise DecodeError for an image of no pixels, or of more than the limit."""
    if height <= 0 or width <= 0 or height * width > MAX_PIXELS:
        raise damaged(name, f"{width} x {height} pixels are not within 1 to {MAX_PIXELS}")


_DEEP: Final = "Unsupported JPEG data precision"
_MOST_SCANS: Final = 64
_SCANNED: Final = 1 << 28
"""Pixels of all scans of a JPEG that may have more of them. A progressive one has about ten."""


def _check_scans(image: Buffer, size: tuple[int, int], name: object) -> None:
    """Raise DecodeError for a JPEG of very many scans: each of a few bytes takes as long to decode
    as all of its pixels."""
    scans = (image if isinstance(image, bytes) else bytes(image)).count(b"\xff\xda")
    if scans > _MOST_SCANS and scans * size[0] * size[1] > _SCANNED:
        raise damaged(name, f"it has {scans} scans of {size[1]} x {size[0]} pixels")


_threads = threading.local()


def _decode_jpeg(
    image: Buffer,
    name: object,
    size: tuple[int, int],
    box: Box,
    factor: int,
    exact: bool = False,
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """Decode the box, and possibly more around it. `exact` smooths chroma and transforms blocks
    exactly, as Pillow does.

    Returns: (pixels at 1/factor, rows of the image left out above, columns left out on the left).
    The pixels lie in memory of this thread, which its next decode overwrites.
    """
    if factor == 1 and not exact and (library := native.find()) is not None:
        made = library.crop(image, box.top, box.left, box.height, box.width)
        if made is not None:
            return made[0], box.top, made[1]
    _check_scans(image, size, name)
    small = _smaller(image, size, box)
    height, width = small.height, small.width
    if factor > 1 and (small.top % factor or small.left % factor):
        raise AssertionError("blocks are multiples of every factor")
    options: dict[str, Any] = {"fastdct": not exact, "fastupsample": not exact}
    if factor > 1:
        options.update(min_height=height // factor, min_width=width // factor, min_factor=factor)
    need = (height // factor + 1) * (width // factor + 1) * 3
    memory: npt.NDArray[np.uint8] | None = getattr(_threads, "memory", None)
    if memory is None or len(memory) < need:
        memory = _threads.memory = np.empty(need + need // 4, np.uint8)
    try:
        simplejpeg.decode_jpeg(small.image, "RGB", buffer=memory, **options)
    except ValueError as error:
        reason = str(error)
        if reason.startswith(_DEEP):
            raise _unread(name, "a JPEG of 12 bits a colour") from error
        if not reason.startswith(_READABLE):
            clean = _without_stray_markers(image)
            if clean is None:
                raise damaged(name, reason) from error
            WARNINGS.note(name, reason)
            return _decode_jpeg(clean, name, size, box, factor, exact)
        # libjpeg reports its first warning alone: it must not hide that the end is missing.
        if small.image is image and not ends(image):
            raise damaged(name, "it is cut off: its end is missing") from error
        if not small.lowered or not reason.endswith(_SKIPPED):
            WARNINGS.note(name, reason)
    shape = (-(-height // factor), -(-width // factor), 3)
    return memory[: math.prod(shape)].reshape(shape), small.top, small.left


class _PartialJpeg(NamedTuple):
    """A JPEG with the needed part of another one."""

    image: Buffer
    height: int
    width: int
    top: int = 0
    """Rows of pixels left out above."""
    left: int = 0
    """Columns of pixels left out on the left."""
    lowered: bool = False
    """True if its data go on below its declared height."""


def _smaller(image: Buffer, size: tuple[int, int], box: Box) -> _PartialJpeg:
    """A smaller JPEG to decode in place of `image`, with all pixels of the box.

    If rows are restart intervals, the needed ones are cut out. Of another baseline JPEG a copy
    gets a header that ends the image below the box. The image itself is returned if nothing is
    saved, or if a marker that does not belong there may be an error: whether an image is read must
    not depend on the part of it that is needed.
    """
    frame = parse_frame(image)
    if frame is None:
        return _PartialJpeg(image, *size)
    bottom = box.top + box.height
    if frame.restart_interval:
        starts = interval_starts(image, frame)
        if starts is None:
            return _PartialJpeg(image, *size)
        part = touched(frame, box.top, bottom, box.left, box.left + box.width)
        rows, columns = part.bottom - part.top, part.right - part.left
        if rows == frame.rows and columns == frame.intervals_a_row:
            return _PartialJpeg(image, *size)
        made = cut(image, frame, starts, part, _copy_memory)
        return _PartialJpeg(*made, part.top * frame.block_height, part.left * frame.interval_width)
    lower = -(-bottom // frame.block_height) * frame.block_height
    if lower >= frame.height or not ends_after(image, frame):
        return _PartialJpeg(image, *size)
    copy = _copy_memory(len(image))
    copy[:] = memoryview(image)
    copy[frame.height_at : frame.height_at + 2] = lower.to_bytes(2, "big")
    return _PartialJpeg(copy, lower, size[1], lowered=True)


def _without_stray_markers(image: Buffer) -> Buffer | None:
    """Return a copy of a JPEG whose restart intervals have their places in the file, with no other
    markers in them: a crop of other intervals does not meet these. None if there are none."""
    frame = parse_frame(image)
    starts = interval_starts(image, frame) if frame is not None else None
    if frame is None or starts is None:
        return None
    clean = without_markers(image, frame, starts)
    return None if np.array_equal(clean, np.frombuffer(image, np.uint8)) else clean.data


def _copy_memory(count: int) -> memoryview:
    """Memory of this thread for a copy that is decoded in place of an image."""
    memory: memoryview | None = getattr(_threads, "copy", None)
    if memory is None or len(memory) < count:
        memory = _threads.copy = np.empty(count + count // 4, np.uint8).data
    return memory[:count]


def _decode_other(image: Buffer, name: object, exact: bool = False) -> npt.NDArray[np.uint8]:
    """Decode PNG, WebP, TIFF, BMP, PPM, and JPEGs that simplejpeg does not. EXIF rotation is
    ignored, as by torchvision's loader; `exact` limits grey of 16 bits to 255, too."""
    if exact and (limited := limited_grey(image, name, MAX_PIXELS)) is not None:
        return limited
    if has_more_frames(image):
        WARNINGS.note(name, "of its frames or pages only the first is read", "frames")
    if bytes(image[:2]) == _JPEG:
        if not ends(image):
            raise damaged(name, "it is cut off: its end is missing")
        picture = by_pillow(image, MAX_PIXELS)
        if picture is None:
            raise damaged(name, "Pillow refuses it as well")
        return as_rgb(picture)
    try:
        return _decode_by_opencv(image, name)
    except DecodeError:
        picture = by_pillow(image, MAX_PIXELS)
        if picture is None:
            raise
        note_oddity(image, name)
        return as_rgb(picture)


def note_oddity(image: Buffer, name: object) -> None:
    """Warn of a picture that OpenCV is not given, or refuses, and Pillow reads."""
    if is_odd(image):
        WARNINGS.note(name, "its pixels are complete, and the file is not as its format says")


def _decode_by_opencv(image: Buffer, name: object) -> npt.NDArray[np.uint8]:
    head = bytes(image[:6])
    if head[:4] in TIFF:
        return _decode_tiff(image, name)
    if head in GIF:
        if not gif_size(image)[2]:
            raise damaged(name, "the frame of the GIF is not the whole picture")
        image = without_transparency(image)
    is_odd_pnm = head[:2] in PNM and not is_pnm(image)
    if is_odd_pnm or (head[:2] == b"BM" and not bmp_is_regular(image)):
        raise damaged(name, "its header is not as the format says")
    if most := pnm_most(image):
        stored = opencv_pixels(pnm_as_stored(image), name, as_stored=True)
        if most == _MOST_16_BITS:
            return _rgb(stored >> 8)  # As of other pictures of 16 bits.
        return _rgb(np.minimum(np.rint(stored / most * 255), 255))  # As Pillow rounds.
    pixels = opencv_pixels(without_animation(image), name)
    bits = bmp_bits(image)
    if bits is not None:  # OpenCV leaves the lower bits 0, so that white is grey.
        kept = np.array(bits)
        pixels = (pixels >> (8 - kept)) * 255 // ((1 << kept) - 1)
    return _rgb(pixels)


def _decode_tiff(image: Buffer, name: object) -> npt.NDArray[np.uint8]:
    """Decode a TIFF to the pixels of Pillow: alpha is dropped, numbers beyond 8 bits that are
    signed or no whole numbers are limited to 0 to 255."""
    header = tiff_header(image, name)
    check_strips(image, name, header)
    height, width, padded = header.padded(image, MAX_PIXELS)
    if padded is not None:
        turn = header.value(image, ORIENTATION, 1)
        return np.ascontiguousarray(turned(_decode_tiff(padded, name)[:height, :width], turn))
    bits, kind = header.packed_bits(image), header.value(image, PHOTOMETRIC, RGB)
    colours = header.values(image, COLOURS, 1 << 16) if kind == PALETTE else []
    if kind == PALETTE and len(colours) != 3 << header.value(image, BITS, 1):
        # Of a palette that is cut off, OpenCV makes other colours.
        raise damaged(name, "its palette is missing, or has not a colour for each number")
    if bits > 1:
        numbers = tiff_numbers(image, name, header)
        if kind == PALETTE:
            palette = np.array(colours, np.uint16).reshape(3, -1)
            return (palette.T[numbers] >> 8).astype(np.uint8)
        most = (1 << bits) - 1
        return _rgb((most - numbers if kind == WHITE_IS_ZERO else numbers) * (255 // most))
    samples, bits = header.value(image, SAMPLES, 1), header.value(image, BITS, 1)
    if samples > MOST_CHANNELS:
        raise damaged(
            name, f"it has {counted(samples, 'channel')}, and pictures have up to {MOST_CHANNELS}"
        )
    alpha = header.value(image, ALPHA, 0)
    if alpha == UNASSOCIATED:  # libtiff would multiply by it.
        image = header.changed(image, {ALPHA: ASSOCIATED})
    divides = alpha == ASSOCIATED and samples == 4 and kind == RGB
    is_whole = header.value(image, FORMAT, 1) == 1 and bits <= 16
    if not divides and bits <= 8:
        return _rgb(opencv_pixels(image, name))
    pixels = tiff_pixels(image, name, header)
    if not is_whole:
        numbers = np.nan_to_num(pixels)
        if numbers.size and 0 < numbers.max() <= 1:
            WARNINGS.note(
                name,
                f"its numbers of {numbers.min():g} to {numbers.max():g} become black: dlio, as "
                "Pillow, does not scale them; multiply them by 255, or store them as .npy",
                "range",
            )
        return _rgb(np.clip(numbers, 0, 255))
    whole = pixels >> 8 if pixels.dtype == np.uint16 else pixels
    if not divides:
        return _rgb(whole)
    shares = whole[..., 3:].astype(np.uint32)
    divided = whole[..., :3].astype(np.uint32) * 255 // np.maximum(shares, 1)
    return _rgb(np.where(shares > 0, np.minimum(divided, 255), 0))


def tiff_header(image: Buffer, name: object) -> TiffHeader:
    """Return the header of a TIFF. Raises DecodeError."""
    try:
        header = TiffHeader.parse(image)
    except (struct.error, IndexError) as error:
        raise damaged(name, "its TIFF header cannot be read") from error
    if not header.is_regular(image):
        raise damaged(name, "its TIFF header is not as the format says")
    if kind := header.unread(image):
        raise _unread(name, kind)
    return header


def check_strips(image: Buffer, name: object, header: TiffHeader) -> None:
    """Raise DecodeError for a TIFF with damage that OpenCV would pass over."""
    if not strips_are_whole(image, header):
        raise damaged(name, "a strip of its compressed pixels is damaged")


def tiff_pixels(image: Buffer, name: object, header: TiffHeader) -> StoredPixels:
    """Return the pixels of a TIFF as they are stored, but as shown: turned. Raises DecodeError."""
    if not header.is_planar(image) or header.value(image, BITS, 1) <= 8:
        return opencv_pixels(image, name, as_stored=True)
    planes = [opencv_pixels(each, name, as_stored=True) for each in planes_of(image, header)]
    order = [2, 1, 0, 3][: len(planes)] if len(planes) > 2 else [0]
    return np.stack([planes[k] for k in order], axis=2) if len(order) > 1 else planes[0]


def tiff_numbers(image: Buffer, name: object, header: TiffHeader) -> npt.NDArray[np.uint8]:
    """Return the stored numbers of a TIFF with `packed_bits`; shape (height, width). Raises
    DecodeError."""
    pixels = opencv_pixels(header.as_bytes(image), name, as_stored=True)
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise damaged(name, "its pixels are not as its header says")
    return header.unpack(image, pixels)


def opencv_pixels(image: Buffer, name: object, as_stored: bool = False) -> StoredPixels:
    """Return the pixels of OpenCV: uint8 in BGR, or of the file's own type, depth and channels.
    Raises DecodeError."""
    cv2 = opencv()
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    flags = cv2.IMREAD_UNCHANGED if as_stored else flags
    try:
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise damaged(name, str(error).strip().splitlines()[-1]) from error
    if pixels is None and bytes(image[:4]) in TIFF and (whole := with_wide_tiles(image)):
        pixels = cv2.imdecode(np.frombuffer(whole, np.uint8), flags)
    if pixels is None:
        raise damaged(name, "OpenCV cannot decode it")
    decoded: StoredPixels = pixels
    return decoded


def _rgb(pixels: StoredPixels) -> npt.NDArray[np.uint8]:
    """Return grey, BGR or BGRA pixels from 0 to 255 as RGB."""
    cv2 = opencv()
    whole = pixels.astype(np.uint8, copy=False)
    ways = {3: cv2.COLOR_BGR2RGB, 4: cv2.COLOR_BGRA2RGB}
    way = cv2.COLOR_GRAY2RGB if whole.ndim == 2 else ways[whole.shape[2]]
    rgb: npt.NDArray[np.uint8] = cv2.cvtColor(np.ascontiguousarray(whole), way)
    return rgb


# Encoding


def encode_with_restarts(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Return a 4:2:0 JPEG whose rows are restart intervals, with a segment of their offsets, if its
    crops gain by that. Pixels are RGB of shape (height, width, 3)."""
    cv2 = opencv()
    options = [
        *(cv2.IMWRITE_JPEG_QUALITY, quality),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
    ]
    if gains_by_restarts(*pixels.shape[:2]):
        options += [
            *(cv2.IMWRITE_JPEG_RST_INTERVAL, good_interval(pixels.shape[1], 16)),
            *(cv2.IMWRITE_JPEG_OPTIMIZE, 1),
        ]
    done, data = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)
    if not done:
        raise ValueError(f"OpenCV cannot encode {pixels.shape}")
    return with_kept_starts(data.data)


def resized(pixels: npt.NDArray[np.uint8], short_side: int) -> npt.NDArray[np.uint8]:
    """Return an image shrunk to a short side in pixels; images are never enlarged."""
    return shrunk(pixels, short_side / min(pixels.shape[:2]), opencv().INTER_AREA)


def shrunk(
    pixels: npt.NDArray[np.uint8], scale: float, interpolation: int
) -> npt.NDArray[np.uint8]:
    """Return an image whose sides are multiplied by a scale, if that is below 1."""
    if scale >= 1:
        return pixels
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    made: npt.NDArray[np.uint8] = opencv().resize(
        pixels, (width, height), interpolation=interpolation
    )
    return made


# OpenCV has its own limit, as it reads headers that dlio does not; and damage is not to be printed.
_OPENCV: Final = {"OPENCV_IO_MAX_IMAGE_PIXELS": str(MAX_PIXELS), "OPENCV_LOG_LEVEL": "SILENT"}
_loading = new_lock()


@functools.cache
def opencv() -> ModuleType:
    """Return OpenCV, loaded at first use, without threads of its own."""
    # It reads them when it is loaded. Processes that this one starts shall not inherit them.
    with _loading, ExitStack() as stack:
        for name, value in _OPENCV.items():
            stack.enter_context(variable(name, os.environ.get(name, value)))
        import cv2
    cv2.setNumThreads(0)
    return cv2
