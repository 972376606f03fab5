"""Decoding and cropping on a GPU: the pixels of the CPU within the bounds that the guide states."""

import numpy as np
import pytest
import torch

from dlio.errors import DecodeError
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder
from dlio.image.device_decode.crop_kernel import crop_batch, find_triton
from dlio.image.device_decode.encoded_image import EncodedImage, encoded, header_of
from dlio.image.device_decode.jpeg_codec import DecodedCrops, JpegCodec
from dlio.image.device_decode.nvimagecodec import is_installed
from dlio.image.tensors import Normalize
from tests.image.jpegs import drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_library = pytest.mark.skipif(
    not is_installed(), reason="nvImageCodec is not installed (extra gpu)"
)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(seed: int) -> Batch:
    """(pixels, images, boxes, factors): 32 images of noise, on the host."""
    rng = np.random.default_rng(seed)
    images, boxes, factors, at = [], [], [], 0
    for _ in range(32):
        height, width, factor = *(int(each) for each in rng.integers(40, 400, 2)), rng.choice(4)
        factors.append(1 << int(factor))
        high, wide = -(-height // factors[-1]), -(-width // factors[-1])
        top, left = int(rng.integers(high)), int(rng.integers(wide))
        images.append((at, height, width))
        boxes.append((top, left, high - top, wide - left, *rng.integers(0, 2, 2).tolist()))
        at += 3 * height * width
    pixels = torch.from_numpy(rng.integers(0, 256, at, np.uint8))
    numbers = torch.tensor(images), torch.tensor(boxes, dtype=torch.int32)
    return pixels, *numbers, torch.tensor(factors, dtype=torch.int32)


@pytest.mark.parametrize("normal", [None, Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), "bfloat16"])
def test_the_kernel_has_the_pixels_of_the_host_in_a_cuda_graph(
    normal: Normalize | str | None,
) -> None:
    assert find_triton() is not None
    if normal == "bfloat16":
        normal = Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), torch.bfloat16)
    assert not isinstance(normal, str)
    size, first, second = (65, 43), _batch(1), _batch(2)
    room = torch.empty(max(len(first[0]), len(second[0])), dtype=torch.uint8, device="cuda")
    room[: len(first[0])] = first[0].cuda()
    images, boxes, factors = (each.cuda() for each in first[1:])
    out = crop_batch(room, images, boxes, size, normal=normal, factors=factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        crop_batch(room, images, boxes, size, out, normal, factors)
    for batch in (second, first):
        pixels, *numbers = batch
        room[: len(pixels)] = pixels.cuda()
        for own, given in zip((images, boxes, factors), numbers, strict=True):
            own.copy_(given)
        graph.replay()
        wanted = crop_batch(*batch[:3], size, normal=normal, factors=batch[3])
        assert torch.equal(out.cpu(), wanted)


def _crops(device: str, images: list[EncodedImage], decoder: Decoder) -> DecodedCrops:
    codec = JpegCodec(torch.device(device), 2, 2, 60)
    rows = [[k] for k in range(len(images))]
    size = decoder.crop.size, decoder.crop.width
    for _ in range(2):  # Into memory that has been used.
        made = codec.crops(images, rows, size, {}, len(images))
    codec.close()
    return made


def _encoded(image: bytes, decoder: Decoder, number: int) -> EncodedImage:
    header = header_of(image)
    assert header is not None
    uniforms = decoder.draw(0, np.array([number]))[0].tolist()
    return encoded(image, header, decoder, uniforms, f"picture {number}")


@needs_library
@pytest.mark.parametrize("kind", ["baseline", "restarts", "lengths", "1x2"])
def test_pictures_are_decoded_as_by_the_cpu(kind: str) -> None:
    rng, decoder = np.random.default_rng(3), Decoder(Crop(48, True), 5)
    images = [_encoded(drawn(rng, kind, 300), decoder, k) for k in range(40)]
    made, wanted = _crops("cuda", images, decoder), _crops("cpu", images, decoder)
    assert made.crops.is_cuda
    assert not made.failed
    assert len(made.by_cpu) < len(images)
    off = (made.crops.cpu().int() - wanted.crops.int()).abs()
    # Other inverse transforms; noise at a low quality is their worst case.
    assert float(off.float().mean()) <= 2


@needs_library
def test_damage_is_the_cpus_error() -> None:
    rng, decoder = np.random.default_rng(4), Decoder(Crop(24, True), 5)
    whole = drawn(rng, "baseline", 80)
    intact = _encoded(whole, decoder, 0)
    damaged = _encoded(whole, decoder, 1)
    damaged.data[len(damaged.data) // 3 :] = 0
    made = _crops("cuda", [intact, damaged, intact], decoder)
    assert set(made.failed) <= {1}
    assert all(isinstance(error, DecodeError) for error in made.failed.values())
    assert torch.equal(made.crops[0], made.crops[2])
