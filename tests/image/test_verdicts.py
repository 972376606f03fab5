"""A verdict about a picture depends on the picture alone: not on the crop, the epoch, the decoder
or the command; and a picture that Pillow reads with a warning is read."""

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dlio
from dlio.errors import DecodeError
from dlio.image import decoder, native
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder, check_image, decode_all, decode_whole
from dlio.image.image_warnings import WARNINGS, ImageWarnings
from dlio_staging.pack_folder import pack, summary
from dlio_staging.verify import verify
from tests.image.jpegs import KINDS, drawn

_STRAY = (0xDA, 0xC4, 0xD9, 0xD8, 0xD3, 0xDB, 0xE0, 0xFE, 0xC0, 0x01)


def _damaged(generator: np.random.Generator, kind: str) -> bytes:
    image = bytearray(drawn(generator, kind, 120))
    for _ in range(int(generator.integers(1, 4))):
        at, way = int(generator.integers(0, len(image))), generator.random()
        if way < 0.5:
            image[at] ^= 1 << int(generator.integers(0, 8))
        elif way < 0.65:
            del image[at : at + int(generator.integers(1, 30))]
        elif way < 0.75:
            del image[max(at, 1) :]
        elif way < 0.9:
            image[at : at + 2] = bytes([255, int(generator.choice(_STRAY))])
        else:
            image[at:at] = generator.integers(0, 256, 20, np.uint8).tobytes()
    return bytes(image)


def _is_read(call: Callable[[], object]) -> bool:
    try:
        call()
    except DecodeError:
        return False
    return True


def _verdicts(image: bytes, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Decode the whole and crops of many sizes and places, with both decoders."""
    verdicts = set()
    for size in (0, 8, 40):
        for with_native in (True, False):
            with monkeypatch.context() as context:
                if not with_native:
                    context.setattr(native, "find", lambda: None)
                if not size:
                    verdicts.add(_is_read(lambda: decode_whole(image, "x")))
                    verdicts.add(_is_read(lambda: check_image(image, "x")))
                    continue
                crops = Decoder(Crop(size, True), seed=1)
                for row in crops.draw(0, np.arange(5)):
                    out = np.empty((size, size, 3), np.uint8)
                    made = decode_all(crops, [image], ["x"], [row], [out])[0]
                    assert not isinstance(made, Exception) or isinstance(made, DecodeError)
                    verdicts.add(not isinstance(made, Exception))
    return verdicts


def _compare(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(seed)
    unlike = {"refused": 0, "read": 0}
    for k in range(count):
        kind = KINDS[k % len(KINDS)]
        image = _damaged(generator, kind)
        verdicts = _verdicts(image, monkeypatch)
        assert len(verdicts) == 1, f"seed {seed}, image {k}, {kind}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Image.open(io.BytesIO(image)).convert("RGB")
                by_pillow = True
            except (OSError, SyntaxError, ValueError):
                by_pillow = False
        if verdicts != {by_pillow}:
            unlike["refused" if by_pillow else "read"] += 1
    # Pillow reads some without an end, by where its buffers end; OpenCV reads CMYK that it refuses.
    assert unlike["refused"] <= count * 0.03
    assert unlike["read"] <= count * 0.06


def test_the_verdict_about_a_jpeg_does_not_depend_on_the_part_that_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compare(1, 70, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 8))
def test_nor_do_those_about_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(seed, 1400, monkeypatch)


def _photo(quality: int = 90) -> bytes:
    generator = np.random.default_rng(0)
    y, x = np.mgrid[0:300, 0:400]
    waves = np.stack([128 + 80 * np.sin(x / 17), 128 + 80 * np.cos(y / 13), x / 2], -1)
    noisy = waves + generator.integers(0, 20, waves.shape)
    memory = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(memory, "JPEG", quality=quality)
    return memory.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine pictures: six sound ones, two that Pillow reads with a warning, and a cut one."""
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    good = _photo()
    half = len(good) // 2
    (tmp_path / "data" / "a").mkdir(parents=True)
    images = {f"{k}.jpg": good for k in range(6)}
    images["extra.jpg"] = good[:-2] + bytes(range(1, 129)) * 2 + good[-2:]
    images["hole.jpg"] = good[:half] + good[half + 500 :]
    images["cut.jpg"] = good[:half]
    for name, data in images.items():
        (tmp_path / "data" / "a" / name).write_bytes(data)
    return tmp_path / "data"


@pytest.mark.parametrize("tiers", ["none", "ram:64MiB", "ram:64MiB:decoded"])
@pytest.mark.parametrize("with_native", [True, False])
def test_the_same_samples_are_left_out_in_every_epoch(
    folder: Path, tiers: str, with_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_native:
        monkeypatch.setattr(native, "find", lambda: None)
    with (
        dlio.open(str(folder), tiers=tiers, image_size=64, on_error="skip") as data,
        dlio.DataLoader(data, 3, True) as loader,
    ):
        for epoch in range(8):
            loader.set_epoch(epoch)
            assert sum(len(images) for images, _ in loader) == 8
            assert set(loader.stats()["skipped"]) == {"a/cut.jpg"}


def test_all_commands_agree_and_verify_counts_the_warnings(folder: Path, tmp_path: Path) -> None:
    checked = verify(str(folder))
    assert [line.partition(" ")[0] for line in checked.damaged] == ["a/cut.jpg"]
    assert [line.partition(":")[0] for line in checked.warned] == ["a/extra.jpg", "a/hole.jpg"]
    packing = pack(str(folder), str(tmp_path / "packed"))
    assert packing.undecodable == 1
    assert "1 sample(s) have an image that cannot be decoded" in summary("packed", packing)
    packed = verify(str(tmp_path / "packed"))
    assert [line.partition(" ")[0] for line in packed.damaged] == ["a/cut.jpg"]
    assert (packed.samples, len(packed.warned)) == (8, 2)


def test_the_first_picture_with_a_warning_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kept = ImageWarnings()
    with caplog.at_level(logging.WARNING, "dlio"):
        kept.note("a.jpg", "Corrupt JPEG data")
        kept.note("b.jpg", "Corrupt JPEG data")
    assert [record.getMessage().partition(" is")[0] for record in caplog.records] == ["a.jpg"]
    assert kept.of("b.jpg") == "Corrupt JPEG data"
    assert kept.of("c.jpg") is None


def test_a_damaged_crop_has_the_pixels_of_the_damaged_whole() -> None:
    good = _photo()
    half = len(good) // 2
    image = good[:half] + good[half + 500 :]
    whole = decode_whole(image, "whole")
    assert WARNINGS.of("whole") is not None
    crops = Decoder(Crop(64, True), seed=3)
    for row in crops.draw(0, np.arange(12)):
        box = crops.crop.box(300, 400, row.tolist())
        out, again = np.empty((2, 64, 64, 3), np.uint8)
        crops.decode(image, "x", row, out)
        if crops.factor(box) == 1:
            decoder._resize(whole, box, again)
            assert np.array_equal(out, again)
