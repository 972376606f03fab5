"""A verdict about a picture depends on the picture alone: not on the crop, the epoch, the decoder
or the command; and a picture that Pillow reads with a warning is read."""

import io
import json
import logging
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dlio
from dlio.data.schema import Schema
from dlio.errors import DecodeError
from dlio.image import decoder, native
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder, check_image, decode_all, decode_whole
from dlio.image.image_warnings import WARNINGS, ImageWarnings
from dlio_staging.pack_folder import pack, summary
from dlio_staging.sample_check import SampleCheck
from dlio_staging.verify import VerifyOptions, command, verify
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
    assert "1 sample packed with an image that cannot be decoded" in summary("packed", packing)
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


# Inputs of several kinds, and all commands


def _picture(form: str = "PNG", **options: Any) -> bytes:
    memory = io.BytesIO()
    frame = Image.new("RGB", (24, 20), (200, 30, 30))
    if options.pop("frames", 1) > 1:
        options |= {"save_all": True, "append_images": [Image.new("RGB", (24, 20))]}
    frame.save(memory, form, **options)
    return memory.getvalue()


def _floats() -> bytes:
    memory = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 480, dtype=np.float32).reshape(20, 24)).save(memory, "TIFF")
    return memory.getvalue()


def _unpadded() -> bytes:
    memory = io.BytesIO()
    Image.new("RGB", (23, 20), (200, 30, 30)).save(memory, "BMP")
    return memory.getvalue()[:-3]


VERDICTS = {
    "sound.png": (_picture(), "sound"),
    "floats.tif": (_floats(), "warned"),
    "animated.webp": (_picture("WEBP", frames=2, lossless=True), "warned"),
    "animated.jpg": (_picture("GIF", frames=2), "warned"),
    "still.jpg": (_picture("GIF"), "sound"),
    "pages.tiff": (_picture("TIFF", frames=2), "warned"),
    "page.tiff": (_picture("TIFF"), "sound"),
    "surplus.jpg": (_photo()[:-2] + bytes(range(1, 129)) * 2 + b"\xff\xd9", "warned"),
    "cut.jpg": (_photo()[:3000], "refused"),
    "cut.png": (_picture()[:60], "refused"),
    "endless.png": (_picture()[:-12], "warned"),
    "endless.jpg": (_picture("GIF")[:-2], "warned"),
    "unpadded.bmp": (_unpadded(), "warned"),
    "avif.jpg": (b"\0\0\0\x20ftypavif" + bytes(40), "refused"),
    "text.png": (b"<!DOCTYPE html><html></html>", "refused"),
}
"""Files and their verdicts: sound, warned (read with a warning), refused."""


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_a_verdict_is_the_same_for_all_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    data, verdict = VERDICTS[name]
    (tmp_path / "data" / "a").mkdir(parents=True)
    for k in range(3):
        (tmp_path / "data" / "a" / f"{k}.png").write_bytes(_picture())
    (tmp_path / "data" / "a" / f"x{name}").write_bytes(data)
    refused, warned = int(verdict == "refused"), int(verdict == "warned")
    packing = pack(str(tmp_path / "data"), str(tmp_path / "packed"))
    assert packing.undecodable == refused
    for path in (tmp_path / "data", tmp_path / "packed"):
        checked = verify(str(path))
        assert (len(checked.damaged), len(checked.warned)) == (refused, warned)
        for tiers in ("none", "ram:64MiB:decoded"):
            with (
                dlio.open(str(path), tiers=tiers, image_size=16, on_error="skip") as opened,
                dlio.DataLoader(opened, 2, True) as loader,
            ):
                for epoch in range(3):
                    loader.set_epoch(epoch)
                    assert sum(len(images) for images, _ in loader) == 4 - refused
                    stats = loader.stats()
                    # A crop need not show the warning of a JPEG, which `verify` has found here.
                    assert (len(stats["skipped"]), len(stats["warned"])) == (refused, warned)


