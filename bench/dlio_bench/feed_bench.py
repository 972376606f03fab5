"""Two more cases of `dlio bench loader`: large arrays, and pictures on a slow file system."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch

import dlio
from dlio.data.reader import open_reader
from dlio.plan.order import Order
from dlio.storage.block import read_info
from dlio.util.threads import Workers
from dlio_bench.bench_data import bytes_below, files_below, ram_tier
from dlio_bench.bench_processes import variable
from dlio_bench.emulated.emulated_mount import slow_mount
from dlio_bench.pillow import PillowImages
from dlio_bench.results.repeats import ratio, spread, turns
from dlio_bench.results.terminal import steps
from dlio_bench.storage_cases.page_cache import drop
from dlio_staging.pack_folder import pack

_VOLUME: Final = (128, 64, 64)
"""float32: 2 MiB."""
_LATENCY_S: Final = 0.005
_BANDWIDTH: Final = 50e6
_CONSUMED_PER_S: Final = 200.0


def arrays(folder: str, repeats: int, workers: int, volumes: int = 1152) -> dict[str, object]:
    """Volumes of 2 MiB, raw and LZ4, from the RAM tier and from a disk tier that the page cache
    does not hold, compared with a bare loop that reads the same bytes of the same files by
    preadv, in the same order, in as many threads, into batch memory that is used again.

    `dlio_over_preadv` compares volumes a second; `dlio_over_bandwidth` the bytes a second that
    dlio delivers with those that the loop reads, which are fewer where volumes are compressed.
    The RAM tier also with a tenth of the checksums compared (DLIO_CHECK=0.1).
    """
    results: dict[str, Any] = {"volumes": volumes, "bytes": volumes * 4 * int(np.prod(_VOLUME))}
    with tempfile.TemporaryDirectory(prefix="dlio-bench-", dir=folder) as scratch:
        generator = np.random.default_rng(0)
        data = generator.standard_normal((volumes, *_VOLUME), np.float32)
        data[:, _VOLUME[0] // 2 :] = 0  # Half of each compresses to nothing.
        np.save(os.path.join(scratch, "volumes.npy"), data)
        del data
        for name in ("raw", "lz4"):
            packed = os.path.join(scratch, name)
            compress = "none" if name == "raw" else "lz4"
            pack(os.path.join(scratch, "volumes.npy"), packed, compress=compress)
            places = (("ram", "1"), ("ram", "0.1"), ("disk", "1"))
            for place, share in steps(places, itemgetter(0)):
                tier = os.path.join(scratch, "tier")
                with variable("DLIO_CHECK", share):
                    rates = _array_case(packed, place, tier, repeats, workers)
                checked = "" if share == "1" else "_tenth_checked"
                results[f"{name}_{place}{checked}"] = {
                    "dlio_MiB_per_s": spread(rates["dlio"]),
                    "preadv_MiB_per_s": spread(rates["preadv"]),
                    "dlio_over_preadv": ratio(rates["dlio"], rates["volumes"]),
                    "dlio_over_bandwidth": ratio(rates["dlio"], rates["preadv"]),
                }
                shutil.rmtree(tier, ignore_errors=True)
    return results


def _array_case(
    packed: str, place: str, tier: str, repeats: int, workers: int
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"dlio": [], "preadv": [], "volumes": []}
    spec = "ram:4GiB" if place == "ram" else f"{tier}:4GiB"
    if place == "disk":
        os.mkdir(tier, 0o700)
    with (
        dlio.open(packed, tiers=spec) as data,
        dlio.DataLoader(data, 16, shuffle=True, num_workers=workers) as loader,
    ):

        def through_dlio() -> None:
            for _ in loader:
                pass

        through_dlio()
        assert data.mounted is not None
        files = data.mounted.hierarchy.tiers[0].path
        order = Order(len(data), 0, 1).samples(np.arange(len(data), dtype=np.int64))
        stretches = _stretches(files, data.reader, order)
        raw = len(data) * 4 * _VOLUME[0] * _VOLUME[1] * _VOLUME[2] / (1 << 20)
        stored = sum(size for _, _, size in stretches) / (1 << 20)
        contenders: dict[str, Callable[[], None]] = {
            "dlio": through_dlio,
            "preadv": lambda: _bare_reads(stretches, workers),
        }
        for _, name in turns(contenders, repeats):
            if place == "disk":
                drop(files_below(files), everything=False)
            else:
                contenders[name]()  # Its memory may have been taken away meanwhile.
            started = time.perf_counter()
            contenders[name]()
            seconds = time.perf_counter() - started
            rates[name].append((raw if name == "dlio" else stored) / seconds)
            if name == "preadv":
                rates["volumes"].append(raw / seconds)
    return rates


def _stretches(files: str, reader: Any, order: Any) -> list[tuple[str, int, int]]:
    """(file, offset, bytes as stored) of each sample, in an order."""
    infos: dict[int, Any] = {}
    results = []
    for block, place in zip(*(part.tolist() for part in reader.layout.locate(order)), strict=True):
        path = os.path.join(files, f"{block:08d}.blk")
        if block not in infos:
            descriptor = os.open(path, os.O_RDONLY)
            infos[block] = read_info(descriptor, path)
            os.close(descriptor)
        offset, stored, _, _ = infos[block].table[place].item()
        results.append((path, int(offset), int(stored)))
    return results


def _bare_reads(stretches: list[tuple[str, int, int]], workers: int) -> None:
    def work(first: int) -> None:
        memory = np.empty((16, max(size for _, _, size in stretches)), np.uint8)
        for k in range(first, len(stretches), workers):
            path, offset, size = stretches[k]
            descriptor = os.open(path, os.O_RDONLY)
            into = memory[k // workers % 16][:size].data
            done = 0
            while done < size:
                done += os.preadv(descriptor, [into[done:]], offset + done)
            os.close(descriptor)

    with Workers("dlio-bench", work, workers) as running:
        running.wait()


def slow(source: str, repeats: int, workers: int, batch_size: int = 64) -> dict[str, object]:
    """Class folders behind slowfs (50 MB/s, 5 ms a request), and a consumer that computes for
    `batch_size` / 200 s a batch: seconds to the first batch, compared with only reading its
    files; share of the second epoch that the consumer computes; both for torch's loader as well."""
    results: dict[str, list[float]] = {}
    with contextlib.closing(open_reader(source)) as listed:
        names = [listed.name(k) for k in range(len(listed))]
        labels = [int(label) for label in listed.labels]
    with slow_mount(source, latency_s=_LATENCY_S, bandwidth=_BANDWIDTH) as mounted:
        files = [os.path.join(mounted, name) for name in names]
        for repeat in steps(range(repeats), "repeat {}".format):
            measured = _slow_dlio(mounted, workers, batch_size, repeat)
            bare = _read_all([files[k] for k in measured.pop("first")])
            measured["first_batch_over_read"] = measured["dlio_first_batch_s"] / bare
            measured["read_s"] = bare
            measured.update(_slow_torch(files, labels, workers, batch_size))
            for key, value in measured.items():
                results.setdefault(key, []).append(value)
    return {key: spread(values) for key, values in results.items()}


