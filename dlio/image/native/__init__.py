"""The decoder for baseline JPEGs that decodes only the MCUs that a crop touches.

A C library of dlio's own (README.md in this folder), built by the build hook where a C compiler is.
Its pixels are those of libjpeg-turbo with its fast inverse DCT and without smooth upsampling, which
`find` checks on a few small images before the library is used. Every image that it does not know,
and every damaged one, is left to the decoder that is used without it, with all its errors.

The library is called through ctypes: it serves every Python, and its calls release the GIL. With
many threads on as many cores, each time that a thread takes the GIL again costs more than the
Python between two calls: a sleeping thread has to be woken, and nothing runs until it is. So
`NativeLibrary.crops` makes the crops of many images by one call, and headers of moderate size are
read without releasing the GIL.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from dlio.data.schema import Buffer
from dlio.image.crop import Box
from dlio.util.settings import settings

LIBRARY: Final = os.path.join(os.path.dirname(__file__), "_native.so")
_ROOM: Final = 128
"""Bytes behind the pixels that the library may write: `ROOM` of jpeg.h."""
_LEAST: Final = 1 << 20
_HELD_BYTES: Final = 1 << 20
"""The markers of a smaller file are read with the GIL held: it takes microseconds."""


class JpegShape(NamedTuple):
    """Size of a JPEG that the library knows, in pixels, and the bytes that decoding it takes."""

    height: int
    width: int
    mcu_width: int
    memory: int


class NativeCrop(NamedTuple):
    """A crop for `NativeLibrary.crops`: a part of an image, resized."""

    image: npt.NDArray[np.uint8]
    """A JPEG's bytes, shape (n,); or RGB of shape (rows, columns, 3), whose rows may be apart."""
    shape: JpegShape | None
    """Of the JPEG; None for RGB."""
    box: Box
    out: npt.NDArray[np.uint8]
    """RGB without gaps, shape (rows, columns, 3)."""


