"""Cases of `dlio bench loader`: large arrays, a slow file system, decoded images, map-style data,
transforms."""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import dlio
from dlio.data.reader import open_reader
from dlio.errors import UsageError
from dlio.image import crop_transforms as T  # noqa: N812 - as everybody calls them
from dlio.image.picture import PixelChange, PixelTransform
from dlio.image.random_source import KeyedRandom
from dlio.loader.contract import Sample
from dlio.plan.order import Order
from dlio.storage.block import read_info
from dlio.util.child_processes import variable
from dlio.util.extras import how_to_install
from dlio.util.threads import Workers
from dlio.util.units import counted
from dlio_bench.bench_data import bytes_below, files_below, ram_tier
from dlio_bench.emulated.emulated_mount import slow_mount
from dlio_bench.pillow import PillowImages
from dlio_bench.results.machine import describe_machine
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
                drop(files_below(files))
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
    started = time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(lambda file: Path(file).read_bytes(), files))
    return time.perf_counter() - started


# A map-style data set that waits for each sample, behind tiers


_WIDTH: Final = 32
_MAP_TIERS: Final = "ram:256MiB"


class _SharedCounts(np.ndarray[Any, np.dtype[np.int64]]):
    """Counts that all threads of the loader share: each has copies of plain arrays alone."""


class LatentSource(torch.utils.data.Dataset[Sample]):
    """Samples that take a while each, as those of a data base or of an object store do.

    A sample is (float32 tensor of shape (3, 32, 32), number); varying ones have 1 to 32 columns.
    Data sets whose tiers must not be shared differ in `run`.
    """

    def __init__(self, samples: int, latency_s: float, varying: bool, run: int = 0) -> None:
        self._latency_s, self._varying, self._run = latency_s, varying, run
        counts = np.zeros(samples + 2, np.int64).view(_SharedCounts)
        self.calls = counts[:samples]
        """Calls for each sample; shape (samples,)."""
        self._flight = counts[samples:]
        """Calls under way, and those at a time at most."""
        self._lock = threading.Lock()

    @property
    def most(self) -> int:
        """Calls under way at a time, at most."""
        return int(self._flight[1])

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> Sample:
        with self._lock:
            self.calls[index] += 1
            self._flight[0] += 1
            self._flight[1] = self._flight.max()
        time.sleep(self._latency_s)
        with self._lock:
            self._flight[0] -= 1
        columns = 1 + (index + self._run) % _WIDTH if self._varying else _WIDTH
        return torch.full((3, _WIDTH, columns), float(index + self._run)), index


def mapstyle(
    repeats: int, workers: int, batch_size: int, samples: int = 512, latency_s: float = 0.025
) -> dict[str, object]:
    """The same data set without and with `tiers=`, in turn: seconds of two epochs and to the first
    batch, counted from the making of the loader; requests in flight at most; calls per sample.

    Once with samples of one shape, once with varying ones. The ratios are those of one repeat's
    runs, with tiers over without.
    """
    report: dict[str, object] = {
        "samples": samples,
        "latency_s": latency_s,
        "workers": workers,
        "batch_size": batch_size,
        "machine": describe_machine(("dlio", "torch", "numpy")),
    }
    for shapes in ("fixed", "varying"):
        runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
        order = list(turns(runs, repeats))
        for repeat, name in steps(order, f"{shapes} shapes, repeat {{0[0]}}".format):
            data = LatentSource(samples, latency_s, shapes == "varying", repeat)
            tiers = _MAP_TIERS if name == "with" else None
            runs[name].append(_map_epochs(data, tiers, workers, batch_size))
        report[shapes] = _compared(runs)
    return report


def shown(report: dict[str, object]) -> list[str]:
    """Return sentences on the calls that a report of `mapstyle` counts."""
    lines = []
    for shapes in ("fixed", "varying"):
        part: Any = report[shapes]
        for name in ("without", "with"):
            flight, calls = part[name]["in_flight_most"], part[name]["calls_per_sample"]
            lines.append(
                f"{shapes} shapes, {name} tiers: {counted(flight, 'request')} in flight at most; "
                f"calls per sample {calls['epoch_1']} in the first epoch, {calls['both']} in both"
            )
    return lines


_SHOWN: Final = ("first_batch_s", "epoch_1_s", "epoch_2_s")


def _map_epochs(
    data: LatentSource, tiers: str | None, workers: int, batch_size: int
) -> dict[str, float]:
    """Figures of two epochs over a data set."""
    figures: dict[str, float] = {}
    began = time.perf_counter()
    with dlio.DataLoader(
        data, batch_size, shuffle=True, num_workers=workers, tiers=tiers, collate_fn=list
    ) as loader:
        for epoch in (1, 2):
            count = 0
            for batch in loader:
                figures.setdefault("first_batch_s", time.perf_counter() - began)
                count += len(batch)
            if count != len(data):
                raise AssertionError(f"an epoch had {count} of {len(data)} samples")
            figures[f"epoch_{epoch}_s"] = time.perf_counter() - began
            figures[f"least_{epoch}"] = int(data.calls.min())
            figures[f"most_{epoch}"] = int(data.calls.max())
            began = time.perf_counter()
    figures["in_flight"] = data.most
    return figures