def decoded(
    source: str, repeats: int, workers: int, image_size: int, batch_size: int
) -> dict[str, object]:
    """Epochs after the first, from a RAM tier of blocks alone, and with decoded images above
    it, in turn: samples a second, for training and for evaluation; and the decision of the tier."""
    results: dict[str, Any] = {}
    for name, train in (("training", True), ("evaluation", False)):
        rates: dict[str, list[float]] = {"blocks": [], "decoded": []}
        tiers = {"blocks": "ram:4GiB", "decoded": "ram:4GiB,ram:4GiB:decoded"}
        with contextlib.ExitStack() as stack:
            loaders = {}
            for kind, text in tiers.items():
                data = dlio.open(source, tiers=text, image_size=image_size, train=train)
                stack.enter_context(data)
                loaders[kind] = stack.enter_context(
                    dlio.DataLoader(data, batch_size, shuffle=True, num_workers=workers)
                )
            for repeat in steps(range(1 + repeats), f"{name}, pass {{}}".format):
                for kind, loader in loaders.items():
                    began = time.perf_counter()
                    count = sum(len(labels) for _, labels in loader)
                    if repeat:
                        rates[kind].append(count / (time.perf_counter() - began))
            stats = loaders["decoded"].stats()
            results[f"{name}, share of samples that came decoded"] = (
                f"{stats['decoded'] / stats['samples']:.2f}, which saved "
                f"{stats['decode_saved_s']:.2f} thread seconds an epoch; "
                + " ".join(stats["notes"])
            )
        results[f"{name}, samples/s from blocks"] = spread(rates["blocks"])
        results[f"{name}, samples/s decoded"] = spread(rates["decoded"])
        results[f"{name}, decoded over blocks"] = ratio(rates["decoded"], rates["blocks"])
    return results


def _slow_dlio(mounted: str, workers: int, batch_size: int, seed: int) -> dict[str, Any]:
    with (
        dlio.open(mounted, tiers=ram_tier(bytes_below(mounted)), seed=seed) as data,
        dlio.DataLoader(
            data, batch_size, shuffle=True, num_workers=workers, persistent_workers=True
        ) as loader,
    ):
        first: list[int] = []
        figures = _two_epochs(
            "dlio", loader, lambda: first.extend([] if first else loader.last_samples.tolist())
        )
        source = loader.stats()["bytes"]["source"]
    return {"first": first, **figures, "dlio_source_bytes_epoch_2": float(source)}


def _slow_torch(
    files: list[str], labels: list[int], workers: int, batch_size: int
) -> dict[str, float]:
    loader = torch.utils.data.DataLoader(
        PillowImages(files, labels, 224, False),
        batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
    )
    return _two_epochs("torch", loader, lambda: None)


def _two_epochs(name: str, loader: Any, each: Callable[[], None]) -> dict[str, float]:
    """Seconds to the first batch, and the share of each epoch that was spent computing."""
    figures: dict[str, float] = {}
    for epoch in (1, 2):
        started = time.perf_counter()
        computing = 0.0
        for batch in loader:
            figures.setdefault(f"{name}_first_batch_s", time.perf_counter() - started)
            each()
            step = len(batch[0]) / _CONSUMED_PER_S
            time.sleep(step)
            computing += step
        figures[f"{name}_computing_epoch_{epoch}"] = computing / (time.perf_counter() - started)
    return figures


def _read_all(files: list[str]) -> float:
    """Seconds to read files, all at the same time."""

    def read(number: int) -> None:
        with open(files[number], "rb") as file:
            file.read()

    started = time.perf_counter()
    with Workers("dlio-bench", read, len(files)) as running:
        running.wait()
    return time.perf_counter() - started
