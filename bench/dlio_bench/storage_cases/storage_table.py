"""The measurement as tables for a terminal of 100 columns."""

from collections.abc import Iterator, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dlio.util.units import format_bytes
from dlio_bench.storage_cases.latencies import PERCENTILES
from dlio_bench.storage_cases.storage_job import StorageMeasurements
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
    wanted = _wanted(measured, ranks)
    if wanted is not None:
        yield f"the accelerators want {format_bytes(wanted)}/s"
    if measured.bare:
        threads, rate = max(measured.bare.items(), key=lambda each: each[1])
        yield (
            f"the storage gives {format_bytes(int(rate))}/s to bare reads by {threads} threads "
            "a rank"
        )


def _wanted(measured: StorageMeasurements, ranks: int) -> int | None:
    workload = measured.workload
    if not workload.step_s:
        return None
    mean = measured.data_bytes / workload.samples
    return int(mean * workload.batch_size * ranks / workload.step_s)


def show_tables(
    measured: StorageMeasurements, epochs: Sequence[LoaderEpochFigures], console: Console
) -> None:
    """Print the headline, and the table of epochs."""
    for line in headline(measured):
        console.print(line, highlight=False)
    console.print(epoch_table(epochs))


def epoch_table(epochs: Sequence[LoaderEpochFigures]) -> Table:
    """Return a row for each loader and epoch: medians over the repeats."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("loader", min_width=6, overflow="fold")
    for head in ("epoch", "AU, %", "samples/s", "MiB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("epoch, s", "of least, %", "first, s", "p50, ms", "p99", "p99.9", "cached"):
        table.add_column(head, justify="right")
    for loader in dict.fromkeys(each.loader for each in epochs):
        for number in sorted({each.epoch for each in epochs}):
            group = [each for each in epochs if (each.loader, each.epoch) == (loader, number)]
            cached = [each.cache_share for each in group if each.cache_share is not None]
            possible = [each.of_possible for each in group if each.of_possible is not None]
            table.add_row(
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
                f"{median(cached):.0%}" if cached else "unknown",
            )
    return table


def _middle(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f}" if values else ""
