"""A case of `dlio bench loader`: a map-style data set that waits for each sample, behind tiers."""

import threading
import time
from typing import Any, Final

import numpy as np
import torch

import dlio
from dlio.loader.contract import Sample
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import ratio, spread, turns
from dlio_bench.results.terminal import steps

_WIDTH: Final = 32
_TIERS: Final = "ram:256MiB"


class LatentSource(torch.utils.data.Dataset[Sample]):
    """Samples that take a while each, as those of a data base or of an object store do.

    A sample is (float32 tensor of shape (3, 32, 32), number); varying ones have 1 to 32 columns.

    Args:
        samples: number of samples.
        latency_s: seconds that each takes, without computing.
        run: distinguishes data sets whose tiers must not be shared.
    """

    def __init__(self, samples: int, latency_s: float, varying: bool, run: int = 0) -> None:
        self._latency_s, self._varying, self._run = latency_s, varying, run
        self.calls = np.zeros(samples, np.int64)
        """Calls for each sample; shape (samples,)."""
        self.most = 0
        """Calls under way at a time, at most."""
        self._now = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> Sample:
        with self._lock:
            self.calls[index] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self._latency_s)
        with self._lock:
            self._now -= 1
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
            tiers = _TIERS if name == "with" else None
            runs[name].append(_two_epochs(data, tiers, workers, batch_size))
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
                f"{shapes} shapes, {name} tiers: {flight} requests in flight at most; "
                f"calls per sample {calls['epoch_1']} in the first epoch, {calls['both']} in both"
            )
    return lines


_SHOWN: Final = ("first_batch_s", "epoch_1_s", "epoch_2_s")


def _two_epochs(
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
