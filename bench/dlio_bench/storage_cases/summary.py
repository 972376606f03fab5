"""Figures of epochs, from the records of all ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

import numpy as np

from dlio_bench.results.report_values import Better, Figure, PlotCurve, Ratio, Waterfall
from dlio_bench.storage_cases.latencies import PERCENTILES, Latencies
from dlio_bench.storage_cases.served_bytes import ServedBytes, Verdict
from dlio_bench.storage_cases.storage_job import LoaderRun, StorageMeasurements
from dlio_bench.storage_cases.utilisation import LEAST_STEPS, LEFT_OUT, StepTimes, least_seconds

EpochRecord = Mapping[str, Any]
"""One rank's epoch; see `StorageRankEpoch.to_json`."""
_MIB: Final = 1 << 20
_POINTS: Final = 120
"""Points of a curve over time."""


@dataclass(frozen=True, slots=True)
class LoaderEpochFigures:
    """One epoch of a loader, of all ranks together."""

    loader: str
    repeat: int
    epoch: int
    """From 1."""
    au: float | None
    """Accelerator utilisation, mean over the ranks, in percent; None of fewer steps than
    LEAST_STEPS."""
    samples_per_s: float | None
    """Throughput without the first step; None if no step counts."""
    dlio_samples_per_s: float | None
    """Throughput as DLIO counts it; None if no step counts."""
    mib_per_s: float | None
    seconds: float
    """Time of the slowest rank, first batch included."""
    other_ranks_s: float
    """Time that a rank waited for others, and for the end of its loader's pass; mean."""
    first_batch_s: float
    """Time until the slowest rank's first batch."""
    of_possible: float | None
    """Least time that this storage and these accelerators need for the epoch, over the time that it
    took, in percent; None if the storage was not measured."""
    batches: Latencies
    """Times that ranks waited for batches, without the first."""
    requests: Latencies
    request_kind: str
    """`request` or `sample`: the unit of `requests`."""
    served: ServedBytes
    verdict: Verdict
    """Whether the bytes came from the page cache."""
    cpu_s: float
    """Processor seconds of the whole run of this loader, all epochs."""
    memory_bytes: int

    @property
    def iops(self) -> float:
        """Requests per second of all ranks, over the whole epoch."""
        return len(self.requests) / self.seconds

    @property
    def cached_percent(self) -> float | None:
        """Share of the bytes that came from the page cache; None if it is not known."""
        share = self.verdict.cache_share
        return None if share is None else 100 * share


def epochs_of(measured: StorageMeasurements) -> list[LoaderEpochFigures]:
    """Return the figures of all epochs, in the order of the runs."""
    numbers = range(measured.data.workload.epochs)
    return [_epoch(measured, run, number) for run in measured.runs for number in numbers]


def _epoch(measured: StorageMeasurements, run: LoaderRun, number: int) -> LoaderEpochFigures:
    workload, ranks = measured.data.workload, len(run.ranks)
    records = [rank["epochs"][number] for rank in run.ranks]
    steps = [_steps(each) for each in records]
    batches, requests = latencies_of(records)
    served = _served(measured, records)
    resident = [each["resident_before"] for each in records if each["resident_before"] is not None]
    verdict = measured.meter.verdict(
        served,
        sum(each["wanted_bytes"] for each in records),
        max(resident) if resident else None,
    )
    counted = run.steps - LEFT_OUT
    samples_per_s = sum(each.throughput for each in steps) if counted > 0 else None
    au = 100 * sum(each.utilisation for each in steps) / ranks if counted >= LEAST_STEPS else None
    seconds = max(each.seconds for each in steps)
    mean_bytes = measured.data.data_bytes / workload.samples
    possible = None
    # Epochs after the first read from tiers, where a loader has any: no limit of the storage.
    if measured.bare and number == 0:
        step_bytes = mean_bytes * workload.batch_size * ranks
        fastest = max(measured.bare.values()) * measured.data.data_bytes / measured.data.file_bytes
        possible = 100 * least_seconds(run.steps, workload.step_s, step_bytes, fastest) / seconds
    return LoaderEpochFigures(
        loader=run.loader,
        repeat=run.repeat,
        epoch=number + 1,
        au=au,
        samples_per_s=samples_per_s,
        dlio_samples_per_s=sum(each.dlio_throughput for each in steps) if counted > 1 else None,
        mib_per_s=None if samples_per_s is None else samples_per_s * mean_bytes / _MIB,
        seconds=seconds,
        other_ranks_s=_parts(steps)["other ranks"],
        first_batch_s=max(each.load_s[0] for each in steps),
        of_possible=possible,
        batches=batches,
        requests=requests,
        request_kind=records[0]["request_kind"],
        served=served,
        verdict=verdict,
        cpu_s=sum(rank["cpu_s"] for rank in run.ranks),
        memory_bytes=sum(rank["memory_bytes"] for rank in run.ranks),
    )


