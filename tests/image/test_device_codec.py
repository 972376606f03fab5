"""Decoding on a device, by nvImageCodec's CPU backend: pixels, errors and the order of work."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from dlio.errors import DecodeError, DlioError
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder, decode_whole
from dlio.image.device_decode import jpeg_codec as codec_module
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.device_decode.encoded_image import EncodedImage, encoded, header_of
from dlio.image.device_decode.jpeg_codec import DecodedCrops, HostQueue, JpegCodec
from dlio.image.device_decode.nvimagecodec import NvImageCodec, PixelBuffer, is_installed
from tests.image.jpegs import KINDS, drawn

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="nvImageCodec is not installed (extra gpu)"
)
HOST = torch.device("cpu")
TAKEN = ("baseline", "restarts", "rows", "lengths", "1x2")
"""Kinds of JPEGs that a device decodes."""


def _encoded(image: bytes, decoder: Decoder, number: int) -> EncodedImage:
    header = header_of(image)
    assert header is not None
    uniforms = decoder.draw(0, np.array([number]))[0].tolist()
    return encoded(image, header, decoder, uniforms, "a picture")


def _crops(codec: JpegCodec, images: Sequence[EncodedImage], decoder: Decoder) -> DecodedCrops:
    crops = decoder.crop.crops
    rows = [range(k * crops, (k + 1) * crops) for k in range(len(images))]
    size = decoder.crop.size, decoder.crop.width
    return codec.crops(images, rows, size, {}, len(images) * crops)


def _by_cpu(image: bytes, decoder: Decoder, number: int) -> npt.NDArray[np.int64]:
    out = np.empty(decoder.crop.shape, np.uint8)
    decoder.decode(image, "a picture", decoder.draw(0, np.array([number]))[0], out)
    return out.reshape(-1, *out.shape[-3:]).astype(np.int64)


@pytest.mark.parametrize(
    "crop", [Crop(40, True), Crop(24, False), Crop(48, True, across=31, crops=3)]
)
def test_pixels_are_the_cpu_decoders(crop: Crop) -> None:
    rng, decoder = np.random.default_rng(0), Decoder(crop, 5)
    images: list[bytes] = []
    while len(images) < 100:
        image = drawn(rng, TAKEN[len(images) % len(TAKEN)], 90)
        frame = header_of(image)
        assert frame is not None
        uniforms = decoder.draw(0, np.array([len(images)]))[0].tolist()
        boxes = crop.boxes(frame.frame.height, frame.frame.width, uniforms)
        if all(decoder.factor(box) == 1 for box in boxes):
            images.append(image)
    codec = JpegCodec(HOST, 1, 1, 60)
    made = _crops(codec, [_encoded(image, decoder, k) for k, image in enumerate(images)], decoder)
    codec.close()
    assert not made.failed
    assert not made.by_cpu
    pixels = made.crops.permute(0, 2, 3, 1).numpy().astype(np.int64)
    pixels = pixels.reshape(100, crop.crops, *pixels.shape[1:])
    for k, image in enumerate(images):
        assert np.abs(pixels[k] - _by_cpu(image, decoder, k)).max() <= 1


def test_the_parts_that_crops_show_are_the_cpu_decoders() -> None:
    rng = np.random.default_rng(8)
    factors = set()
    for k in range(300):
        high, wide = (int(side) for side in rng.integers(3, 24, 2))
        decoder = Decoder(Crop(high, bool(k % 2), across=wide, crops=1 + k % 3, upend=0.5), 5)
        image = drawn(rng, TAKEN[k % len(TAKEN)], 160)
        coded = _encoded(image, decoder, k)
        out = np.empty(decoder.crop.shape, np.uint8)
        uniforms = decoder.draw(0, np.array([k]))[0]
        assert decoder.decode(image, "a picture", uniforms, out) == coded.shown
        factors |= {factor for _, factor in coded.crops}
    assert factors == {1, 2, 4, 8}


@pytest.mark.parametrize(("size", "factor"), [(100, 2), (50, 4), (24, 8)])
def test_shrunk_photos_are_within_the_stated_bound(
    pictures: Path, size: int, factor: int, tmp_path: Path
) -> None:
    decoder = Decoder(Crop(size, False, resize=size), 0)
    images = []
    for k, path in enumerate(sorted(pictures.glob("*/*"))[:4]):
        with Image.open(path) as picture:
            larger = picture.convert("RGB").resize((size * factor + 9 * k, size * factor + 7))
        larger.save(tmp_path / f"{k}.jpg", quality=90)
        images.append((tmp_path / f"{k}.jpg").read_bytes())
    coded = [_encoded(image, decoder, k) for k, image in enumerate(images)]
    assert {given for image in coded for _, given in image.crops} == {factor}
    codec = JpegCodec(HOST, 1, 1, 60)
    made = _crops(codec, coded, decoder)
    codec.close()
    for k, image in enumerate(images):
        off = np.abs(made.crops[k].permute(1, 2, 0).numpy() - _by_cpu(image, decoder, k)[0])
        assert off.mean() <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_which_images_are_left_to_the_cpu(kind: str) -> None:
    rng = np.random.default_rng(1)
    images = [drawn(rng, kind) for _ in range(20)]
    assert {header_of(image) is not None for image in images} == {kind in TAKEN}
    if kind in TAKEN:
        assert all(header_of(image[: int(0.9 * len(image))]) is None for image in images)
        assert all(header_of(image[:-2]) is None for image in images)


@pytest.mark.parametrize("kind", TAKEN)
def test_headers_that_their_data_cannot_keep_are_left_to_the_cpu(kind: str) -> None:
    image = drawn(np.random.default_rng(6), kind, 60)
    header = header_of(image)
    assert header is not None
    frame = header.frame
    claims = bytearray(image)
    claims[frame.height_at : frame.height_at + 4] = b"\x20\x00\x20\x00"  # 8,192 x 8,192
    assert header_of(bytes(claims)) is None
    for at, value in ((3, 1), (2, 62), (1, 0x10)):  # First and last coefficient, and bits.
        partial = bytearray(image)
        partial[frame.scan_at - at] = value
        assert header_of(bytes(partial)) is None


def test_what_is_not_a_jpeg_is_left_to_the_cpu() -> None:
    for image in (b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        assert header_of(image) is None


def test_only_the_restart_intervals_of_a_crop_are_sent() -> None:
    rng, decoder = np.random.default_rng(2), Decoder(Crop(24, True, scale=(0.05, 0.1)), 5)
    images: list[bytes] = []
    while len(images) < 10:
        image = drawn(rng, "lengths", 400)
        header = header_of(image)
        if header is not None and header.frame.height > 200:
            images.append(image)
    coded = [_encoded(image, decoder, k) for k, image in enumerate(images)]
    codec = JpegCodec(HOST, 1, 1, 60)
    made = _crops(codec, coded, decoder)
    codec.close()
    assert made.sent == sum(len(image.data) for image in coded)
    assert made.sent < 0.6 * sum(map(len, images))


def test_damage_that_the_device_finds_is_the_cpus_error() -> None:
    rng, decoder = np.random.default_rng(3), Decoder(Crop(16, True), 5)
    codec = JpegCodec(HOST, 1, 1, 60)
    errors = 0
    for k in range(300):
        image = bytearray(drawn(rng, TAKEN[k % len(TAKEN)], 60))
        for _ in range(3):
            image[int(rng.integers(2, len(image)))] = int(rng.integers(256))
        if header_of(bytes(image)) is None:
            continue
        coded = _encoded(bytes(image), decoder, k)
        made = _crops(codec, [coded], decoder)
        if made.failed:
            errors += 1
            with pytest.raises(DecodeError) as error:
                decode_whole(coded.data.data, "a picture")
            assert str(made.failed[0]) == str(error.value)
            assert not made.crops.any()
    codec.close()
    assert errors > 5


class _Recorder(HostQueue, NvImageCodec):
    """A queue and a library of the CPU that record their calls, and check the coded bytes."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._coded: list[npt.NDArray[np.uint8]] = []
        self._at_decode: list[bytes] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        self.done.append("send")
        return tensor

    def source(self, image: npt.NDArray[np.uint8], part: tuple[int, int, int, int]) -> object:
        return image, part

    def decode(
        self, sources: Sequence[Any], into: Sequence[PixelBuffer], stream: int
    ) -> list[bool]:
        self.done.append("decode")
        self._coded = [image for image, _ in sources]
        self._at_decode = [bytes(image) for image in self._coded]
        for (image, (top, left, bottom, right)), memory in zip(sources, into, strict=True):
            pixels = decode_whole(image.data, "")[top:bottom, left:right]
            memory.tensor().copy_(torch.from_numpy(pixels))
        return [True] * len(sources)

    def wait(self) -> None:
        self.done.append("wait")
        # A device may have read the coded bytes until now.
        assert [bytes(image) for image in self._coded] == self._at_decode

    def close(self) -> None:
        self.done.append("close")


