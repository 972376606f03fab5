"""Cropping a batch on the device gives the pixels of the CPU's resizing.

The Triton kernel is run by Triton's interpreter, and compiled for a GPU without having one, where
Triton is installed.
"""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from dlio.errors import UsageError
from dlio.image.decoder import opencv
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.fusion import BatchTransform
from dlio.transforms import Normalize, RandomErasing, ToTensor

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(seed: int, count: int, most: int, offset: int = 0) -> Batch:
    """Random images of sides up to `most` in one flat tensor, and a box in each."""
    rng = np.random.default_rng(seed)
    flat, images, boxes = [np.zeros(offset, np.uint8)], [], []
    at = offset
    for _ in range(count):
        height, width = (int(side) for side in rng.integers(1, most, 2))
        high, wide = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
        flat.append(rng.integers(0, 256, 3 * height * width, np.uint8))
        images.append((at, height, width))
        boxes.append((top, left, high, wide, *rng.integers(0, 2, 2).tolist()))
        at += flat[-1].size
    pixels = torch.from_numpy(np.concatenate(flat))
    return pixels, torch.tensor(images), torch.tensor(boxes, dtype=torch.int32)


def _by_opencv(batch: Batch, k: int, size: tuple[int, int]) -> tuple[np.ndarray[Any, Any], bool]:
    """(crop number k, True if it shrinks twofold)."""
    first, height, width = batch[1][k].tolist()
    top, left, high, wide, flip, upend = batch[2][k].tolist()
    image = batch[0][first : first + 3 * height * width].view(height, width, 3).numpy()
    shrinks = high >= 2 * size[0] and wide >= 2 * size[1]
    cv2 = opencv()
    made = cv2.resize(
        image[top : top + high, left : left + wide],
        size[::-1],
        interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
    )
    return made[:: -1 if upend else 1, :: -1 if flip else 1], shrinks


def test_pixels_are_opencvs() -> None:
    worst = {True: 0, False: 0}
    counts = {True: 0, False: 0}
    for seed in range(40):
        rng = np.random.default_rng(100 + seed)
        size = int(rng.integers(1, 60)), int(rng.integers(1, 60))
        batch = _batch(seed, 4, 200, offset=seed)
        made = crop_batch(*batch, size)
        assert made.shape == (4, 3, *size)
        assert made.is_contiguous(memory_format=torch.channels_last)
        for k in range(4):
            wanted, shrinks = _by_opencv(batch, k, size)
            off = np.abs(made[k].permute(1, 2, 0).numpy().astype(int) - wanted)
            worst[shrinks] = max(worst[shrinks], int(off.max()))
            counts[shrinks] += 1
    assert min(counts.values()) > 20
    # OpenCV's own pixels depend on the processor: dlio's are those that it gives with AVX2.
    assert worst[False] <= 1
    assert worst[True] <= 1


