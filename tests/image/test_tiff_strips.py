"""Damage within compressed TIFFs, compared with Pillow."""

import contextlib
import io
import random
from collections import Counter

import numpy as np
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
