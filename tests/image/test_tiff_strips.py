"""TIFFs of strips and tiles, sound and damaged, compared with Pillow and with their numbers."""

import contextlib
import io
import random
import struct
import zlib
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image.decoder import decode_whole
from dlio.image.segmentation_masks import decode_mask

_CODECS = ("raw", "tiff_adobe_deflate", "tiff_deflate", "tiff_lzw", "packbits")
_SIZES = ((1, 1, 1), (60, 50, 3), (33, 65, 4), (300, 777, 3), (512, 512, 1))


def _tiff(codec: str, size: tuple[int, int, int], seed: int) -> bytes:
    random_numbers = np.random.default_rng(seed)
    steps = random_numbers.integers(-3, 4, size)
    pixels = (np.cumsum(steps, 0) if seed % 2 else steps * 40).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if size[-1] == 1 else pixels).save(
        file, "TIFF", compression=codec
    )
    return file.getvalue()


def _verdict(codec: str, seed: int) -> str:
    draw = random.Random(seed)
    data = bytearray(_tiff(codec, (60, 50, 3), seed))
    for _ in range(4):  # Not in the directory, which is at the end.
        data[draw.randrange(8, len(data) - 300)] ^= 1 << draw.randrange(8)
    expected, actual = None, None
    try:
        with Image.open(io.BytesIO(data)) as picture:
            expected = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError):
        pass
    with contextlib.suppress(DecodeError):
        actual = decode_whole(bytes(data), "a.tif")
    if expected is None or actual is None:
        return "both refuse" if expected is None and actual is None else f"one refuses {seed}"
    return "same" if np.array_equal(expected, actual) else f"differ {seed}"


@pytest.mark.parametrize("codec", _CODECS[1:])
def test_damaged_strips_are_refused_where_pillow_refuses(codec: str) -> None:
    verdicts = Counter(_verdict(codec, seed) for seed in range(40))
    assert set(verdicts) == {"same", "both refuse"}


@pytest.mark.nightly
@pytest.mark.parametrize("codec", _CODECS[1:])
def test_many_damaged_strips(codec: str) -> None:
    verdicts = Counter(_verdict(codec, seed) for seed in range(40, 1000))
    assert set(verdicts) == {"same", "both refuse"}


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("codec", _CODECS)
def test_sound_strips_are_read(codec: str, size: tuple[int, int, int]) -> None:
    for seed in range(2):
        data = _tiff(codec, size, seed)
        with Image.open(io.BytesIO(data)) as picture:
            expected = np.asarray(picture.convert("RGB"))
        assert np.array_equal(decode_whole(data, "a.tif"), expected)


def test_masks_are_checked_as_pictures_are() -> None:
    data = bytearray(_tiff("tiff_lzw", (64, 64, 1), 0))
    data[100:130] = bytes(30)
    with pytest.raises(DecodeError, match=r"a\.tif.*damaged"):
        decode_mask(bytes(data), "a.tif")


def _tiled(numbers: npt.NDArray[Any], tile: tuple[int, int], turn: int, packed: bool) -> bytes:
    """A TIFF of tiles; `numbers` are of shape (height, width, channels)."""
    height, width, channels = numbers.shape
    down, across = tile
    sides = ((0, -height % down), (0, -width % across), (0, 0))
    whole = np.pad(numbers, sides).astype(numbers.dtype.newbyteorder("<"))
    parts = [
        whole[top : top + down, left : left + across].tobytes()
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
    bodies = [zlib.compress(part) if packed else part for part in parts]
    ends = np.cumsum([8, *map(len, bodies)]).tolist()
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [8 * numbers.dtype.itemsize] * channels),
        259: ("H", [8 if packed else 1]),
        262: ("H", [2 if channels > 2 else 1]),
        274: ("H", [turn]),
        277: ("H", [channels]),
        322: ("I", [across]),
        323: ("I", [down]),
        324: ("I", ends[:-1]),
        325: ("I", list(map(len, bodies))),
    }
    if channels in (2, 4):
        tags[338] = ("H", [0])
    rows, extra = b"", b""
    begin = ends[-1] + 2 + 12 * len(tags) + 4
    for tag in sorted(tags):
        letter, values = tags[tag]
        data = struct.pack(f"<{len(values)}{letter}", *values)
        if len(data) > 4:
            place = struct.pack("<I", begin + len(extra))
            extra += data + b"\0" * (len(data) % 2)
        else:
            place = data.ljust(4, b"\0")
        rows += struct.pack("<HHI", tag, {"H": 3, "I": 4}[letter], len(values)) + place
    head = b"II*\0" + struct.pack("<I", ends[-1])
    return b"".join([head, *bodies, struct.pack("<H", len(tags)), rows, b"\0" * 4, extra])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiles_beyond_the_edge_and_small_tiles_are_read(
    dtype: type[Any], channels: int, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    generator = np.random.default_rng(channels)
    for turn in (1, 3, 6, 8):
        height, width = (int(side) for side in generator.integers(1, 70, 2))
        down, across = (16 * int(side) for side in generator.integers(1, 5, 2))
        numbers = generator.integers(0, np.iinfo(dtype).max + 1, (height, width, channels))
        data = _tiled(numbers.astype(dtype), (down, across), turn, packed)
        shown = numbers >> 8 if dtype is np.uint16 else numbers
        shown = np.repeat(shown[..., :1], 3, 2) if channels < 3 else shown[..., :3]
        turned = {1: shown, 3: shown[::-1, ::-1], 6: np.rot90(shown, -1), 8: np.rot90(shown)}[turn]
        actual = decode_whole(data, "a.tif")
        assert actual.shape == turned.shape
        # Colours of 16 bits are rounded, grey ones are cut.
        most = int(dtype is np.uint16 and channels > 2)
        assert np.abs(actual.astype(int) - turned).max() <= most, (turn, height, width)
        if channels == 1 and dtype is np.uint8:
            assert np.array_equal(decode_mask(data, "a.tif"), turned[..., 0])
    assert not caplog.text


def test_tiles_that_are_missing_are_refused() -> None:
    data = _tiled(np.zeros((40, 40, 1), np.uint8), (16, 16), 1, packed=False)
    for wrong in (data[:-40], data.replace(struct.pack("<I", 8 + 256), b"\xff" * 4, 1)):
        with pytest.raises(DecodeError, match="cannot be decoded"):
            decode_whole(wrong, "a.tif")


def test_a_bmp_of_os2_is_read() -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    head = struct.pack("<IHHHH", 12, 8, 5, 1, 24)
    data = b"BM" + struct.pack("<IHHI", 26 + numbers.size, 0, 0, 26) + head + numbers.tobytes()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_whole(data, "a.bmp"), expected)