def _recorded(recorder: _Recorder) -> JpegCodec:
    return JpegCodec(HOST, 1, 1, 60, library=lambda *_: recorder, queue_of=lambda _: recorder)


def test_order_of_work_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[_Recorder] = []
    of_thread = threading.local()

    def library(device: torch.device, threads: int) -> _Recorder:
        recorders.append(_Recorder())
        return recorders[-1]

    def cropped(pixels: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        of_thread.used.append("crop")
        return crop_batch(pixels, *rest, **options)

    monkeypatch.setattr(codec_module, "crop_batch", cropped)
    rng, decoder = np.random.default_rng(4), Decoder(Crop(20, True), 5)
    images = [_encoded(drawn(rng, "baseline", 60), decoder, k) for k in range(6)]
    codec = JpegCodec(HOST, 2, 1, 60, library=library, queue_of=lambda _: recorders[-1])
    for slot in codec._slots:
        original = slot.pixels

        def pixels(size: int, slot: Any = slot, original: Any = original) -> Any:
            of_thread.used = slot.queue.done
            return original(size)

        monkeypatch.setattr(slot, "pixels", pixels, raising=False)
    with ThreadPoolExecutor(4) as pool:
        batches = list(
            pool.map(lambda k: _crops(codec, images[k % 3 : k % 3 + 3], decoder), range(24))
        )
    codec.close()
    step = ["decode", "send", "send", "send", "crop", "wait", "wait"]
    for recorder in recorders:
        assert recorder.done[-1] == "close"
        count = (len(recorder.done) - 1) // len(step)
        assert recorder.done[:-1] == step * count
    for k, made in enumerate(batches):
        assert torch.equal(made.crops, batches[k % 3].crops)


@pytest.mark.parametrize("most", [1, 20_000, 1 << 30])
def test_large_batches_are_decoded_in_parts(most: int) -> None:
    rng, decoder = np.random.default_rng(7), Decoder(Crop(20, True, crops=2), 5)
    images = [_encoded(drawn(rng, "baseline", 90), decoder, k) for k in range(9)]
    sizes = [3 * image.part.height * image.part.width for image in images]
    recorder = _Recorder()
    codec = JpegCodec(
        HOST, 1, 1, 60, most, library=lambda *_: recorder, queue_of=lambda _: recorder
    )
    made = _crops(codec, images, decoder)
    assert torch.equal(made.crops, _crops(_recorded(_Recorder()), images, decoder).crops)
    assert made.sent == sum(len(image.data) for image in images)
    parts = recorder.done.count("decode")
    assert parts == {1: 9, 1 << 30: 1}.get(most, parts)
    assert 1 <= parts <= 9
    slot = codec._slots[0]
    assert len(slot._pixels) <= 1.25 * max(max(sizes) + 64, min(most, sum(sizes)) + 64 * 9)


def test_a_device_that_hangs_ends_in_an_error() -> None:
    codec = JpegCodec(HOST, 0, 1, 0.01)
    with pytest.raises(DlioError, match="DLIO_TIMEOUT"):
        codec.crops([], [], (8, 8), {}, 0)


def test_an_image_that_the_device_refuses_is_decoded_by_the_cpu() -> None:
    class Refusing(_Recorder):
        def decode(
            self, sources: Sequence[Any], into: Sequence[PixelBuffer], stream: int
        ) -> list[bool]:
            super().decode(sources, into, stream)
            into[1].tensor().zero_()
            return [k != 1 for k in range(len(sources))]

    rng, decoder = np.random.default_rng(5), Decoder(Crop(20, True, crops=2), 5)
    images = [_encoded(drawn(rng, "rows", 60), decoder, k) for k in range(3)]
    refusing = Refusing()
    refused = _crops(_recorded(refusing), images, decoder)
    other = _Recorder()
    made = _crops(_recorded(other), images, decoder)
    assert refused.by_cpu == [1]
    assert torch.equal(refused.crops, made.crops)


def test_decoders_leave_no_threads_and_use_their_memory_again() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads of C++ are counted in /proc")
    rng, decoder = np.random.default_rng(6), Decoder(Crop(20, True), 5)
    images = [_encoded(drawn(rng, "baseline", 60), decoder, k) for k in range(8)]
    before = len(list(tasks.iterdir()))
    codec = JpegCodec(HOST, 2, 3, 60)
    _crops(codec, images, decoder)
    _crops(codec, images, decoder)
    places = [slot._pixels.data_ptr() for slot in codec._slots]
    for _ in range(4):
        _crops(codec, images, decoder)
    assert places == [slot._pixels.data_ptr() for slot in codec._slots]
    codec.close()
    assert len(list(tasks.iterdir())) <= before


def test_the_hosts_queue_does_everything_at_once() -> None:
    order = HostQueue()
    tensor = torch.arange(3)
    assert order.send(tensor) is tensor
    with order.running():
        order.wait()
