"""Crops that are made together are those that are made one by one, with the same errors."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from dlio.errors import DecodeError
from dlio.image import native
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder, decode_all, finish_all
from dlio.image.device_decode import encoded_image as encoded_module
from dlio.image.jpeg import parse_frame
from tests.image.jpegs import KINDS, drawn

CROPS = [
    Crop(40, True, upend=0.5),
    Crop(24, False),
    Crop(31, True, across=50),
    Crop(9, True),  # Of which many are decoded at a fraction.
    Crop(20, True, crops=3),
]


def _images(count: int) -> list[bytes]:
    generator = np.random.default_rng(3)
    images = [drawn(generator, KINDS[k % len(KINDS)], 120) for k in range(count)]
    images[5] = images[5][: len(images[5]) // 2]
    images[9] = b""
    images[14] = b"\xff\xd8 no image"
    return images


def _outs(crop: Crop, count: int) -> npt.NDArray[np.uint8]:
    return np.full((count, *crop.shape), 7, np.uint8)


@pytest.mark.parametrize("crop", CROPS)
def test_many_are_as_one_by_one(crop: Crop) -> None:
    images = _images(60)
    decoder = Decoder(crop, 4)
    uniforms = decoder.draw(2, np.arange(len(images)))
    alone, together = _outs(crop, len(images)), _outs(crop, len(images))
    names = [f"picture {k}" for k in range(len(images))]
    expected: list[object] = []
    for image, name, drawn_numbers, out in zip(images, names, uniforms, alone, strict=True):
        try:
            expected.append(decoder.decode(image, name, drawn_numbers, out))
        except DecodeError as error:
            expected.append(str(error))
    made = decode_all(decoder, images, names, list(uniforms), list(together))
    assert [str(each) if isinstance(each, Exception) else each for each in made] == expected
    assert sum(isinstance(each, str) for each in expected) >= 3
    for k, each in enumerate(made):
        if not isinstance(each, Exception):
            assert np.array_equal(alone[k], together[k]), names[k]


@pytest.mark.parametrize("crop", CROPS)
def test_many_decoded_images_are_cropped_as_one_by_one(crop: Crop) -> None:
    generator = np.random.default_rng(5)
    shapes = [tuple(int(side) for side in generator.integers(20, 200, 2)) for _ in range(30)]
    decoder = Decoder(crop, 4, kept=True)
    images: Sequence[npt.NDArray[np.uint8]] = [
        generator.integers(0, 256, crop.shape if not crop.train else (*shape, 3), np.uint8)
        for shape in shapes
    ]
    uniforms = decoder.draw(0, np.arange(len(images)))
    alone, together = _outs(crop, len(images)), _outs(crop, len(images))
    for image, numbers, out in zip(images, uniforms, alone, strict=True):
        decoder.finish(image, numbers, out)
    finish_all(decoder, images, list(uniforms), list(together))
    assert np.array_equal(alone, together)


def test_most_jpegs_are_made_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.find() is None:
        pytest.skip(native.name())
    images = [drawn(np.random.default_rng(k), "baseline", 90) for k in range(20)]
    decoder = Decoder(Crop(64, True), 0)
    alone: list[object] = []
    monkeypatch.setattr(decoder, "decode", lambda *arguments: alone.append(arguments))
    outs = list(_outs(decoder.crop, 20))
    decode_all(decoder, images, images, list(decoder.draw(0, np.arange(20))), outs)
    assert len(alone) <= 4  # Those that are decoded at a fraction.


def test_markers_are_found_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.find() is None:
        pytest.skip(native.name())
    generator = np.random.default_rng(11)
    images = []
    for k in range(400):
        image = bytearray(drawn(generator, ("baseline", "restarts", "1x2")[k % 3], 60))
        for _ in range(k % 3):
            at = int(generator.integers(len(image) // 2, len(image)))
            image[at] = int(generator.choice([0xFF, 0xD9, 0xD0, 0, 7]))
        images.append(bytes(image[: len(image) - k % 5]))
    frames = [parse_frame(image) for image in images]
    readable = [(image, frame) for image, frame in zip(images, frames, strict=True) if frame]
    complete = [encoded_module._has_its_markers(*each) for each in readable]

    class Without:
        @staticmethod
        def find() -> None:
            return None

    monkeypatch.setattr(encoded_module, "native", Without)
    assert [encoded_module._has_its_markers(*each) for each in readable] == complete
    assert 40 < sum(complete) < 360