def test_verify_checks_masks_and_texts_as_the_loader_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    for folder in ("images", "masks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    masks = {
        "0": Image.new("L", (24, 20), 3),
        "1": Image.fromarray(np.arange(1440, dtype=np.uint32).astype(np.uint8).reshape(20, 24, 3)),
        "2": Image.new("L", (20, 20), 3),
    }
    for name, mask in masks.items():
        (tmp_path / "data" / "images" / f"{name}.png").write_bytes(_picture())
        mask.save(tmp_path / "data" / "masks" / f"{name}.png")
    checked = verify(str(tmp_path / "data"))
    assert len(checked.damaged) == 2
    assert "is in colour" in checked.damaged[0] + checked.damaged[1]
    assert "make them agree" in checked.damaged[0] + checked.damaged[1]
    assert pack(str(tmp_path / "data"), str(tmp_path / "packed")).undecodable == 2
    with (
        dlio.open(str(tmp_path / "data"), image_size=8, tiers="none", on_error="skip") as data,
        dlio.DataLoader(data, 3) as loader,
    ):
        assert sum(len(images) for images, _ in loader) == 1
        assert len(loader.stats()["skipped"]) == 2


def test_verify_says_what_a_data_set_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in [*(f"{k}.txt" for k in range(6)), "5.json"]:
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
    for _ in range(2):  # Also when the index comes from the cache.
        assert len(verify(str(path)).notices) == 1
    command(VerifyOptions(str(path)))
    shown = capsys.readouterr().out
    assert "warning: " in shown
    assert "has json in 1 of its 6 samples" in shown
    assert "1 warning about the whole" in shown
    assert "all sound" not in shown
    command(VerifyOptions(str(path), as_json=True))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["samples"], len(printed["notices"]), printed["damaged"]) == (6, 1, [])


def test_pictures_of_one_name_have_warnings_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    counts = []
    for split, name in (("one", "animated.jpg"), ("two", "still.jpg")):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "0.jpg").write_bytes(VERDICTS[name][0])
        with (
            dlio.open(str(tmp_path / split), image_size=16, tiers="none") as data,
            dlio.DataLoader(data, 1) as loader,
        ):
            list(loader)
            counts.append(loader.stats()["warned"])
    assert counts == [["a/0.jpg"], []]


def test_crops_warn_of_no_picture_without_a_warning_as_a_whole() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    shown = 0
    for number, rows in enumerate((0, 0, 1, 1)):
        memory = io.BytesIO()
        more: dict[str, Any] = {"restart_marker_rows": rows} if rows else {}
        Image.fromarray(noise).save(memory, "JPEG", quality=80, **more)
        holed = bytearray(memory.getvalue())
        if number % 2:
            at = len(holed) * 3 // 5
            holed[at : at + 64] = bytes(64)
        whole = f"{number} whole"
        decode_whole(bytes(holed), whole)
        for epoch in range(12):
            name = f"{number} crop {epoch}"
            made = Decoder(Crop(32, True), seed=1)
            uniforms = made.draw(epoch, np.array([0]))[0]
            made.decode(bytes(holed), name, uniforms, np.empty((32, 32, 3), np.uint8))
            shown += WARNINGS.of(name) is not None
            assert WARNINGS.of(name) is None or WARNINGS.of(whole) is not None
        assert (WARNINGS.of(whole) is not None) == bool(number % 2)
    assert shown


def test_packing_asks_native_code_alone_about_sound_jpegs_and_about_no_others() -> None:
    if native.find() is None:
        pytest.skip("the native library is not in use")
    files = sorted(VERDICTS)
    schema = Schema((("image", "image"),))
    check = SampleCheck(schema, check_image)
    images = [_photo(), *(VERDICTS[name][0] for name in files), _photo()]
    doubtful = set(check.doubtful([schema.join({"image": image}) for image in images]))
    assert doubtful.isdisjoint({0, len(images) - 1})
    assert {k for k, name in enumerate(files, 1) if VERDICTS[name][1] == "refused"} <= doubtful
