"""The hand-over: a loop of computation on the device that the loader feeds."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

import dlio
from dlio_bench.bench_data import payload_bytes, ram_tier
from dlio_bench.gpu.gpu_measurements import GpuMeasurements, GpuRunSettings
from dlio_bench.results.report_values import Figure

_SPARE: Final = 1.5
"""Computation of a batch, as a multiple of its loading: a loader that hands over in time has
no stall then."""


def handover(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """Time of a pass whose computation takes 1.5 times as long as its loading, compared with the
    computation alone on one resident batch; seconds that `next` waited; with CUDA also the trace of
    a pass: time of copies that kernels cover, and waits of the host."""
    tiers = ram_tier(payload_bytes(place.source))
    with (
        dlio.open(place.source, tiers=tiers, image_size=place.image_size) as data,
        dlio.DataLoader(
            data,
            place.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=place.workers,
            device=place.device,
            persistent_workers=True,
        ) as loader,
    ):
        if not len(loader):
            measured.skipped["handover"] = f"{len(data)} images are less than a batch"
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
    """Products of matrices that take a given time, with a value of the batch in them.

    Args:
        seconds: of each call.
    """

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


def _trace(run: Callable[[], object], place: GpuRunSettings, measured: GpuMeasurements) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        place.wait()
    sums = traced(seen.events())
    share = 100 * sums.covered_us / sums.copies_us if sums.copies_us else 100.0
    measured.figures += [
        Figure("hand-over, copies under kernels", "% of their time", (share,), better="higher"),
        Figure("hand-over, waits of the host", "", (float(sums.waits),), better="lower"),
    ]
    measured.notes.append("hand-over: one wait of the host ends the traced pass itself")


# Copies, kernels and waits in a trace of torch.profiler

Span = tuple[float, float]
"""Beginning and end, in microseconds."""


class _ProfilerEvent(Protocol):
    """An event of `torch.profiler.profile.events()`."""

    name: str
    device_type: object

    @property
    def time_range(self) -> Any: ...


_WAITS: Final = ("cudaDeviceSynchronize", "cudaStreamSynchronize")


@dataclass(frozen=True, slots=True)
class TraceSums:
    """Sums over a trace."""

    copies_us: float
    """Time of copies to the device."""
    covered_us: float
    """Part of it in which kernels ran."""
    waits: int
    """Calls by which the host waited for the device or for a whole stream."""


def traced(events: Iterable[_ProfilerEvent]) -> TraceSums:
    """Sum up the events of a profile."""
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
    return TraceSums(total, covered(copies, kernels), waits)


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