def _shrunk(batch: Batch, factors: list[int]) -> Batch:
    """The same images, shrunk to means of blocks, and boxes of half their sides."""
    flat, images, boxes, at = [], [], [], 0
    for (first, height, width), factor in zip(batch[1].tolist(), factors, strict=True):
        image = batch[0][first : first + 3 * height * width].view(height, width, 3).numpy()
        beyond = (-height % factor, -width % factor)
        padded = np.pad(image, ((0, beyond[0]), (0, beyond[1]), (0, 0)), mode="edge")
        high, wide = padded.shape[0] // factor, padded.shape[1] // factor
        blocks = padded.reshape(high, factor, wide, factor, 3).astype(np.int64).sum((1, 3))
        flat.append(((blocks + factor**2 // 2) // factor**2).astype(np.uint8).reshape(-1))
        images.append((at, high, wide))
        boxes.append((high // 2, wide // 2, high - high // 2, wide - wide // 2, 1, 0))
        at += flat[-1].size
    pixels = torch.from_numpy(np.concatenate(flat))
    return pixels, torch.tensor(images), torch.tensor(boxes, dtype=torch.int32)


def test_images_are_shrunk_to_means_of_blocks_first() -> None:
    batch, factors = _batch(5, 8, 200), [1, 2, 4, 8, 8, 4, 2, 1]
    small = _shrunk(batch, factors)
    made = crop_batch(
        *batch[:2], small[2], (13, 17), factors=torch.tensor(factors, dtype=torch.int32)
    )
    assert torch.equal(made, crop_batch(*small, (13, 17)))


def test_normalised_crops_equal_normalize() -> None:
    batch = _batch(1, 5, 90)
    plain = crop_batch(*batch, (24, 31))
    made = crop_batch(*batch, (24, 31), normal=Normalize(_MEAN, _STD))
    assert torch.equal(made, Normalize(_MEAN, _STD)(plain))
    half = crop_batch(*batch, (24, 31), normal=Normalize(_MEAN, _STD, torch.bfloat16))
    assert torch.equal(half, made.to(torch.bfloat16))


def test_crops_are_written_where_they_belong() -> None:
    batch = _batch(2, 3, 90)
    memory = torch.full((4, 20, 30, 3), 7, dtype=torch.uint8).permute(0, 3, 1, 2)
    batch[2][1] = 0
    made = crop_batch(*batch, (20, 30), out=memory[:3])
    assert made.data_ptr() == memory.data_ptr()
    assert torch.equal(made, crop_batch(*batch, (20, 30)))
    assert not made[1].any()
    assert bool((memory[3] == 7).all())


@pytest.mark.parametrize(
    ("place", "value"),
    [((0, 0), -1), ((0, 1), -1), ((0, 2), 1000), ((0, 3), 1000), ((0, 3), 0)],
)
def test_boxes_outside_their_image_are_refused(place: tuple[int, int], value: int) -> None:
    pixels, images, boxes = _batch(3, 2, 90)
    boxes[place] = value
    with pytest.raises(UsageError, match="outside"):
        crop_batch(pixels, images, boxes, (8, 8))


def test_unsuitable_tensors_are_refused() -> None:
    pixels, images, boxes = _batch(3, 2, 90)
    for wrong in (
        (pixels.float(), images, boxes),
        (pixels, images.int(), boxes),
        (pixels, images, boxes[:, :5]),
        (pixels[:-1], images, boxes),
    ):
        with pytest.raises(UsageError, match="crop_batch"):
            crop_batch(*wrong, (8, 8))
    with pytest.raises(UsageError, match="factors"):
        crop_batch(pixels, images, boxes, (8, 8), factors=torch.tensor([1, 3], dtype=torch.int32))
    with pytest.raises(UsageError, match="channels-last"):
        crop_batch(pixels, images, boxes, (8, 8), out=torch.empty(2, 3, 8, 8, dtype=torch.uint8))


def test_triton_kernel_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = importlib.reload(importlib.import_module("dlio.image.device_decode.triton_kernel"))
    batch = _batch(4, 5, 70)
    batch[2][1] = 0
    shrinks = [_by_opencv(batch, k, (11, 9))[1] for k in (0, 2, 3, 4)]
    assert len(set(shrinks)) == 2
    factors = torch.tensor([2, 1, 4, 8, 1], dtype=torch.int32)
    small = _shrunk(batch, factors.tolist())[2]
    for normal, boxes, given in (
        (None, batch[2], None),
        (Normalize(_MEAN, _STD), small, factors),
        (Normalize(_MEAN, _STD, torch.bfloat16), batch[2], None),
    ):
        wanted = crop_batch(*batch[:2], boxes, (11, 9), normal=normal, factors=given)
        out = torch.empty((5, 11, 9, 3), dtype=wanted.dtype)
        kernel.crop(*batch[:2], boxes, given, out, normal)
        # The interpreter truncates to bfloat16 where a GPU rounds.
        rtol = 2**-7 if normal is not None and normal.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(out.permute(0, 3, 1, 2), wanted, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("dtype", ["u8", "fp32", "bf16"])
def test_triton_kernel_compiles_for_a_gpu(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = importlib.reload(importlib.import_module("dlio.image.device_decode.triton_kernel"))
    signature = {"pixels": "*u8", "images": "*i64", "boxes": "*i32", "factors": "*i32"}
    signature |= {"out": f"*{dtype}"}
    signature |= {"height": "i32", "width": "i32"}
    names = ("mean_red", "mean_green", "mean_blue", "std_red", "std_green", "std_blue")
    constants = {"HAS_FACTORS": dtype == "u8", "IS_NORMAL": dtype != "u8", "BLOCK": kernel._BLOCK}
    signature |= dict.fromkeys(names, "fp32") | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel._kernel, signature, constants)
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert ".visible .entry" in made.asm["ptx"]


def test_which_normalisation_the_kernel_does() -> None:
    """The others are left to the steps of a whole batch, which then have uint8 crops."""
    normal = Normalize(_MEAN, _STD)
    assert BatchTransform([(1, normal)], 0, 0).normal is normal
    for steps in ([], [(1, Normalize(_MEAN, _STD, torch.float16))], [(1, ToTensor()), (2, normal)]):
        assert BatchTransform(steps, 0, 0).normal is None
    batch = _batch(6, 3, 60)
    both = BatchTransform([(1, normal), (2, RandomErasing(1.0))], 3, 0)
    plain, done = crop_batch(*batch, (16, 16)), crop_batch(*batch, (16, 16), normal=both.normal)
    assert torch.equal(both(done, None, 0, [4, 5, 6])[0], both(plain, None, 0, [4, 5, 6])[0])