def latencies_of(records: Iterable[EpochRecord]) -> tuple[Latencies, Latencies]:
    """Return the latencies of batches, without the first ones, and of requests."""
    batches, requests = Latencies(), Latencies()
    for record in records:
        batches.add(record["steps"]["load_s"][LEFT_OUT:])
        requests.merge(record["requests"])
    return batches, requests


def _steps(record: EpochRecord) -> StepTimes:
    return StepTimes(**record["steps"])


def _served(measured: StorageMeasurements, records: Sequence[EpochRecord]) -> ServedBytes:
    """Add the counters of ranks; those of a device or of slowfs once for each node."""
    total = ServedBytes()
    seen: set[int] = set()
    for node, record in zip(measured.nodes.node_of.tolist(), records, strict=True):
        each = ServedBytes(**record["served"])
        total = total.added(each, shared=node not in seen)
        seen.add(node)
    return total


_FIGURES: Final[
    tuple[tuple[str, str, Better, Callable[[LoaderEpochFigures], float | None]], ...]
] = (
    ("accelerator utilisation", "%", "higher", lambda each: each.au),
    ("throughput", "samples/s", "higher", lambda each: each.samples_per_s),
    ("throughput as DLIO counts it", "samples/s", "higher", lambda each: each.dlio_samples_per_s),
    ("bandwidth", "MiB/s", "higher", lambda each: each.mib_per_s),
    ("epoch", "s", "lower", lambda each: each.seconds),
    ("other ranks", "s", "lower", lambda each: each.other_ranks_s),
    ("first batch", "s", "lower", lambda each: each.first_batch_s),
    ("least time over epoch", "%", "higher", lambda each: each.of_possible),
    ("page cache", "%", "", lambda each: each.cached_percent),
)


def figures(epochs: Sequence[LoaderEpochFigures]) -> list[Figure]:
    """Return one figure for each quantity, loader and epoch, with a value for each repeat."""
    result = []
    for (loader, epoch), group in grouped(epochs).items():
        labels = {"loader": loader, "epoch": str(epoch)}
        for name, unit, better, value in _FIGURES:
            values = tuple(each for each in map(value, group) if each is not None)
            if values:
                result.append(Figure(name, unit, values, labels, better))
        rates = tuple(each.iops for each in group if len(each.requests))
        if rates:
            name = "IOPS" if group[0].request_kind == "request" else "samples asked for"
            result.append(Figure(name, "1/s", rates, labels, "higher"))
        for kind in ("batch", group[0].request_kind):
            for share in PERCENTILES:
                latencies = [each.batches if kind == "batch" else each.requests for each in group]
                values = tuple(1e3 * each.percentile(share) for each in latencies if len(each))
                if values:
                    name = f"{kind} p{share:g}"
                    result.append(Figure(name, "ms", values, labels, "lower"))
    for loader in dict.fromkeys(each.loader for each in epochs):
        runs = [each for each in epochs if each.loader == loader and each.epoch == 1]
        cpu = tuple(each.cpu_s for each in runs)
        memory = tuple(each.memory_bytes / _MIB for each in runs)
        result.append(Figure("processor time of a run", "s", cpu, {"loader": loader}, "lower"))
        result.append(
            Figure("memory in the middle of an epoch", "MiB", memory, {"loader": loader}, "lower")
        )
    return result


