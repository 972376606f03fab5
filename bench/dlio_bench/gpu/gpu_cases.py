"""Cases of `dlio bench gpu`: decoding, the tier of decoded images, steps, the hand-over."""

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.functional import cross_entropy

import dlio
import dlio.transforms as T  # noqa: N812 - as everybody calls them
from dlio import DataLoader
from dlio.image.crop import Crop, boxes_of
from dlio.image.device_decode.crop_kernel import crop_batch
from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed
from dlio.train.compute_device import Precision, channels_last
from dlio.train.networks.resnet import resnet50
from dlio.util.child_processes import variable
from dlio.util.settings import DEVICE_TIER
from dlio.util.units import counted
from dlio_bench.bench_data import files_below, payload_bytes, ram_tier
from dlio_bench.results.repeats import ratio, turns
from dlio_bench.results.report_values import Figure, Ratio, Results


@dataclass(frozen=True, slots=True)
class GpuRunSettings:
    """Settings of a run, the same for all cases."""

    device: torch.device
    source: str
    """Class folders of images."""
    scratch: str
    """Folder for packed data."""
    image_size: int
    batch_size: int
    workers: int
    repeats: int
    steps: int

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(slots=True)
class GpuResults(Results):
    """Results of the cases so far."""

    skipped: dict[str, str] = field(default_factory=dict)
    """By case or part of one, the reason."""

    def __post_init__(self) -> None:
        self.details = {"skipped": self.skipped, "gpu": gpu_name()}

    def rates(self, name: str, rates: Mapping[str, list[float]]) -> None:
        """Add samples/s by contender."""
        for label, values in rates.items():
            figure = Figure(name, "samples/s", tuple(values), {"case": label}, "higher")
            self.figures.append(figure)

    def ratio(self, name: str, over: list[float], under: list[float]) -> None:
        """Add the ratio of repeats measured in turn."""
        self.ratios.append(Ratio(name, tuple(ratio(over, under)["all"])))


