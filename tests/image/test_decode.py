"""Crops are torchvision's, pixels are the picture's, and damage is an error with a name."""

import io
import math
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image import decoder
from dlio.image.crop import Box, Crop
from dlio.image.decoder import Decoder, decode_whole
from dlio.image.image_warnings import WARNINGS


def _picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, so that two decoders and two resizers agree."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8).astype(np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def _encoded(picture: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    memory = io.BytesIO()
    if kind == "JPEG":
        options = {"quality": 95, **options}
    picture.save(memory, kind, **options)
    return memory.getvalue()


def _decode(
    image: bytes, size: int = 64, train: bool = True, sample: int = 0, epoch: int = 0
) -> npt.NDArray[np.uint8]:
    decoder = Decoder(Crop(size, train), seed=1)
    out = np.empty((size, size, 3), np.uint8)
    uniforms = decoder.draw(epoch, np.array([sample], np.int64))[0]
    decoder.decode(image, "name.jpg", uniforms, out)
    return out


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (90, 70), (40, 30), (1200, 1600), (500, 60), (17, 900)]
)
def test_pixels_are_those_of_pillow(height: int, width: int, train: bool) -> None:
    picture = _picture(height, width)
    image = _encoded(picture, subsampling="4:4:4")
    decoder = Decoder(Crop(64, train), seed=1)
    for sample in range(8):
        uniforms = decoder.draw(0, np.array([sample]))[0]
        box = decoder.crop.box(height, width, uniforms.tolist())
        area = (box.left, box.top, box.left + box.width, box.top + box.height)
        expected = picture.crop(area).resize((64, 64), Image.Resampling.BILINEAR)
        if box.flip:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        out = np.empty((64, 64, 3), np.uint8)
        decoder.decode(image, "x", uniforms, out)
        assert np.abs(out.astype(int) - np.asarray(expected).astype(int)).mean() < 5


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_decoding_only_down_to_the_crop_changes_no_pixel(
    subsampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (301, 333, 3), np.uint8)
    image = _encoded(Image.fromarray(noise), subsampling=subsampling)
    saved = [_decode(image, sample=k) for k in range(20)]
    size = (301, 333)
    lowered = [
        decoder._smaller(image, size, Box(0, 0, rows, 5, False)).height
        for rows in (1, 100, 280, 301)
    ]
    assert lowered[0] <= 16
    assert lowered[-1] == 301
    monkeypatch.setattr(
        decoder, "_smaller", lambda image, size, _: decoder._PartialJpeg(image, *size)
    )
    assert all(np.array_equal(_decode(image, sample=k), saved[k]) for k in range(20))


def test_pixels_depend_on_seed_epoch_and_sample_alone() -> None:
    images = [_encoded(_picture(200 + k, 260, k)) for k in range(24)]
    decoder = Decoder(Crop(32, True), seed=5)
    together = np.empty((24, 32, 32, 3), np.uint8)
    uniforms = decoder.draw(3, np.arange(24))

    def work(first: int) -> None:
        for k in range(first, 24, 4):
            decoder.decode(images[k], "x", uniforms[k], together[k])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in (23, 0, 7):
        alone = np.empty((32, 32, 3), np.uint8)
        decoder.decode(images[k], "x", decoder.draw(3, np.array([k]))[0], alone)
        assert np.array_equal(alone, together[k])
    assert not np.array_equal(_decode(images[0], epoch=0), _decode(images[0], epoch=1))


