"""Parts that the cases of `dlio bench gpu` share: settings, rates, reasons to skip."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dlio import DataLoader
from dlio_bench.results.report_values import Figure, Ratio


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
class GpuMeasurements:
    """Results of the cases so far."""

    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """By case or part of one, the reason."""

    def rates(self, name: str, rates: Mapping[str, list[float]]) -> None:
        """Add samples/s by contender."""
        for label, values in rates.items():
            figure = Figure(name, "samples/s", tuple(values), {"case": label}, "higher")
            self.figures.append(figure)

    def ratio(self, name: str, over: list[float], under: list[float]) -> None:
        """Add the ratio of repeats measured in turn."""
        values = tuple(a / b for a, b in zip(over, under, strict=True))
        self.ratios.append(Ratio(name, values))


def passes(loader: DataLoader, place: GpuRunSettings) -> Callable[[], int]:
    """Return a function that makes one pass and counts its samples."""

    def run() -> int:
        count = 0
        for images, _ in loader:
            count += len(images)
        place.wait()
        return count

    return run


def rates_in_turn(
    contenders: Mapping[str, Callable[[], int]], repeats: int
) -> dict[str, list[float]]:
    """Return samples/s of each repeat; contenders take turns, after one pass each that is not
    timed."""
    for run in contenders.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        names = list(contenders)
        for name in names if repeat % 2 == 0 else names[::-1]:
            began = time.perf_counter()
            count = contenders[name]()
            rates[name].append(count / (time.perf_counter() - began))
    return rates


def repeated(place: GpuRunSettings, batches: int) -> str:
    """Return a folder with the images for so many batches: the source, or one of links to its
    images under several names."""
    names = [
        os.path.join(folder, name)
        for folder, _, files in os.walk(place.source)
        for name in files
        if name.lower().endswith((".jpg", ".jpeg"))
    ]
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


def tiers_for(size: int) -> str:
    """Return a RAM tier with room for so many payload bytes."""
    return f"ram:{int(1.2 * size) + (64 << 20)}B"
