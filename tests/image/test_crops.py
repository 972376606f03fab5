"""Several crops of one image are those of one decoding for each, from one decoding for all."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFile

from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.errors import UsageError
from dlio.image import decoder, native
from dlio.image.crop import DRAWS, Box, Crop, are_near, enclosing
from dlio.image.decoder import Decoder
from tests.image.jpegs import KINDS, drawn

U8 = npt.NDArray[np.uint8]
FORMATS = ("PNG", "BMP", "TIFF", "WEBP", "PPM")


def _together(image: bytes, crop: Crop, uniforms: Any, kept: bool = False) -> U8:
    out = np.empty(crop.shape, np.uint8)
    Decoder(crop, 0, kept).decode(image, "x", uniforms, out)
    return out


def _alone(image: bytes, crop: Crop, uniforms: Any, kept: bool = False) -> U8:
    """The same crops, each of a decoding of its own."""
    single = Crop(crop.size, True, crop.scale, across=crop.across, upend=crop.upend)
    rows = [uniforms[k * DRAWS : (k + 1) * DRAWS] for k in range(crop.crops)]
    return np.stack([_together(image, single, row, kept) for row in rows])


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(height, factor) of each decoding of a JPEG from now on."""
    calls: list[tuple[int, int]] = []
    before = decoder._decode_jpeg

    def counting(image: Any, name: Any, size: Any, box: Box, factor: int) -> Any:
        calls.append((box.height, factor))
        return before(image, name, size, box, factor)

    monkeypatch.setattr(decoder, "_decode_jpeg", counting)
    return calls


