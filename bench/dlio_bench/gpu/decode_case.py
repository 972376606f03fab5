"""Decoding of JPEGs into crops on the device: by the loader's threads, and by nvImageCodec."""

import importlib.util
import itertools
import os
from collections.abc import Callable

import dlio
from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed
from dlio_bench.bench_data import payload_bytes, ram_tier
from dlio_bench.gpu.gpu_measurements import (
    GpuMeasurements,
    GpuRunSettings,
    passes,
    rates_in_turn,
)


def decode(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """Passes over files as they are, and over the same JPEGs packed with restart rows; `threads`
    and `processes` are the loader's, `device` is `decode="device"`. Other libraries decode the
    files."""
    from dlio_staging.pack_folder import pack

    packed = os.path.join(place.scratch, "rows")
    pack(place.source, packed)
    sources = {"files": place.source, "restart rows": packed}
    ways = ["threads", "processes", *(["device"] if is_installed() else [])]
    if "device" not in ways:
        measured.skipped["decode: device"] = f"nvImageCodec is not installed: {REMEDY}"
    rates: dict[str, list[float]] = {}
    for (name, path), way in itertools.product(sources.items(), ways):
        tiers, label = ram_tier(payload_bytes(path)), f"{way}, {name}"
        # One after another: a loader that keeps its workers begins its next pass ahead.
        with (
            dlio.open(path, tiers=tiers, image_size=place.image_size) as data,
            loader_of(data, place, way) as loader,
        ):
            rates |= rates_in_turn({label: passes(loader, place)}, place.repeats)
            stats = loader.stats()
        if way == "device":
            measured.notes.append(
                f"decode, {label}: {stats.get('device_images', 0)} images on the device, "
                f"{stats.get('fallbacks', 0)} by the CPU, {stats.get('device_bytes', 0)} bytes "
                "sent a pass"
            )
    rates |= rates_in_turn(_others(place, measured), place.repeats)
    measured.rates("decode", rates)
    for mine, other in (
        ("device, restart rows", "device, files"),
        ("device, files", "DALI"),
        ("device, restart rows", "DALI"),
        ("device, files", "threads, files"),
        ("processes, files", "threads, files"),
    ):
        if mine in rates and other in rates:
            measured.ratio(f"decode, {mine} / {other}", rates[mine], rates[other])
    _turboloader(place, measured)


def loader_of(
    data: dlio.Dataset, place: GpuRunSettings, way: str, steady: bool = False
) -> dlio.DataLoader:
    """Return a loader that decodes by `threads`, by `processes` or on the `device`.

    Args:
        steady: batches of one size, and workers that are kept from pass to pass.
    """
    return dlio.DataLoader(
        data,
        place.batch_size,
        shuffle=True,
        drop_last=steady,
        num_workers=place.workers,
        workers="process" if way == "processes" else "thread",
        persistent_workers=steady or way == "processes",
        device=place.device,
        decode="device" if way == "device" else "cpu",
    )


def _others(place: GpuRunSettings, measured: GpuMeasurements) -> dict[str, Callable[[], int]]:
    name = "decode: DALI"
    if place.device.type != "cuda":
        measured.skipped[name] = "needs a CUDA device: its decoder `mixed` is measured"
    elif importlib.util.find_spec("nvidia.dali") is None:
        measured.skipped[name] = "not installed: pip install nvidia-dali-cuda120"
    else:
        return {"DALI": _best_of_dali(place, measured)}
    return {}


def _best_of_dali(place: GpuRunSettings, measured: GpuMeasurements) -> Callable[[], int]:
    """Return a pass of the fastest of some pipelines, each after one that is not timed."""
    loads = (0.0, 0.65, 0.9)  # Shares of the device's JPEG engine; the rest go to CUDA's decoder.
    runs = {str(load): _dali_pass(place, load) for load in loads}
    rates = {name: rate for name, (rate,) in rates_in_turn(runs, 1).items()}
    chosen = max(rates, key=rates.__getitem__)
    measured.notes.append(f"decode, DALI: hw_decoder_load={chosen} of {loads} is fastest")
    return runs[chosen]


def _dali_pass(place: GpuRunSettings, load: float) -> Callable[[], int]:
    from dlio_bench.peers.standalone.runners.dali import pipeline_of

    pipeline = pipeline_of(
        {"file_root": place.source},
        place.image_size,
        place.batch_size,
        place.workers,
        place.device.index or 0,
        hw_decoder_load=load,
    )
    count = int(pipeline.epoch_size("reader"))

    def run() -> int:
        for _ in range(-(-count // place.batch_size)):
            pipeline.run()
        place.wait()
        return count

    return run


def _turboloader(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """TurboLoader decodes on the processor, in a process of its own."""
    from dlio_bench.loader_bench import LoaderCase, measure
    from dlio_bench.peers.environments import missing

    why = missing("turboloader")
    if why is None:
        case = LoaderCase(
            place.source,
            place.image_size,
            place.batch_size,
            place.workers,
            place.repeats,
            60.0,
            ("turboloader_uint8",),
        )
        report = measure(case)
        rates, absent = report["samples_per_s"], report["absent"]
        assert isinstance(rates, dict)
        assert isinstance(absent, dict)
        if rates:
            (only,) = rates.values()
            measured.rates("decode", {"TurboLoader": only["all"]})
            return
        why = str(next(iter(absent.values())))
    measured.skipped["decode: TurboLoader"] = why