def ratios(epochs: Sequence[LoaderEpochFigures]) -> list[Ratio]:
    """Return dlio's throughput and epoch time compared with each other loader's, by epoch."""
    groups = grouped(epochs)
    result = []
    for (loader, epoch), group in groups.items():
        mine = groups.get(("dlio", epoch))
        if loader == "dlio" or mine is None:
            continue
        labels = {"epoch": str(epoch)}
        pairs = list(zip(mine, group, strict=True))
        name = f"throughput, dlio / {loader}"
        rates = tuple(
            a.samples_per_s / b.samples_per_s
            for a, b in pairs
            if a.samples_per_s is not None and b.samples_per_s
        )
        if rates:
            result.append(Ratio(name, rates, labels))
        times = tuple(b.seconds / a.seconds for a, b in pairs)
        result.append(Ratio(f"epoch time, {loader} / dlio", times, labels))
    return result


def curves(
    measured: StorageMeasurements, epochs: Sequence[LoaderEpochFigures]
) -> Iterator[PlotCurve]:
    """Yield the distributions of latencies, and the throughput over time, of the first repeat."""
    for each in epochs:
        if each.repeat:
            continue
        labels = {"loader": each.loader, "epoch": str(each.epoch)}
        for name, latencies in (("batch", each.batches), (each.request_kind, each.requests)):
            x, y = latencies.curve()
            if x:
                title = f"Latency of a {name}"
                yield PlotCurve(title, "cdf", "seconds", "share of all", x, y, labels)
    for run in measured.runs:
        if run.repeat:
            continue
        for number in range(measured.data.workload.epochs):
            records = [rank["epochs"][number] for rank in run.ranks]
            x, y = _over_time(records, measured.data.workload.batch_size)
            if x:
                labels = {"loader": run.loader, "epoch": str(number + 1)}
                yield PlotCurve("Samples over time", "time", "seconds", "samples/s", x, y, labels)


def _over_time(
    records: Sequence[EpochRecord], batch_size: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (ends of intervals in seconds, samples per second in each), of all ranks."""
    ends = sorted(at for record in records for at in record["ended_s"])
    steps = len(records[0]["ended_s"])
    count = min(_POINTS, max(1, steps // 2))
    width = ends[-1] / count
    if not width:
        return (), ()
    batches = np.histogram(ends, count, (0.0, ends[-1]))[0].tolist()
    x = tuple(width * (k + 1) for k in range(count))
    return x, tuple(each * batch_size / width for each in batches)


def waterfalls(measured: StorageMeasurements) -> Iterator[Waterfall]:
    """Yield where the time of each epoch went, mean over the ranks, of the first repeat."""
    for run in measured.runs:
        for number in range(measured.data.workload.epochs if run.repeat == 0 else 0):
            steps = [_steps(rank["epochs"][number]) for rank in run.ranks]
            labels = {"loader": run.loader, "epoch": str(number + 1)}
            yield Waterfall("Time of an epoch", _parts(steps), labels)


def _parts(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return where the time of an epoch went, in seconds, mean over the ranks."""
    parts = {
        "first batch": mean(each.load_s[0] for each in steps),
        "other batches": mean(sum(each.load_s[1:]) for each in steps),
        "computing": mean(sum(each.compute_s) for each in steps),
        "comparing samples": mean(sum(each.over_s) for each in steps),
    }
    seconds = mean(each.seconds for each in steps)
    parts["other ranks"] = max(0.0, seconds - sum(parts.values()))
    return parts


def grouped(
    epochs: Sequence[LoaderEpochFigures],
) -> dict[tuple[str, int], list[LoaderEpochFigures]]:
    """The repeats of each loader's epoch, by (loader, epoch); repeats in their order."""
    groups: dict[tuple[str, int], list[LoaderEpochFigures]] = {}
    for each in sorted(epochs, key=lambda one: one.repeat):
        groups.setdefault((each.loader, each.epoch), []).append(each)
    return groups
