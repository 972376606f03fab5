"""Pictures that were damaged by chance behind their headers: those that Pillow reads are read, with
its pixels; those that it refuses are refused."""

import io
import itertools
import warnings
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image.decoder import decode_whole
from dlio.image.image_warnings import WARNINGS
from dlio.image.segmentation_masks import decode_mask
from tests.readers.picture_files import pillows, tiff_file

_MODES = {
    "PNG": ("RGB", "L", "P", "RGBA", "1", "LA"),
    "GIF": ("RGB", "L", "P", "1"),
    "BMP": ("RGB", "L", "P", "1"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("RGB", "L", "P", "1"),
}
_HEADERS = {"PNG": 33, "GIF": 13 + 768 + 11, "BMP": 54 + 1024, "WEBP": 30, "TIFF": 8}
"""Bytes from which on files are damaged: not in the headers, nor in the palettes of GIF and BMP."""


def _drawn(generator: np.random.Generator, form: str) -> bytes:
    height, width = generator.integers(1, 60, 2).tolist()
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 3, y * 5, x + y], -1)
    pixels += generator.integers(0, int(generator.choice([1, 40])), pixels.shape)
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    picture = picture.convert(str(generator.choice(_MODES[form])))
    memory = io.BytesIO()
    if form == "PNG":
        picture.save(memory, form, compress_level=int(generator.integers(10)))
    elif form == "GIF":
        more = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)] * int(generator.integers(2))
        picture.save(
            memory,
            form,
            interlace=int(generator.integers(2)),
            save_all=bool(more),
            append_images=more,
        )
    elif form == "WEBP":
        picture.save(memory, form, lossless=bool(generator.integers(2)))
    elif form == "TIFF":
        codecs = ["tiff_lzw", "tiff_adobe_deflate", "packbits"]
        picture.save(memory, form, compression=str(generator.choice(codecs)))
    else:
        picture.save(memory, form)
    return memory.getvalue()


def _damaged(generator: np.random.Generator, image: bytes, form: str) -> bytes:
    data = bytearray(image)
    first = min(_HEADERS[form], len(data) - 1)
    # The directory of a TIFF is behind its pixels.
    last = int.from_bytes(data[4:8], "little") - 40 if form == "TIFF" else len(data)
    at = int(generator.integers(first, max(last, first + 1)))
    ways = ["flip", "flips", "hole"]
    ways += [] if form == "TIFF" else ["cut", "cut end", "extend", "zeros", "lost"]
    way = str(generator.choice(ways))
    if way == "flip":
        data[at] ^= 1 << int(generator.integers(8))
    elif way == "flips":
        data[at : at + 4] = generator.bytes(len(data[at : at + 4]))
    elif way == "hole":
        data[at : at + 40] = bytes(len(data[at : at + 40]))
    elif way == "cut":
        del data[at:]
    elif way == "cut end":
        del data[max(first, len(data) - int(generator.integers(1, 20))) :]
    elif way in ("extend", "zeros"):
        data += generator.bytes(7) if way == "extend" else bytes(700)
    else:
        del data[at : at + int(generator.integers(1, 20))]
    return bytes(data)


def _verdict(form: str, seed: int) -> str:
    generator = np.random.default_rng(seed)
    image = _damaged(generator, _drawn(generator, form), form)
    expected: npt.NDArray[np.uint8] | None = None
    ours: npt.NDArray[np.uint8] | None = None
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(image)) as picture:
                expected = np.asarray(picture.convert("RGB"))
        except Exception:
            pass  # Of many types.
    try:
        ours = decode_whole(image, "x")
    except DecodeError as error:
        said = str(error)
    if expected is None:
        return "both refuse" if ours is None else f"read {seed}"
    if ours is None:
        return f"refused {seed}: {said}"
    return "same" if np.array_equal(expected, ours) else f"differ {seed}"


def _check(form: str, seeds: range) -> None:
    verdicts = Counter(_verdict(form, seed) for seed in seeds)
    assert set(verdicts) == {"same", "both refuse"}, verdicts


@pytest.mark.parametrize("form", _MODES)
def test_a_damaged_picture_is_read_where_pillow_reads_it(form: str) -> None:
    _check(form, range(120))


@pytest.mark.nightly
@pytest.mark.parametrize("form", _MODES)
def test_and_so_are_many(form: str) -> None:
    _check(form, range(120, 6000))


@pytest.mark.parametrize("form", ["PNG", "BMP"])
def test_a_picture_without_its_end_is_told_and_gives_its_mask(form: str) -> None:
    picture, memory = Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7)), io.BytesIO()
    picture.save(memory, form)
    image = memory.getvalue()[:-1]
    np.testing.assert_array_equal(decode_mask(image, form), np.asarray(picture))
    assert "its pixels are complete" in (WARNINGS.of(form) or "")
    with pytest.raises(DecodeError, match="cannot be decoded"):
        decode_whole(image[:50], "short")


def _lzw_of_old(data: bytes) -> bytes:
    """Codes of 9 bits as programs before TIFF 5.0 wrote them, which begin with the lowest bit."""
    codes = itertools.chain.from_iterable(
        [256, *data[at : at + 200]] for at in range(0, len(data), 200)
    )
    bits = 0
    for number, code in enumerate([*codes, 257]):
        bits |= code << 9 * number
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


@pytest.mark.parametrize("part", range(3))
def test_codes_of_old_tiffs_are_measured(part: int) -> None:
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(part * 100, part * 100 + 100):
        generator = np.random.default_rng(seed)
        height, width = generator.integers(1, 30, 2).tolist()
        body = bytearray(_lzw_of_old(generator.bytes(height * width)))
        if seed % 3:
            body[int(generator.integers(len(body)))] ^= 1 << int(generator.integers(8))
        tags = {256: [width], 257: [height], 258: [8], 259: [5], 262: [1], 277: [1], 278: [height]}
        image = tiff_file("<", False, [bytes(body)], {**tags, 273: [], 279: []})
        by_pillow = pillows(image) is not None
        try:
            decode_whole(image, "x")
            verdicts[by_pillow, True] += 1
        except DecodeError:
            verdicts[by_pillow, False] += 1
    assert set(verdicts) == {(True, True), (False, False)}
