"""Pictures whose headers are not as their formats say: those that Pillow reads are read, with its
pixels; those that it refuses are refused."""

import ctypes
import functools
import glob
import io
import os
import struct
import warnings
from collections import Counter
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image.crop import Crop
from dlio.image.decoder import MAX_PIXELS, Decoder, decode_whole, image_size
from dlio.image.image_warnings import WARNINGS
from dlio.image.segmentation_masks import decode_mask
from tests.readers.picture_files import pillows, tiff_file

_MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "F", "CMYK"),
    "PPM": ("1", "L", "RGB"),
    "JPEG": ("L", "RGB", "CMYK"),
}
_ENDS = {"PNG": 33, "BMP": 54, "WEBP": 40, "PPM": 15, "JPEG": 650}
_VALUES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 255)


def _drawn(generator: np.random.Generator, form: str) -> bytes:
    height, width = (int(side) for side in generator.integers(3, 40, 2))
    pixels = generator.integers(0, 256, (height, width, 4), np.uint8)
    mode, options = str(generator.choice(_MODES[form])), dict[str, Any]()
    image = Image.fromarray(pixels).convert(mode)
    if form == "TIFF":
        codecs = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
        options["compression"] = str(generator.choice(codecs))
    if form == "JPEG":
        options = {"progressive": bool(generator.integers(2)), "restart_marker_rows": 1}
    memory = io.BytesIO()
    image.save(memory, form, **options)
    return memory.getvalue()


def _places(image: bytes, form: str) -> list[int]:
    """Return where the header of a file is, and not its pixels."""
    if form == "TIFF":
        (at,) = struct.unpack_from("<I", image, 4)
        (count,) = struct.unpack_from("<H", image, at)
        return [*range(2, 8), *range(at, at + 6 + 12 * count)]
    if form == "GIF":
        frame = image.index(b",\0\0\0\0", 13)
        return [*range(6, 13), *range(frame - 8, frame + 10)]
    return list(range(2, min(_ENDS[form], len(image))))


def _verdict(form: str, seed: int) -> str:
    generator = np.random.default_rng(seed)
    image = bytearray(_drawn(generator, form))
    places = _places(bytes(image), form)
    for at in generator.choice(places, int(generator.integers(1, 3))):
        is_bit = generator.random() < 0.5
        image[at] = (
            image[at] ^ 1 << int(generator.integers(8)) if is_bit else generator.choice(_VALUES)
        )
    data = bytes(image)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as picture:
                if picture.width * picture.height > MAX_PIXELS >> 4:
                    return "too large"
                expected = np.asarray(picture.convert("RGB"))
        except Exception as error:  # Of many types.
            expected, refusal = None, str(error)
    try:
        ours = decode_whole(data, "x", exact=True)
    except DecodeError as error:
        return "both refuse" if expected is None else f"refused {seed}: {error}"
    assert image_size(data, "x") == ours.shape[:2], seed
    if expected is None:
        return "read" if _has_a_reader(form, data, refusal) else f"read {seed}: {refusal}"
    alike = expected.shape == ours.shape and np.abs(expected.astype(int) - ours).max() <= 1
    return "same" if alike else f"differ {seed}"


@functools.cache
def _libwebp() -> ctypes.CDLL | None:
    """The library that Pillow brings, and uses with stricter checks around it."""
    folder = os.path.join(os.path.dirname(os.path.dirname(PIL.__file__)), "pillow.libs")
    paths = glob.glob(os.path.join(glob.escape(folder), "libwebp-*.so*"))
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    library.WebPDecodeRGB.restype = ctypes.c_void_p
    library.WebPFree.argtypes = (ctypes.c_void_p,)
    return library


def _has_a_reader(form: str, data: bytes, refusal: str) -> bool:
    """Return True if the format's own library reads a picture that Pillow refuses."""
    if (
        form == "WEBP"
    ):  # Of a wrong length of its chunk, or of a flag for a chunk that is not there.
        library, sides = _libwebp(), (ctypes.c_int(), ctypes.c_int())
        if library is None:
            return True
        size = ctypes.c_size_t(len(data))
        pixels = library.WebPDecodeRGB(data, size, *(ctypes.byref(side) for side in sides))
        library.WebPFree(pixels)
        return bool(pixels)
    if form == "TIFF":  # Libtiff reads channels of whose kind the file says nothing.
        return refusal.startswith("cannot identify")
    starts = {
        # Netpbm ends a number at a comment, behind which Pillow goes on with it.
        "PPM": "b'Token too long",
        # A palette of more colours than the bits of a pixel need, for which Pillow has no mode.
        "BMP": "codec configuration error",
        # Libjpeg warns of a part that is lost, and goes on to the end, which is there.
        "JPEG": "image file is truncated (0 bytes",
    }
    return form in starts and refusal.startswith(starts[form])


def _check(form: str, seeds: range) -> None:
    verdicts = Counter(_verdict(form, seed) for seed in seeds)
    assert verdicts.pop("read", 0) <= len(seeds) * 0.05
    assert set(verdicts) <= {"same", "both refuse", "too large"}, verdicts
    assert verdicts["both refuse"]