def test_crops_are_distributed_as_torchvisions() -> None:
    n, height, width = 20_000, 300, 400
    decoder = Decoder(Crop(224, True), seed=0)
    boxes = [decoder.crop.box(height, width, row.tolist()) for row in decoder.draw(0, np.arange(n))]
    generator = np.random.default_rng(7)
    reference = [_torchvision_crop(generator, height, width) for _ in range(n)]
    ours = np.array([(b.top, b.left, b.height, b.width) for b in boxes])
    theirs = np.array(reference)
    for column in range(4):
        assert _kolmogorov_smirnov(ours[:, column], theirs[:, column]) < 1.95 * math.sqrt(2 / n)
    areas, other = ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]
    assert _kolmogorov_smirnov(areas, other) < 1.95 * math.sqrt(2 / n)
    assert np.mean([box.flip for box in boxes]) == pytest.approx(0.5, abs=0.015)
    assert (ours[:, 0] + ours[:, 2]).max() == height
    assert (ours[:, 1] + ours[:, 3]).max() == width


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1)])
def test_images_that_no_crop_fits_give_their_middle(height: int, width: int) -> None:
    decoder = Decoder(Crop(8, True), seed=0)
    box = decoder.crop.box(height, width, [0.999] * 24)
    assert 0 < box.height <= height
    assert 0 < box.width <= width
    assert abs(2 * box.top + box.height - height) <= 1
    assert abs(2 * box.left + box.width - width) <= 1


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "TIFF", "PPM"])
def test_other_formats_are_read(kind: str) -> None:
    picture = _picture(120, 90)
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode_whole(_encoded(picture, kind, **options), "x")
    assert np.array_equal(pixels, np.asarray(picture))


def test_grey_and_cmyk_and_progressive_jpegs_become_rgb() -> None:
    picture = _picture(120, 90)
    assert (_decode(_encoded(picture.convert("L"))).std(axis=2) == 0).all()
    assert _decode(_encoded(picture.convert("CMYK"))).shape == (64, 64, 3)
    plain = _decode(_encoded(picture)).astype(int)
    assert np.abs(_decode(_encoded(picture, progressive=True)).astype(int) - plain).mean() < 1


def test_a_jpeg_of_rare_subsampling_is_read_as_opencv_reads_it() -> None:
    memory = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 90, 90)).save(memory, "JPEG", subsampling="4:4:4")
    data = bytearray(memory.getvalue())
    data[data.index(b"\xff\xc0") + 11] = 0x14  # 4:4:1, for which simplejpeg raises KeyError.
    pixels = decode_whole(bytes(data), "rare")
    assert pixels.shape == (64, 64, 3)
    assert (pixels[:8, :8] == 90).all()


@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_jpeg_is_refused_wherever_it_ends(progressive: bool) -> None:
    image = _encoded(_picture(200, 200), progressive=progressive)
    for length in [0, 1, 2, 3, 20, *range(50, len(image) - 1, 97), len(image) - 2]:
        for sample in range(3):
            with pytest.raises(DecodeError, match=r"name.jpg cannot be decoded.*--on-error skip"):
                _decode(image[:length], sample=sample)


