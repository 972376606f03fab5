"""A loader on a GPU: the same batches as on the host, whatever the GPU is busy with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio.errors import UsageError
from dlio.image.crop import Crop, boxes_of
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.device_decode.nvimagecodec import is_installed

pytestmark = pytest.mark.gpu
_IMAGES, _BATCH = 96, 8
_CYCLES = 20_000_000
"""Of the GPU's clock: about 10 ms, in which ten batches could be copied."""
_cuda: Any = torch.cuda  # `_sleep` has no types.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dlio.cli.demo_pictures import draw_dataset

    root = tmp_path_factory.mktemp("gpu") / "pictures"
    draw_dataset(str(root), images=_IMAGES, validation=3, classes=3)
    return root / "train"


def _sums(loader: Any, busy: Callable[[], object]) -> list[list[int]]:
    """Sums of the pixels and of the labels of each batch, taken after work of the device's."""
    sums = []
    for images, labels in loader:
        busy()
        sums.append((images.sum(dtype=torch.int64), labels.sum()))
        del images, labels  # The next copies may have their memory.
    return [[int(each) for each in both] for both in sums]


@pytest.mark.parametrize("workers", [None, "process"])
def test_batches_are_those_of_the_host_while_the_gpu_lags_behind(
    folder: Path, workers: Any
) -> None:
    def epochs(device: str | None) -> tuple[list[list[int]], list[int]]:
        busy = (lambda: _cuda._sleep(_CYCLES)) if device else (lambda: None)
        sums, allocated = [], []
        with (
            dlio.open(folder, image_size=64, tiers="ram:64MiB") as data,
            dlio.DataLoader(data, _BATCH, shuffle=True, device=device, workers=workers) as loader,
        ):
            for _ in range(3):
                sums += _sums(loader, busy)
                if device:
                    streams = loader._engines.delivered.streams[torch.device("cuda", 0)]
                    assert streams is not None
                    allocated.append(streams.pool.statistics().allocated)
        return sums, allocated

    expected, _ = epochs(None)
    got, allocated = epochs("cuda:0")
    assert got == expected
    # Images and labels of two batches under way and of the one that is being copied.
    assert max(allocated) <= 6


def test_the_tier_on_the_gpu_gives_the_crops_of_the_tier_in_ram(folder: Path) -> None:
    def passes(tiers: str) -> tuple[list[dict[int, Any]], list[int]]:
        made, decoded = [], []
        with (
            dlio.open(folder, image_size=64, tiers=tiers) as data,
            dlio.DataLoader(data, _BATCH, shuffle=True, device="cuda", num_workers=2) as loader,
        ):
            for _ in range(3):
                samples: dict[int, Any] = {}
                for images, labels in loader:
                    _cuda._sleep(_CYCLES)
                    for k, sample in enumerate(loader.last_samples.tolist()):
                        samples[sample] = images[k].clone(), labels[k].clone()
                made.append(samples)
                decoded.append(loader.stats()["decoded"])
        return made, decoded

    ram, _ = passes("ram:32MiB:decoded,ram:64MiB")
    for room, hits in (("32MiB", _IMAGES), ("300KiB", None)):
        ours, decoded = passes(f"gpu:{room}:decoded,ram:64MiB")
        assert decoded[0] == 0 < decoded[1] == decoded[2]
        assert hits is None or decoded[1] == hits
        for mine, other in zip(ours, ram, strict=True):
            for sample, (pixels, label) in mine.items():
                assert int(label) == int(other[sample][1])
                assert int((pixels.int() - other[sample][0].int()).abs().max()) <= 1


def test_a_tier_larger_than_the_gpus_memory_is_refused_with_the_remedy(folder: Path) -> None:
    with (
        dlio.open(folder, image_size=64, tiers="gpu:4TiB:decoded,ram:64MiB") as data,
        dlio.DataLoader(data, _BATCH, device="cuda") as loader,
        pytest.raises(UsageError, match=r"free: give it less"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("size", [16, 200])
def test_the_kernel_crops_as_torchs_operations_do(size: int) -> None:
    count, height, width = 32, 90, 120
    generator = np.random.default_rng(0)
    crop = Crop(size, True, upend=0.5)
    heights, widths = (np.full(count, side, np.int64) for side in (height, width))
    boxes = boxes_of(crop, heights, widths, generator.random((count, crop.draws)))[:, 0].copy()
    firsts = np.arange(count) * height * width * 3
    images = torch.from_numpy(np.stack([firsts, heights, widths], 1))
    places = torch.from_numpy(boxes)
    pixels = torch.from_numpy(generator.integers(0, 256, count * height * width * 3, np.uint8))
    on_host = crop_batch(pixels, images, places, (size, size))
    on_gpu = crop_batch(pixels.cuda(), images.cuda(), places.cuda(), (size, size))
    assert torch.equal(on_gpu.cpu(), on_host)


@pytest.mark.skipif(not is_installed(), reason="nvImageCodec is not installed")
def test_images_decoded_on_the_gpu_have_the_order_and_labels_of_the_host(folder: Path) -> None:
    def one(decode: Any) -> list[tuple[torch.Tensor, list[int]]]:
        with (
            dlio.open(folder, image_size=64, tiers="ram:64MiB") as data,
            dlio.DataLoader(
                data, _BATCH, shuffle=True, device="cuda", decode=decode, num_workers=2
            ) as loader,
        ):
            return [(images.cpu().int(), labels.tolist()) for images, labels in loader]

    for (mine, labels), (other, expected) in zip(one("device"), one("cpu"), strict=True):
        assert labels == expected
        assert (
            float((mine - other).abs().float().mean()) < 8
        )  # Of 255; other pictures differ by 60.
