"""Parts that the cases of `dlio bench gpu` share: settings, rates, reasons to skip."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dlio import DataLoader
from dlio_bench.bench_data import files_below
from dlio_bench.results.repeats import ratio, turns
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
        self.ratios.append(Ratio(name, tuple(ratio(over, under)["all"])))


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
    for _, name in turns(contenders, repeats):
        began = time.perf_counter()
        count = contenders[name]()
        rates[name].append(count / (time.perf_counter() - began))
    return rates


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