class _ThreadBuffers(threading.local):
    """Memory of a thread: tables and coded data, sums of resized rows, and pixels that its next
    decode overwrites."""

    work = sums = pixels = np.zeros(0, np.uint8)

    def reserve(self, work: int, pixels: int) -> None:
        """Have so many bytes for tables and coded data, and for pixels."""
        if len(self.work) < work:
            self.work = np.zeros(max(_LEAST, work + work // 4), np.uint8)
        if len(self.pixels) < pixels + _ROOM:
            self.pixels = np.empty(max(_LEAST, pixels + pixels // 4 + _ROOM), np.uint8)

    def reserve_sums(self, columns: int) -> None:
        """Have memory to resize to so many columns."""
        if len(self.sums) < 40 * columns + 64:
            self.sums = np.empty(40 * columns + 64, np.uint8)


class NativeLibrary:
    """The loaded library. Thread-safe: each thread has memory of its own. Raises OSError if it
    cannot be loaded."""

    def __init__(self, path: str = LIBRARY) -> None:
        library = ctypes.CDLL(path)
        data, size = ctypes.c_void_p, ctypes.c_size_t
        self._shape = library.dlio_jpeg_shape
        self._shape.argtypes = (data, size, data)
        self._crop = library.dlio_jpeg_crop
        self._crop.argtypes = (data, size, data, data, size, data, size)
        self._small = library.dlio_jpeg_small
        self._small.argtypes = (data, size, ctypes.c_int, data, size, data, size)
        self._resize = library.dlio_resize
        self._resize.argtypes = (data, size, data, data, size, data)
        self._crops = library.dlio_crops
        self._crops.argtypes = (data, size, data, size, data, size, data, size)
        self._crops.restype = None
        self._sound = library.dlio_jpeg_sound
        self._sound.argtypes = (data, data, size, ctypes.c_int64, data, size, data, size, data)
        self._sound.restype = None
        self._ends = library.dlio_jpeg_ends
        held = ctypes.PyDLL(path)
        self._held_shape, self._held_ends = held.dlio_jpeg_shape, held.dlio_jpeg_ends
        self._held_shape.argtypes = (data, size, data)
        for ends in (self._ends, self._held_ends):
            ends.argtypes = (data, size, size, size)
        library.dlio_jpeg_name.restype = ctypes.c_char_p
        self._memory = _ThreadBuffers()
        self.instructions = library.dlio_jpeg_name().decode()

    def shape(self, image: Buffer) -> JpegShape | None:
        """Return the size of a JPEG; None for every image that the library does not know."""
        data = np.frombuffer(image, np.uint8)
        sides = (ctypes.c_int64 * 4)()
        call = self._shape if len(data) > _HELD_BYTES else self._held_shape
        refused = call(_address(data), len(data), sides)
        return None if refused else JpegShape(*sides)

    def ends(self, image: Buffer, scan: int, restarts: int) -> bool:
        """True if the coded data at `scan` have so many restart markers, in order, and end."""
        data = np.frombuffer(image, np.uint8)
        call = self._ends if len(data) > _HELD_BYTES else self._held_ends
        return bool(call(_address(data), len(data), scan, restarts))

    def crop(
        self, image: Buffer, top: int, left: int, height: int, width: int
    ) -> tuple[npt.NDArray[np.uint8], int] | None:
        """Decode a part of an image, and possibly more on its left and right.

        Returns: (RGB, shape (height, columns, 3); columns of the image left out on the left). The
        pixels lie in memory of this thread, which its next call overwrites. None if the image has
        to be decoded otherwise: it is damaged, or the library does not know how it is coded.
        """
        shape = self.shape(image)
        if shape is None:
            return None
        first, columns = _whole_mcus(shape, left, width)
        count = height * columns * 3
        memory = self._memory
        memory.reserve(shape.memory, count)
        data = np.frombuffer(image, np.uint8)
        refused = self._crop(
            *(_address(data), len(data), (ctypes.c_int64 * 4)(top, left, height, width)),
            *(_address(memory.work), len(memory.work)),
            *(_address(memory.pixels), len(memory.pixels)),
        )
        if refused:
            return None
        pixels = memory.pixels[:count].reshape(height, columns, 3)
        return pixels[:, : shape.width - first], first

    def sound(self, images: Sequence[Buffer], most_pixels: int) -> list[bool]:
        """True for each image of at most so many pixels of which no part is an error; by one call.
        False if another decoder has to say."""
        arrays = [np.frombuffer(image, np.uint8) for image in images]
        sizes = np.array([len(array) for array in arrays], np.uint64)
        data = np.array([_address(array) for array in arrays], np.uint64)
        verdicts, memory = np.zeros(len(images), np.bool_), self._memory
        memory.reserve(2 * int(sizes.max(initial=0)), 0)
        self._sound(
            *(_address(data), _address(sizes), len(images), most_pixels),
            *(_address(memory.work), len(memory.work)),
            *(_address(memory.pixels), len(memory.pixels), _address(verdicts)),
        )
        answer: list[bool] = verdicts.tolist()
        return answer

    def small(self, image: Buffer, shift: int) -> npt.NDArray[np.uint8] | None:
        """Decode a whole image at 1 / 2**shift of its size; otherwise as `crop`."""
        shape = self.shape(image)
        if shape is None:
            return None
        height, width = (-(-side >> shift) for side in (shape.height, shape.width))
        across = shape.mcu_width >> shift
        columns = -(-width // across) * across
        memory, data = self._memory, np.frombuffer(image, np.uint8)
        memory.reserve(shape.memory, height * columns * 3)
        refused = self._small(
            *(_address(data), len(data), shift, _address(memory.work), len(memory.work)),
            *(_address(memory.pixels), len(memory.pixels)),
        )
        if refused:
            return None
        return memory.pixels[: height * columns * 3].reshape(height, columns, 3)[:, :width]

    def resize(
        self, pixels: npt.NDArray[np.uint8], flip: bool, upend: bool, out: npt.NDArray[np.uint8]
    ) -> bool:
        """Resize RGB of shape (rows, columns, 3), whose rows may be apart, into `out` as OpenCV's
        INTER_LINEAR does, then mirror it.

        False if this is not possible: pixels or rows of `out` have gaps between them, or the
        processor has no AVX2.
        """
        rows, columns, _ = out.shape
        if pixels.strides[1:] != (3, 1) or out.strides != (3 * columns, 3, 1):
            return False
        memory = self._memory
        memory.reserve_sums(columns)
        sizes = (ctypes.c_int64 * 6)(*pixels.shape[:2], rows, columns, flip, upend)
        refused = self._resize(
            *(_address(pixels), pixels.strides[0], sizes),
            *(_address(memory.sums), len(memory.sums), _address(out)),
        )
        return not refused

    def crops(self, cuts: Sequence[NativeCrop]) -> list[bool]:
        """Make crops as `crop` and then `resize` do; all of them by one call.

        Returns: False for each crop that has to be made otherwise. Its `out` is undefined then.
        """
        memory, rows = self._memory, []
        for image, shape, box, out in cuts:
            if shape is None:
                pitch = image.strides[0]
                data, size = _address(image) + box.top * pitch + 3 * box.left, 0
            else:
                pitch, data, size = 0, _address(image), len(image)
                _, columns = _whole_mcus(shape, box.left, box.width)
                memory.reserve(shape.memory, box.height * columns * 3)
            height, width, _ = out.shape
            memory.reserve_sums(width)
            part = box.top, box.left, box.height, box.width
            end = height, width, box.flip, box.upend, _address(out), 1
            rows.append((data, size, pitch, *part, *end))
        tasks = np.array(rows, np.int64)
        self._crops(
            *(_address(tasks), len(tasks), _address(memory.work), len(memory.work)),
            *(_address(memory.pixels), len(memory.pixels)),
            *(_address(memory.sums), len(memory.sums)),
        )
        made: list[bool] = (tasks[:, -1] == 0).tolist()
        return made


def _whole_mcus(shape: JpegShape, left: int, width: int) -> tuple[int, int]:
    """Return (first column, columns) of the MCUs that contain some columns."""
    across = shape.mcu_width
    first = left // across * across
    return first, -(-(left + width) // across) * across - first


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def find() -> NativeLibrary | None:
    """Return the library; None if it was not built, is switched off or gives other pixels.

    DLIO_NATIVE is read by the first call of the process.
    """
    return _load()[0]


def name() -> str:
    """Name the decoder of baseline JPEGs in use, for reports."""
    library, text = _load()
    return text if library is not None else f"libjpeg-turbo ({text})"


@functools.cache
def _load() -> tuple[NativeLibrary | None, str]:
    """Return (the library, its name), or (None, why it is not in use)."""
    if not settings().native:
        return None, "DLIO_NATIVE=0"
    if not os.path.exists(LIBRARY):
        return None, "dlio was installed without a C compiler"
    try:
        library = NativeLibrary(LIBRARY)
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY} cannot be loaded: {error}"
    if library.instructions != "AVX2":
        return None, "its vector instructions are faster than dlio's own decoder in plain C"
    if not agrees(library):
        return None, "dlio's own decoder gives other pixels on this processor"
    return library, f"dlio ({library.instructions})"


def agrees(library: NativeLibrary) -> bool:
    """True if the library decodes a few small images as libjpeg-turbo does, whose results depend on
    the processor and on the version."""
    for image in _samples():
        expected = simplejpeg.decode_jpeg(image, "RGB", fastdct=True, fastupsample=True)
        height, width = expected.shape[:2]
        made = library.crop(image, 0, 0, height, width)
        if made is None or not np.array_equal(made[0], expected):
            return False
        for shift in (1, 2, 3):
            options = {"min_height": -(-height >> shift), "min_width": -(-width >> shift)}
            expected = simplejpeg.decode_jpeg(
                image, "RGB", fastdct=True, fastupsample=True, min_factor=1 << shift, **options
            )
            small = library.small(image, shift)
            if small is None or not np.array_equal(small, expected):
                return False
    return True


@functools.cache
def resizes_alike(library: NativeLibrary, resize: Callable[..., npt.NDArray[np.uint8]]) -> bool:
    """True if the library resizes a few small images as `resize` does: OpenCV's with INTER_LINEAR,
    whose results depend on the processor and on the version."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), np.uint8)
    for height, width in ((61, 83), (47, 44), (90, 100), (100, 60), (31, 90)):
        out = np.empty((height, width, 3), np.uint8)
        done = library.resize(noise, False, False, out)
        if not done or not np.array_equal(out, resize(noise, (width, height))):
            return False
    return True


def _samples() -> Iterator[bytes]:
    """Small JPEGs of noise, for extreme coefficients, and of a gradient."""
    noise = np.random.default_rng(0).integers(0, 256, (43, 57, 3), np.uint8)
    noise[:24] = np.where(noise[:24] < 128, 0, 255)
    gradient = np.broadcast_to(np.arange(43, dtype=np.uint8)[:, None, None] * 5, noise.shape)
    for sampling in ("444", "422", "420"):
        for quality, pixels in ((20, noise), (92, noise), (80, gradient)):
            yield simplejpeg.encode_jpeg(
                np.ascontiguousarray(pixels), quality, "RGB", colorsubsampling=sampling
            )
    grey = np.ascontiguousarray(noise[:, :, :1])
    yield simplejpeg.encode_jpeg(grey, 75, "GRAY", colorsubsampling="Gray")