def gpu_name() -> str | None:
    """Return the name of the GPU; None if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def rates_in_turn(
    contenders: Mapping[str, Callable[[], int]], place: GpuRunSettings, repeats: int = 0
) -> dict[str, list[float]]:
    """Return samples/s of each repeat; contenders, which return their samples, take turns, after
    one pass each that is not timed."""
    for run in contenders.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _, name in turns(contenders, repeats or place.repeats):
        place.wait()
        began = time.perf_counter()
        count = contenders[name]()
        place.wait()
        rates[name].append(count / (time.perf_counter() - began))
    return rates


def _samples(loader: DataLoader) -> int:
    """Make a pass and count its samples."""
    return sum(len(images) for images, _ in loader)


def repeated(place: GpuRunSettings, batches: int) -> str:
    """Return a folder with the images for so many batches: the source, or one of links to its
    images under several names."""
    files = files_below(place.source)
    names = [path for path in files if path.lower().endswith((".jpg", ".jpeg"))]
    times = -(-batches * place.batch_size // max(1, len(names)))
    if times <= 1:
        return place.source
    made = os.path.join(place.scratch, "repeated")
    for path in names:
        inside, name = os.path.split(os.path.relpath(path, place.source))
        os.makedirs(os.path.join(made, inside), exist_ok=True)
        for number in range(times):
            os.symlink(os.path.abspath(path), os.path.join(made, inside, f"{number}-{name}"))
    return made


# Decoding of JPEGs into crops: by the loader's threads, and on the device by nvImageCodec


def decode(place: GpuRunSettings, measured: GpuResults) -> None:
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
            rates |= rates_in_turn({label: partial(_samples, loader)}, place)
            stats = loader.stats()
        if way == "device":
            measured.notes.append(
                f"decode, {label}: {counted(stats.get('device_images', 0), 'image')} on the "
                f"device, {stats.get('fallbacks', 0)} by the CPU, {stats.get('device_bytes', 0)} "
                "bytes sent a pass"
            )
    rates |= rates_in_turn(_others(place, measured), place)
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
    """Return a loader that decodes by `threads`, by `processes` or on the `device`; a steady one
    has batches of one size, and keeps its workers from pass to pass."""
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


def _others(place: GpuRunSettings, measured: GpuResults) -> dict[str, Callable[[], int]]:
    name = "decode: DALI"
    if place.device.type != "cuda":
        measured.skipped[name] = "needs a CUDA device: its decoder `mixed` is measured"
    elif importlib.util.find_spec("nvidia.dali") is None:
        measured.skipped[name] = "not installed: pip install nvidia-dali-cuda120"
    else:
        return {"DALI": _best_of_dali(place, measured)}
    return {}


def _best_of_dali(place: GpuRunSettings, measured: GpuResults) -> Callable[[], int]:
    """Return a pass of the fastest of some pipelines, each after one that is not timed."""
    loads = (0.0, 0.65, 0.9)  # Shares of the device's JPEG engine; the rest go to CUDA's decoder.
    runs = {str(load): _dali_pass(place, load) for load in loads}
    rates = {name: rate for name, (rate,) in rates_in_turn(runs, place, 1).items()}
    chosen = max(rates, key=rates.__getitem__)
    measured.notes.append(f"decode, DALI: hw_decoder_load={chosen} of {loads} is fastest")
    return runs[chosen]


def _dali_pass(place: GpuRunSettings, load: float) -> Callable[[], int]:
    from dlio_bench.peers.standalone.runners.dali import pipeline_of

    count, next_batch = pipeline_of(
        {"file_root": place.source},
        place.image_size,
        place.batch_size,
        place.workers,
        place.device.index or 0,
        hw_decoder_load=load,
    )

    def run() -> int:
        for _ in range(-(-count // place.batch_size)):
            next_batch()
        return count

    return run


def _turboloader(place: GpuRunSettings, measured: GpuResults) -> None:
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


# The tier of decoded images on the device: passes once it is full, and its kernel alone


def tier(place: GpuRunSettings, measured: GpuResults) -> None:
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
                loader_of(data, place, "threads") as loader,
            ):
                name = f"{kind}:SIZE:decoded"
                rates |= rates_in_turn({name: partial(_samples, loader)}, place)
                stats = loader.stats()
                measured.notes.append(
                    f"tier, {name}: {stats['decoded']} of {counted(stats['samples'], 'sample')} of "
                    "the last pass came decoded"
                )
    rates |= rates_in_turn({"kernel alone": _kernel(place, short)}, place)
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
        return place.steps * place.batch_size

    return run


# Training steps of a ResNet-50: fed by dlio, and on one batch that stays on the device


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def step(place: GpuRunSettings, measured: GpuResults) -> None:
    """Samples/s of training steps (bfloat16, channels last, SGD with momentum), in turn: images
    decoded by the loader's threads, by its processes, on the device where nvImageCodec is
    installed, from the tier of decoded images where there is a GPU; and the same normalised batch
    again and again."""
    blocks = ram_tier(payload_bytes(place.source))
    ways = {"threads": blocks, "processes": blocks}
    if is_installed():
        ways["device"] = blocks
    else:
        measured.skipped["step: device"] = f"nvImageCodec is not installed: {REMEDY}"
    if place.device.type == "cuda":
        ways["tier"] = f"gpu:4GiB:decoded,{blocks}"
    else:
        measured.skipped["step: tier"] = "needs a CUDA device"
    training = _ResNetTraining(place)
    transform = T.Compose([T.ToDtype(torch.float32, scale=True), T.Normalize(_MEAN, _STD)])
    for name, tiers in ways.items():
        with (
            dlio.open(
                place.source, tiers=tiers, image_size=place.image_size, transform=transform
            ) as data,
            loader_of(data, place, name, steady=True) as loader,
        ):
            if not len(loader):
                measured.skipped[f"step: {name}"] = (
                    f"only {counted(len(data), 'image')}, less than a batch"
                )
                continue
            fed = (batch for _ in itertools.count() for batch in loader)
            for _ in range(len(loader) + 2):  # Fills the tiers; the device compiles and chooses.
                training(*next(fed))
            sources = {"fed": fed, "resident": itertools.repeat(next(fed))}
            contenders = {key: partial(training.steps, each) for key, each in sources.items()}
            rates = rates_in_turn(contenders, place)
            fed.close()
        measured.rates(f"ResNet-50 step, {name}", rates)
        measured.ratio(f"ResNet-50 step, {name}: fed / resident", rates["fed"], rates["resident"])


class _ResNetTraining:
    def __init__(self, place: GpuRunSettings) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = channels_last(resnet50(1000)).to(place.device).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._precision = Precision("bf16", place.device)
        self._place = place

    def steps(self, batches: Iterator[Any]) -> int:
        """Make the timed steps; return their samples."""
        for images, labels in itertools.islice(batches, self._place.steps):
            self(images, labels)
        return self._place.steps * self._place.batch_size

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.casting():
            loss = cross_entropy(self._model(images), labels)
        torch.autograd.backward(loss)
        self._optimizer.step()


# The hand-over: a loop of computation on the device that the loader feeds


_SPARE: Final = 1.5
"""Computation of a batch, as a multiple of its loading: a loader that hands over in time has
no stall then."""


def handover(place: GpuRunSettings, measured: GpuResults) -> None:
    """Time of a pass whose computation takes 1.5 times as long as its loading, compared with the
    computation alone on one resident batch; seconds that `next` waited; with CUDA also the trace of
    a pass: time of copies that kernels cover, and waits of the host."""
    tiers = ram_tier(payload_bytes(place.source))
    with (
        dlio.open(place.source, tiers=tiers, image_size=place.image_size) as data,
        loader_of(data, place, "threads", steady=True) as loader,
    ):
        if not len(loader):
            measured.skipped["handover"] = f"only {counted(len(data), 'image')}, less than a batch"
            return
        _timed(lambda: _consume(loader, None), place)
        loading = _timed(lambda: _consume(loader, None), place) / len(loader)
        resident = next(iter(loader))[0]
        work = _MatrixWork(place, _SPARE * loading)
        batches = [(resident, None)] * len(loader)
        over, stalls = [], []
        for _ in range(place.repeats):
            alone = _timed(lambda: _consume(batches, work), place)
            fed = _timed(lambda: _consume(loader, work), place)
            over.append(alone / fed)
            stalls.append(100 * loader.stats()["stall_s"] / fed)
        measured.figures.append(
            Figure("hand-over, `next` waited", "% of the pass", tuple(stalls), better="lower")
        )
        measured.ratio("hand-over, computation alone / fed", over, [1.0] * len(over))
        if place.device.type == "cuda":
            _trace(lambda: _consume(loader, work), place, measured)
        else:
            measured.skipped["handover: trace"] = "needs a CUDA device: no copies without one"


class _MatrixWork:
    """Products of matrices that take a given time at each call, with a value of the batch in
    them."""

    def __init__(self, place: GpuRunSettings, seconds: float) -> None:
        on_gpu = place.device.type == "cuda"
        side, dtype = (4096, torch.bfloat16) if on_gpu else (256, torch.float32)
        self._matrix = torch.eye(side, dtype=dtype, device=place.device)
        self._times = 1
        images = torch.zeros(1, dtype=torch.uint8, device=place.device)
        self(images)
        each = _timed(lambda: _consume([(images, None)] * 10, self), place) / 10
        self._times = max(1, round(seconds / each))

    def __call__(self, images: torch.Tensor) -> None:
        matrix = self._matrix + images.flatten()[:1]
        for _ in range(self._times):
            matrix = matrix @ self._matrix


def _consume(batches: Iterable[Any], work: Callable[[torch.Tensor], object] | None) -> None:
    for images, _ in batches:
        if work is not None:
            work(images)


def _timed(run: Callable[[], object], place: GpuRunSettings) -> float:
    place.wait()
    began = time.perf_counter()
    run()
    place.wait()
    return time.perf_counter() - began


def _trace(run: Callable[[], object], place: GpuRunSettings, measured: GpuResults) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        place.wait()
    copies_us, covered_us, waits = traced(seen.events())
    share = 100 * covered_us / copies_us if copies_us else 100.0
    measured.figures += [
        Figure("hand-over, copies under kernels", "% of their time", (share,), better="higher"),
        Figure("hand-over, waits of the host", "", (float(waits),), better="lower"),
    ]
    measured.notes.append("hand-over: one wait of the host ends the traced pass itself")


# Copies, kernels and waits in a trace of torch.profiler

Span = tuple[float, float]
"""Beginning and end, in microseconds."""


_WAITS: Final = ("cudaDeviceSynchronize", "cudaStreamSynchronize")
"""Calls by which the host waits for the device or for a whole stream."""


def traced(events: Iterable[FunctionEvent]) -> tuple[float, float, int]:
    """Sum up the events of `torch.profiler.profile`.

    Returns the microseconds of copies to the device, those of them in which kernels ran, and the
    number of waits of the host.
    """
    copies: list[Span] = []
    kernels: list[Span] = []
    waits = 0
    for event in events:
        name, span = event.name, (event.time_range.start, event.time_range.end)
        if name in _WAITS:
            waits += 1
        elif "HtoD" in name:
            copies.append(span)
        elif str(event.device_type).endswith("CUDA") and not name.startswith(("Mem", "mem")):
            kernels.append(span)
    total = sum(end - begin for begin, end in copies)
    return total, covered(copies, kernels), waits


def covered(spans: Sequence[Span], by: Sequence[Span]) -> float:
    """Return the length of the parts of `spans` that lie in the union of `by`."""
    union: list[list[float]] = []
    for begin, end in sorted(by):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    return sum(
        max(0.0, min(end, there[1]) - max(begin, there[0]))
        for begin, end in spans
        for there in union
    )