def _compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, figures in runs.items():
        part[name] = {key: spread([run[key] for run in figures]) for key in _SHOWN}
        part[name]["in_flight_most"] = max(run["in_flight"] for run in figures)
        calls = {"epoch_1": _calls(figures, 1), "both": _calls(figures, 2)}
        part[name]["calls_per_sample"] = calls
    for key in _SHOWN:
        part[f"{key}_with_over_without"] = ratio(
            [run[key] for run in runs["with"]], [run[key] for run in runs["without"]]
        )
    return part


def _calls(figures: list[dict[str, float]], epoch: int) -> list[float]:
    """Least and greatest number of calls for a sample until the end of an epoch."""
    return [
        min(run[f"least_{epoch}"] for run in figures),
        max(run[f"most_{epoch}"] for run in figures),
    ]


# Microseconds a picture of dlio's transforms, compared with Pillow's that torchvision calls


_PICTURES: Final = 200
_TRANSFORMS: Final[dict[str, PixelTransform]] = {
    "ColorJitter": T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "TrivialAugmentWide": T.TrivialAugmentWide(),
    "RandAugment": T.RandAugment(),
    "RandomGrayscale": T.RandomGrayscale(1),
    "RandomSolarize": T.RandomSolarize(128, 1),
    "RandomEqualize": T.RandomEqualize(1),
    "RandomAutocontrast": T.RandomAutocontrast(1),
    "RandomAdjustSharpness": T.RandomAdjustSharpness(2, 1),
    "RandomHorizontalFlip": T.RandomHorizontalFlip(1),
    "GaussianBlur": T.GaussianBlur(23),
}


def augment(repeats: int, image_size: int, pictures: int = _PICTURES) -> dict[str, object]:
    """Measure the processor time of each transform, in turn with Pillow, over pictures of noise.

    Both do the same changes, drawn beforehand: dlio to arrays, Pillow to its own images. Blurs have
    no reference, as torchvision leaves Pillow for them.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise UsageError(
            f"the reference needs Pillow: {how_to_install('bench', 'pillow')}"
        ) from error
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (4, 8, 8, 3), np.uint8)
    size = (image_size, image_size)
    images = [PIL.Image.fromarray(each).resize(size) for each in noise]
    arrays = [np.array(image) for image in images]
    report: dict[str, object] = {
        "machine": describe_machine(["opencv-python-headless", "pillow", "numpy"]),
        "image_size": image_size,
        "pictures": pictures,
    }
    for name, transform in steps(_TRANSFORMS.items(), itemgetter(0)):
        drawn = [
            transform.draw(KeyedRandom(0, 0, number, 64), image_size, image_size)
            for number in range(pictures)
        ]
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeats):
            ours.append(_seconds(transform.paint, arrays, drawn))
            if name != "GaussianBlur":
                theirs.append(_seconds(_by_pillow, images, drawn))
        figures: dict[str, object] = {"us": spread([1e6 * each / pictures for each in ours])}
        if theirs:
            figures["pillow_us"] = spread([1e6 * each / pictures for each in theirs])
            figures["pillow_over_dlio"] = ratio(theirs, ours)
        report[name] = figures
    return report


def _seconds(paint: Any, images: Sequence[Any], drawn: Sequence[list[PixelChange]]) -> float:
    started = time.thread_time()
    for number, changes in enumerate(drawn):
        image = images[number % len(images)]
        for change in changes:
            image = paint(image, change)
    return time.thread_time() - started


def _by_pillow(image: Any, change: PixelChange) -> Any:
    """The same change by Pillow, as torchvision makes it."""
    from PIL import Image, ImageEnhance, ImageOps

    name, value = change
    enhancers: dict[str, Any] = {
        "brightness": ImageEnhance.Brightness,
        "contrast": ImageEnhance.Contrast,
        "color": ImageEnhance.Color,
        "saturation": ImageEnhance.Color,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name.lower() in enhancers:
        factor = value if name.islower() else 1 + value
        return enhancers[name.lower()](image).enhance(factor)
    if name == "hue":
        return _turned(image, value)
    if name in ("Posterize", "Solarize"):
        made: Callable[..., Any] = getattr(ImageOps, name.lower())
        return made(image, int(value))
    if name == "Rotate":
        return image.rotate(value, Image.Resampling.NEAREST)
    if name.startswith(("Shear", "Translate")):
        matrix = {
            "ShearX": (1, value, 0, 0, 1, 0),
            "ShearY": (1, 0, 0, value, 1, 0),
            "TranslateX": (1, 0, -int(value), 0, 1, 0),
            "TranslateY": (1, 0, 0, 0, 1, -int(value)),
        }[name]
        return image.transform(image.size, Image.Transform.AFFINE, matrix)
    plain: dict[str, Callable[[Any], Any]] = {
        "Identity": lambda image: image,
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "RandomAutocontrast": ImageOps.autocontrast,
        "RandomEqualize": ImageOps.equalize,
        "RandomGrayscale": lambda image: image.convert("L").convert("RGB"),
        "RandomSolarize": lambda image: ImageOps.solarize(image, 128),
        "RandomAdjustSharpness": lambda image: ImageEnhance.Sharpness(image).enhance(2),
        "RandomHorizontalFlip": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    }
    return plain[name](image)


def _turned(image: Any, shift: float) -> Any:
    """torchvision's adjust_hue of a picture."""
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    turned: npt.NDArray[np.uint8] = np.array(hue) + np.int32(shift * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
