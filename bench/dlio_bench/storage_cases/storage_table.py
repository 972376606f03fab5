"""The measurement as tables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dlio.util.units import format_bytes
from dlio_bench.results.terminal import table
from dlio_bench.storage_cases.latencies import PERCENTILES
from dlio_bench.storage_cases.rules import DISCLAIMER, Check, Outcome, TrainingFacts, check_training
from dlio_bench.storage_cases.storage_job import StorageMeasurements
from dlio_bench.storage_cases.storage_options import StorageCase
from dlio_bench.storage_cases.summary import LoaderEpochFigures


def headline(measured: StorageMeasurements) -> Iterator[str]:
    """Yield lines on the data and the storage."""
    workload = measured.workload
    ranks = len(measured.runs[0].ranks)
    yield (
        f"{workload.name}: {workload.files:,} {workload.format} files of "
        f"{workload.samples_per_file:,} samples, {format_bytes(measured.file_bytes)}; "
        f"{ranks} ranks on {len(measured.nodes.names)} nodes, batches of {workload.batch_size}, "
        f"steps of {1e3 * workload.step_s:.0f} ms"
    )
    if workload.step_s:
        step_bytes = measured.data_bytes / workload.samples * workload.batch_size * ranks
        yield f"the accelerators want {format_bytes(int(step_bytes / workload.step_s))}/s"
    if measured.bare:
        threads, rate = max(measured.bare.items(), key=lambda each: each[1])
        yield (
            f"the storage gives {format_bytes(int(rate))}/s to bare reads by {threads} threads "
            "a rank"
        )


def show_epochs(epochs: Sequence[LoaderEpochFigures]) -> None:
    """Print a row for each loader and epoch: medians over the repeats."""
    heads = (
        *("loader", "epoch", "AU, %", "samples/s", "MiB/s", "epoch, s", "of least, %"),
        *("first, s", "p50, ms", "p99", "p99.9", "cached"),
    )
    rows = []
    for loader in dict.fromkeys(each.loader for each in epochs):
        for number in sorted({each.epoch for each in epochs}):
            group = [each for each in epochs if (each.loader, each.epoch) == (loader, number)]
            cached = [each.cached_percent for each in group if each.cached_percent is not None]
            possible = [each.of_possible for each in group if each.of_possible is not None]
            rows.append(
                (
                    loader if number == 1 else "",
                    str(number),
                    _middle([each.au for each in group], 1),
                    _middle([each.samples_per_s for each in group], 1),
                    _middle([each.mib_per_s for each in group], 1),
                    _middle([each.seconds for each in group], 2),
                    _middle(possible, 1),
                    _middle([each.first_batch_s for each in group], 2),
                    *(
                        _middle([1e3 * each.batches.percentile(share) for each in group], 1)
                        for share in PERCENTILES
                    ),
                    f"{median(cached):.0f}%" if cached else "unknown",
                )
            )
    table("epochs, medians of the repeats", heads, rows)


def _middle(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f}" if values else ""


# Rules of MLPerf Storage and their outcomes, as a table and for JSON


_STYLES: Final[dict[Outcome, str]] = {
    "passed": "green",
    "failed": "red",
    "unknown": "yellow",
    "not applicable": "dim",
}


def rules_table(checked: Mapping[str, Sequence[Check]], title: str | None = None) -> Table:
    """Return a row for each rule; the caption says that this is not a result of MLPerf.

    Args:
        checked: checks by what was run, such as loaders: the same rules, in the same order.
        title: of the table.
    """
    drawn = Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        caption=DISCLAIMER,
        caption_justify="left",
    )
    drawn.add_column("rule")
    for name in checked:
        drawn.add_column(escape(name))
    drawn.add_column("wanted")
    drawn.add_column("source", no_wrap=True)
    for row in zip(*checked.values(), strict=True):
        outcomes = (f"[{_STYLES[each.outcome]}]{each.outcome}[/]" for each in row)
        cells = [
            f"{outcome}: {escape(each.measured)}"
            for outcome, each in zip(outcomes, row, strict=True)
        ]
        drawn.add_row(row[0].rule, *cells, row[0].wanted, row[0].source)
    return drawn


def rules_as_json(checks: Iterable[Check]) -> dict[str, object]:
    """Return the checks for a report, with the sentence that they are not a result of MLPerf."""
    return {"disclaimer": DISCLAIMER, "checks": [asdict(each) for each in checks]}


# A measurement held against the rules of MLPerf Storage


def checks_of(
    case: StorageCase,
    overridden: Sequence[str],
    emulates: bool,
    measured: StorageMeasurements,
    epochs: Sequence[LoaderEpochFigures],
) -> dict[str, list[Check]]:
    """Return the checks of each loader; none if no rules are asked for.

    Args:
        overridden: keys that differ from the workload's file.
        emulates: the storage is made slower on purpose.
    """
    if case.rules == "none":
        return {}
    shares = Counter(measured.nodes.node_of.tolist())
    result = {}
    for loader in dict.fromkeys(each.loader for each in epochs):
        mine = [each for each in epochs if each.loader == loader]
        numbers = sorted({each.epoch for each in mine})
        cached = [each.cached_percent for each in mine if each.cached_percent is not None]
        facts = TrainingFacts(
            workload=measured.workload,
            ranks=len(measured.runs[0].ranks),
            au=[mean(each.au / 100 for each in mine if each.epoch == k) for k in numbers],
            memory_bytes=measured.memory_bytes,
            overridden=overridden,
            ranks_by_host=[shares[node] for node in sorted(shares)],
            runs=case.repeats,
            cache_share=max(cached) / 100 if cached else None,
            in_memory=measured.meter.file_system.in_memory,
            emulated=emulates,
        )
        result[loader] = check_training(facts, case.rules)
    return result
