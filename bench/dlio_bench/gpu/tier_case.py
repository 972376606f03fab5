"""The tier of decoded images on the device: passes once it is full, and its kernel alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

import dlio
from dlio.image.crop import Crop, boxes_of
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.util.settings import DEVICE_TIER
from dlio_bench.gpu.decode_case import payload_bytes
from dlio_bench.gpu.gpu_measurements import (
    GpuMeasurements,
    GpuRunSettings,
    passes,
    rates_in_turn,
    tiers_for,
)


def tier(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """Passes from `gpu:SIZE:decoded`, compared with `ram:SIZE:decoded` and with the kernel alone,
    which crops images that lie on the device."""
    short = round(place.image_size * 8 / 7)
    blocks = tiers_for(payload_bytes(place.source))
    with _on_any_device():
        with dlio.open(place.source, tiers="none", image_size=None) as files:
            count = len(files)
        room = count * 3 * short * 3 * short + (1 << 20)
        rates: dict[str, list[float]] = {}
        for kind in ("gpu", "ram"):
            tiers = f"{kind}:{room}B:decoded,{blocks}"
            with (
                dlio.open(place.source, tiers=tiers, image_size=place.image_size) as data,
                dlio.DataLoader(
                    data,
                    place.batch_size,
                    shuffle=True,
                    num_workers=place.workers,
                    device=place.device,
                ) as loader,
            ):
                name = f"{kind}:SIZE:decoded"
                rates |= rates_in_turn({name: passes(loader, place)}, place.repeats)
                stats = loader.stats()
                measured.notes.append(
                    f"tier, {name}: {stats['decoded']} of {stats['samples']} samples of the last "
                    "pass came decoded"
                )
    kernel = _kernel(place, short)
    rates |= rates_in_turn({"kernel alone": kernel}, place.repeats)
    measured.rates("decoded tier", rates)
    measured.ratio("decoded tier, gpu / ram", rates["gpu:SIZE:decoded"], rates["ram:SIZE:decoded"])
    measured.ratio(
        "decoded tier, gpu / kernel alone", rates["gpu:SIZE:decoded"], rates["kernel alone"]
    )


@contextmanager
def _on_any_device() -> Iterator[None]:
    """Allow the tier on a device that is not a GPU, which has no use but to be measured."""
    before = os.environ.get(DEVICE_TIER)
    os.environ[DEVICE_TIER] = "1"
    try:
        yield
    finally:
        del os.environ[DEVICE_TIER]
        if before is not None:
            os.environ[DEVICE_TIER] = before


def _kernel(place: GpuRunSettings, short: int) -> "_Kernel":
    generator = np.random.default_rng(0)
    crop, count = Crop(place.image_size, True), place.batch_size
    columns = short * 4 // 3
    heights, widths = (np.full(count, side, np.int64) for side in (short, columns))
    boxes = boxes_of(crop, heights, widths, generator.random((count, crop.draws)))
    firsts = np.arange(count) * short * columns * 3
    images = np.stack([firsts, heights, widths], 1)
    pixels = torch.randint(
        0, 256, (count * short * columns * 3,), dtype=torch.uint8, device=place.device
    )
    described = [torch.from_numpy(each).to(place.device) for each in (images, boxes[:, 0].copy())]
    return _Kernel(place, pixels, *described)


class _Kernel:
    """As many batches as `steps`."""

    def __init__(
        self, place: GpuRunSettings, pixels: torch.Tensor, images: torch.Tensor, boxes: torch.Tensor
    ) -> None:
        self._place, self._given = place, (pixels, images, boxes)

    def __call__(self) -> int:
        size = self._place.image_size, self._place.image_size
        for _ in range(self._place.steps):
            crop_batch(*self._given, size)
        self._place.wait()
        return self._place.steps * self._place.batch_size