@pytest.mark.parametrize(
    "options", [{}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 5}, {"progressive": True}]
)
def test_holes_in_a_jpeg_are_read_with_a_warning_and_hide_no_truncation(
    options: dict[str, Any],
) -> None:
    """A lost sector desynchronises the Huffman decoder, which ends too early or too late."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    image = _encoded(Image.fromarray(noise), **options)
    warned = 0
    for percent in range(10, 90, 4):
        holed = bytearray(image)
        at = len(image) * percent // 100
        holed[at : at + 512] = bytes(512)
        with pytest.raises(DecodeError):
            decode_whole(bytes(holed[: max(at + 600, len(image) * 95 // 100)]), "x")
        pixels = decode_whole(bytes(holed), f"{options} {percent}")
        wanted = np.asarray(Image.open(io.BytesIO(holed)).convert("RGB"))
        assert np.abs(pixels[:16].astype(int) - wanted[:16]).mean() < 40  # Above the hole.
        warned += WARNINGS.of(f"{options} {percent}") is not None
    assert warned >= 14


def test_restart_markers_are_decoded_and_cut_short_as_other_jpegs() -> None:
    picture = _picture(200, 200)
    image = _encoded(picture, restart_marker_rows=1)
    assert np.array_equal(_decode(image), _decode(_encoded(picture)))
    for length in range(50, len(image) - 1, 97):
        with pytest.raises(DecodeError):
            _decode(image[:length])


def test_damage_is_told_by_the_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    for kind in ("PNG", "TIFF", "WEBP"):
        image = _encoded(_picture(120, 90), kind)
        with pytest.raises(DecodeError):
            _decode(image[: len(image) // 2])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_has_the_size_that_it_is_decoded_to(orientation: int) -> None:
    turned = Image.Exif()
    turned[0x112] = orientation
    image = _encoded(_picture(30, 50), "TIFF", exif=turned)
    wanted = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    assert np.array_equal(decode_whole(image, "name.tif"), wanted)
    assert decoder.image_size(image, "name.tif") == wanted.shape[:2]


def test_bytes_behind_the_end_do_no_harm() -> None:
    image = _encoded(_picture(100, 100))
    assert np.array_equal(_decode(image + b"more"), _decode(image))


@pytest.mark.parametrize("image", [b"", b"hello", bytes(100), b"\x89PNG\r\n\x1a\n", b"GIF89a" * 9])
def test_what_is_no_image_is_refused(image: bytes) -> None:
    with pytest.raises(DecodeError, match=r"name\.jpg cannot be decoded"):
        _decode(image)


def test_an_image_too_large_is_refused_by_its_header() -> None:
    image = bytearray(_encoded(_picture(64, 64)))
    at = image.index(b"\xff\xc0")
    image[at + 5 : at + 9] = b"\xff\x00\xff\x00"
    with pytest.raises(DecodeError, match="65280 x 65280 pixels"):
        _decode(bytes(image))
    png = bytearray(_encoded(_picture(64, 64), "PNG"))
    png[16:24] = b"\x00\x01\x00\x00" * 2
    with pytest.raises(DecodeError, match="65536 x 65536 pixels"):
        _decode(bytes(png))
    for order, kind in (("<", 4), (">", 4), ("<", 3), (">", 3)):
        head = struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, 8, 4)
        value = "I" if kind == 4 else "H2x"
        tags = {256: 60_000, 257: 60_000, 259: 1, 262: 1}  # Of 8 bits, black is 0.
        rows = [struct.pack(order + "HHI" + value, tag, kind, 1, of) for tag, of in tags.items()]
        with pytest.raises(DecodeError, match="60000 x 60000 pixels"):
            _decode(head + b"".join(rows) + bytes(64))


def test_real_photographs_decode_as_pillow_has_them(imagenet: Path) -> None:
    for number, file in enumerate(sorted(imagenet.glob("*/*"))[:60]):
        image = file.read_bytes()
        decoder = Decoder(Crop(224, False), seed=0)
        out = np.empty((224, 224, 3), np.uint8)
        decoder.decode(image, file.name, np.empty(0), out)
        picture = Image.open(file).convert("RGB")
        box = decoder.crop.box(picture.height, picture.width, [])
        area = (box.left, box.top, box.left + box.width, box.top + box.height)
        expected = np.asarray(picture.resize((224, 224), Image.Resampling.BILINEAR, area))
        difference = np.abs(out.astype(int) - expected.astype(int)).mean()
        assert difference < 12, f"{number}: {file.name}"


def _torchvision_crop(
    generator: np.random.Generator, height: int, width: int
) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params of torchvision, for images that a try always fits."""
    while True:
        area = height * width * generator.uniform(0.08, 1.0)
        aspect = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(generator.integers(0, height - h + 1))
            left = int(generator.integers(0, width - w + 1))
            return top, left, h, w


def _kolmogorov_smirnov(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    """Largest distance between two empirical distributions."""
    grid = np.unique(np.concatenate([a, b]))
    one = np.searchsorted(np.sort(a), grid, side="right") / len(a)
    two = np.searchsorted(np.sort(b), grid, side="right") / len(b)
    return float(np.abs(one - two).max())


@pytest.mark.cold
def test_threads_may_load_opencv_at_once_and_leave_no_variables_of_it() -> None:
    script = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
from dlio.image.decoder import opencv
before = dict(os.environ)
together = threading.Barrier(16)
def load(_):
    together.wait()
    opencv()
with ThreadPoolExecutor(16) as pool:
    list(pool.map(load, range(16)))
print({name for name in before.keys() ^ os.environ.keys() if "OPENCV" in name})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr
