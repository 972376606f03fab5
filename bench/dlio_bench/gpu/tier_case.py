"""The tier of decoded images on the device: passes once it is full, and its kernel alone."""

from collections.abc import Callable

import numpy as np
import torch

import dlio
from dlio.image.crop import Crop, boxes_of
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.util.settings import DEVICE_TIER
from dlio_bench.bench_data import payload_bytes, ram_tier
from dlio_bench.bench_processes import variable
from dlio_bench.gpu.gpu_measurements import (
    GpuMeasurements,
    GpuRunSettings,
    passes,
    rates_in_turn,
)


def tier(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """Passes from `gpu:SIZE:decoded`, compared with `ram:SIZE:decoded` and with the kernel alone,
    which crops images that lie on the device."""
    short = round(place.image_size * 8 / 7)
    blocks = ram_tier(payload_bytes(place.source))
    # Also on a device that is not a GPU, where the tier has no use but to be measured.
    with variable(DEVICE_TIER, "1"):
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
    gpu = rates["gpu:SIZE:decoded"]
    measured.ratio("decoded tier, gpu / ram", gpu, rates["ram:SIZE:decoded"])
    measured.ratio("decoded tier, gpu / kernel alone", gpu, rates["kernel alone"])


def _kernel(place: GpuRunSettings, short: int) -> Callable[[], int]:
    """As many batches as `steps`."""
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
    starts, corners = (
        torch.from_numpy(each).to(place.device) for each in (images, boxes[:, 0].copy())
    )

    def run() -> int:
        for _ in range(place.steps):
            crop_batch(pixels, starts, corners, (place.image_size, place.image_size))
        place.wait()
        return place.steps * place.batch_size

    return run