def _jpeg(height: int, width: int, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    memory = io.BytesIO()
    Image.fromarray(noise).save(memory, "JPEG", quality=90)
    return memory.getvalue()


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_jpegs_are_those_of_one_decoding_for_each(
    kind: str, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(native, "find", lambda: None)
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 21)  # Pillow's buffer for encoded noise.
    generator = np.random.default_rng(KINDS.index(kind))
    calls = _counted(monkeypatch)
    factors = set()
    for _ in range(30):
        image = drawn(generator, kind, 300)
        low = float(generator.choice([0.01, 0.3]))
        crop = Crop(
            int(generator.integers(4, 60)),
            True,
            (low, min(1.0, 8 * low)),
            across=int(generator.integers(4, 60)),
            upend=0.5,
            crops=int(generator.integers(2, 6)),
        )
        uniforms = generator.random(crop.draws)
        made = _together(image, crop, uniforms)
        factors |= {factor for _, factor in calls}
        assert np.array_equal(made, _alone(image, crop, uniforms))
    assert len(factors) >= (0 if kind in ("cmyk", "1x2") else 3)


@pytest.mark.parametrize("kind", [*FORMATS, "JPEG"])
@pytest.mark.parametrize("kept", [True, False])
def test_pixels_of_other_formats_and_of_decoded_tiers(kind: str, kept: bool) -> None:
    generator = np.random.default_rng(1)
    for k in range(4):
        sides = (*generator.integers(20, 200, 2).tolist(), 3)
        picture = Image.fromarray(generator.integers(0, 256, sides, np.uint8).astype(np.uint8))
        memory = io.BytesIO()
        picture.save(memory, kind)
        crop = Crop(24, True, crops=3)
        uniforms = Decoder(crop, 0).draw(0, np.array([k]))[0]
        made = _together(memory.getvalue(), crop, uniforms, kept)
        assert np.array_equal(made, _alone(memory.getvalue(), crop, uniforms, kept))
        assert not np.array_equal(made[0], made[1])


def test_the_first_crop_is_the_one_that_is_drawn_alone() -> None:
    samples = np.arange(50)
    one, many = (Decoder(Crop(32, True, crops=n), 7).draw(3, samples) for n in (1, 5))
    assert np.array_equal(one, many[:, :DRAWS])
    flips = many.reshape(50, 5, DRAWS)[..., -2]
    assert np.abs(np.corrcoef(flips.T) - np.eye(5)).max() < 0.5


def test_near_crops_take_one_decoding_and_distant_ones_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _counted(monkeypatch)
    crop = Crop(60, True, (0.3, 1.0), crops=4)
    for k in range(10):
        image = _jpeg(90, 110, k)
        _together(image, crop, Decoder(crop, 0).draw(0, np.array([k]))[0])
    assert len(calls) == 10
    # Two small parts, at the upper and the lower end of a picture that is mostly height.
    uniforms = np.full(2 * DRAWS, 0.5)
    uniforms[DRAWS - 4] = 0.0
    uniforms[2 * DRAWS - 4] = 0.999
    small, tall = Crop(40, True, (0.02, 0.02), crops=2), _jpeg(1800, 64)
    calls.clear()
    _together(tall, small, uniforms)
    by_library = native.find() is not None
    assert [height for height, _ in calls] == ([48, 48] if by_library else [1799])
    calls.clear()
    monkeypatch.setattr(native, "find", lambda: None)
    _together(tall, small, uniforms)  # Other decoders have to go through all rows anyway.
    assert len(calls) == 1


def test_a_crop_that_ends_with_what_is_decoded_is_decoded_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At an eighth it would have six rows of pixels, if the image was decoded below its five.
    ending, larger = Box(12, 0, 28, 32, False), Box(0, 0, 64, 64, False)
    monkeypatch.setattr(Crop, "box", lambda _, h, w, row: larger if row[0] else ending)
    memory = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(memory, "JPEG", subsampling="4:4:4")
    calls = _counted(monkeypatch)
    crop, uniforms = Crop(3, True, crops=3), np.repeat([0.0, 1.0, 1.0], DRAWS)
    made = _together(memory.getvalue(), crop, uniforms)
    assert calls == [(64, 8), (28, 8)]
    assert np.array_equal(made, _alone(memory.getvalue(), crop, uniforms))


def test_a_file_of_another_format_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    before = decoder._decode_other

    def counting(*args: Any) -> Any:
        calls.append(args)
        return before(*args)

    monkeypatch.setattr(decoder, "_decode_other", counting)
    memory = io.BytesIO()
    Image.new("RGB", (70, 50)).save(memory, "PNG")
    crop = Crop(16, True, crops=6)
    _together(memory.getvalue(), crop, np.random.default_rng(0).random(crop.draws))
    assert len(calls) == 1


def test_what_encloses_distant_parts_costs_more_than_passing_rows_again() -> None:
    upper, lower = Box(0, 0, 50, 50, False), Box(60, 50, 40, 50, True)
    assert enclosing([upper, lower]) == Box(0, 0, 100, 100, False)
    assert are_near([upper, upper], 1000)
    assert are_near([upper, lower], 150)
    # 5,500 pixels in vain at 2.3 ns, or 50 rows of 100 pixels again at 1.8 ns.
    assert not are_near([upper, lower], 100)


def test_called_with_a_picture_it_returns_all_crops() -> None:
    pixels = torch.randint(0, 256, (3, 60, 80), dtype=torch.uint8)
    many = T.RandomResizedCrop((20, 30), crops=3)
    assert "crops=3" in repr(many)
    torch.manual_seed(0)
    made = many(pixels)
    torch.manual_seed(0)
    one = T.RandomResizedCrop((20, 30))
    assert torch.equal(made, torch.stack([one(pixels) for _ in range(3)]))
    assert many(pixels.expand(4, 3, 60, 80)).shape == (3, 4, 3, 20, 30)
    images = many(Image.new("RGB", (80, 60)))
    assert [image.size for image in images] == [(30, 20)] * 3
    flips = T.Compose([T.Compose([many]), T.RandomHorizontalFlip(), T.ToTensor()])
    mirrored = flips(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
    assert mirrored.shape == (3, 3, 20, 30)
    assert mirrored.dtype == torch.float32


def test_steps_behind_several_crops_draw_for_each() -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(3, 32, 32)
    whole = T.RandomResizedCrop(32, (1, 1), (1, 1), crops=64)
    made = T.Compose([whole, T.RandomHorizontalFlip()])(ramp)
    mirrored = [bool(image[0, 0, 0] > image[0, 0, -1]) for image in made]
    assert 10 < sum(mirrored) < 54


@pytest.mark.parametrize("crops", [0, -1, 1.5, "2", 257])
def test_a_wrong_number_of_crops_is_an_error(crops: Any) -> None:
    with pytest.raises(UsageError, match="crops="):
        T.RandomResizedCrop(8, crops=crops)