@pytest.mark.parametrize("form", _MODES)
def test_an_odd_header_is_read_where_pillow_reads_it(form: str) -> None:
    _check(form, range(100))


@pytest.mark.nightly
@pytest.mark.parametrize("form", _MODES)
def test_and_so_are_many(form: str) -> None:
    _check(form, range(100, 3000))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_warning_about_a_jpegs_header_leaves_no_pixels_of_another_picture(
    progressive: bool, exact: bool
) -> None:
    def photo(level: int) -> bytes:
        memory = io.BytesIO()
        Image.new("RGB", (40, 32), (level,) * 3).save(memory, "JPEG", progressive=progressive)
        return memory.getvalue()

    plain = photo(50)
    later = plain[:11] + b"\2" + plain[12:]  # JFIF 2
    between = plain[:2] + b"\xff\xe1\0\4ab" + b"rest" + plain[2:]
    profile = plain[:2] + b"\xff\xe2\0\x11ICC_PROFILE\0\1\2x" + plain[2:]  # One of two parts
    for number, image in enumerate((later, between, profile)):
        np.testing.assert_array_equal(decode_whole(photo(200), "other", exact), 200)
        name = f"{number} {progressive} {exact}"
        np.testing.assert_array_equal(decode_whole(image, name, exact), 50)
        crops, out = Decoder(Crop(16, True), seed=0), np.zeros((16, 16, 3), np.uint8)
        crops.decode(photo(200), "other", crops.draw(0, np.array([0]))[0], out)
        crops.decode(image, name, crops.draw(0, np.array([0]))[0], out)
        np.testing.assert_array_equal(out, 50)
        assert WARNINGS.of(name)


def _gif(frame: tuple[int, int], screen: tuple[int, int], at: tuple[int, int]) -> bytes:
    """A GIF of a palette in colour whose only frame lies at (left, top) of its screen."""
    numbers = np.arange(frame[0] * frame[1]).reshape(frame).astype(np.uint8) % 7
    image = Image.fromarray(numbers)
    image.putpalette([(37 * k + 90 * (k % 3)) % 256 for k in range(24)])
    memory = io.BytesIO()
    image.save(memory, "GIF", optimize=False)
    data = bytearray(memory.getvalue())
    place = data.index(b",\0\0\0\0", 13)
    struct.pack_into("<HH", data, 6, screen[1], screen[0])
    struct.pack_into("<HH", data, place + 1, at[1], at[0])
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "shape", "warns"),
    [((0, 0), (9, 11), False), ((2, 3), (9, 11), False), ((5, 6), (10, 12), True)],
)
def test_a_frame_of_a_gif_may_be_a_part_of_its_screen_or_reach_beyond_it(
    at: tuple[int, int], shape: tuple[int, int], warns: bool
) -> None:
    data = _gif((5, 6), (9, 11), at)
    name = f"frame at {at}"
    expected = np.zeros(shape, np.uint8)  # Number 0 where the frame is not, as by Pillow.
    expected[at[0] : at[0] + 5, at[1] : at[1] + 6] = np.arange(30).reshape(5, 6) % 7
    assert image_size(data, name) == shape
    np.testing.assert_array_equal(decode_mask(data, name), expected)
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(decode_whole(data, name), np.asarray(picture))
    assert (WARNINGS.of(name) is not None) == warns


def test_a_tiff_without_required_tags_is_read_as_by_pillow_and_told() -> None:
    numbers, memory = np.arange(35, dtype=np.uint8).reshape(5, 7), io.BytesIO()
    Image.fromarray(numbers).save(memory, "TIFF")
    data = bytearray(memory.getvalue())
    entry = data.index(struct.pack("<HHI", 262, 3, 1))
    struct.pack_into("<H", data, entry, 270)  # No sense of black: 0 is white then.
    np.testing.assert_array_equal(decode_mask(bytes(data), "mask"), 255 - numbers)
    np.testing.assert_array_equal(decode_whole(bytes(data), "tiff")[..., 0], 255 - numbers)
    assert "not as its format says" in (WARNINGS.of("tiff") or "")


@pytest.mark.parametrize(
    "head", [b"P5\n1x7 5\n255\n", b"P5\n7 5\n25\x015\n", b"P5\n7 \xff5\n255\n"]
)
def test_a_header_of_text_with_other_signs_is_no_picture_of_another_size(head: bytes) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Image.open(io.BytesIO(head + bytes(200))).load()
    with pytest.raises(DecodeError, match="its header is not as the format says"):
        decode_whole(head + bytes(200), "x")


@pytest.mark.parametrize("channels", [3, 4])
def test_a_tiff_of_several_channels_of_grey_is_refused_for_what_it_is(channels: int) -> None:
    tags = {256: [2], 257: [2], 258: [8] * channels, 259: [1], 262: [1], 277: [channels]}
    data = tiff_file("<", False, [bytes(4 * channels)], {**tags, 278: [2], 273: [], 279: []})
    assert pillows(data) is None
    for decode in (decode_whole, decode_mask):
        with pytest.raises(DecodeError, match=f"a TIFF of {channels} channels of grey.*as .npy"):
            decode(data, "x")
