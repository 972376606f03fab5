"""`dlio bench storage`: a storage system, read as training reads it."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.comm.world import world
from dlio.launch.command_ranks import on_ranks
from dlio.util.machine_memory import usable_memory
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes, parse_bytes
from dlio.util.whole_files import check_writable
from dlio_bench.emulated.emulated_mount import Emulation, emulated
from dlio_bench.file_systems import check_folder
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import console, show_notes, table
from dlio_bench.storage_cases.claim import remove_unclaimed
from dlio_bench.storage_cases.data_size import DataSize, data_size
from dlio_bench.storage_cases.dlio_keys import checkpoint_note
from dlio_bench.storage_cases.latencies import PERCENTILES, Latencies
from dlio_bench.storage_cases.metadata import MetadataRate, measure_metadata
from dlio_bench.storage_cases.requests_table import show_requests, write_csv
from dlio_bench.storage_cases.rules import DISCLAIMER, Check, Outcome, TrainingFacts, check_training
from dlio_bench.storage_cases.storage_job import StorageMeasurements, data_folder, measure
from dlio_bench.storage_cases.storage_options import StorageCase
from dlio_bench.storage_cases.summary import (
    LoaderEpochFigures,
    curves,
    epochs_of,
    figures,
    grouped,
    latencies_of,
    ratios,
    waterfalls,
)
from dlio_bench.storage_cases.utilisation import LEAST_STEPS, LEFT_OUT


@with_help(
    usual=(
        "path",
        ("workload", "A file of DLIO's, or a name such as unet3d_h100"),
        *("format", "files", "sample_size", "batch_size", "epochs", "loaders", "tiers"),
        ("cache", "Page cache before each epoch: drop, drop-all or keep"),
        ("plan", "Say how many files and bytes MLPerf's rules ask for"),
        *("rules", "emulate", "ranks", "report"),
    ),
)
def command(
    case: StorageCase, emulation: Emulation, ranks: RankOptions, output: OutputOptions
) -> None:
    """Measure a storage system as training reads it.

    Generates the data of a workload in PATH, reads it for some epochs with an emulated accelerator
    through torch's DataLoader and dlio's, and reports the accelerator's utilisation as MLPerf
    Storage defines it, throughput, latencies, and whether the page cache served the reads. Starts
    ranks with -n, or runs on those that mpirun or srun started, on any number of nodes.
    """
    output.check_writable()
    workload = case.asked().workload
    if case.plan:
        check_folder(case.path)
        memory = usable_memory() if case.memory is None else parse_bytes(case.memory)
        size = data_size(workload, ranks.ranks or 1, memory)
        print_line(size.describe())
        print_line(f"measure it by: dlio bench storage {case.path} {_again(case, size)}")
        output.write(asdict(size))
        return
    if case.csv is not None:
        check_writable("--csv", case.csv)
    emulation.check_possible()
    check_folder(case.path)
    folder = data_folder(case.path, workload)
    existed = os.path.isdir(folder)
    try:
        on_ranks(
            ranks.ranks, run_storage, case, emulation, output, backend=ranks.backend, live=True
        )
    except BaseException:
        # A launcher kills ranks soon after Ctrl-C: they may not have come to remove their data.
        if ranks.ranks is not None and not existed and not case.keep:
            remove_unclaimed(folder)
        raise


def _again(case: StorageCase, size: DataSize) -> str:
    """Return the options of a run with the data of a plan."""
    named = f"--workload {case.workload} " if case.workload else ""
    return f"{named}--files {size.files} -n {size.ranks}"


def run_storage(case: StorageCase, emulation: Emulation, output: OutputOptions) -> None:
    """Measure on this rank, and report on rank 0. Collective."""
    comm = world()
    started = begin(output)
    asked = case.asked()
    measured = measure(case, asked.workload, emulation, comm)
    if comm.rank != 0:
        return
    epochs = epochs_of(measured)
    rates = []
    if case.metadata_files:
        # The ranks' emulated storage, which is for reading, has ended with them.
        with emulated(case.path, emulation.profile) as path:
            rates = measure_metadata(path, files=case.metadata_files)
    checked = checks_of(case, asked.overridden, emulation.profile.emulates, measured, epochs)
    notes = [*asked.notes, *checkpoint_note(asked.settings), *_notes(case, measured, epochs)]
    results = _results(case, emulation, measured, epochs, rates, notes)
    if checked:
        rules = {
            name: {"disclaimer": DISCLAIMER, "checks": [asdict(each) for each in checks]}
            for name, checks in checked.items()
        }
        results.details = {**results.details, "rules": rules}
    _show(case, measured, epochs, rates, checked, results)
    if case.csv is not None:
        write_csv(case.csv, epochs)
    finish(output, results, started)


def _results(
    case: StorageCase,
    emulation: Emulation,
    measured: StorageMeasurements,
    epochs: list[LoaderEpochFigures],
    rates: list[MetadataRate],
    notes: list[str],
) -> Results:
    metadata = []
    for rate in rates:
        labels = {"operation": rate.operation}
        metadata.append(Figure("metadata operations", "1/s", (rate.per_second,), labels, "higher"))
        for share in (50, 99):
            latency_ms = 1e3 * rate.percentile(share / 100)
            metadata.append(Figure(f"metadata p{share}", "ms", (latency_ms,), labels, "lower"))
    bare = [
        Figure("bare parallel reads", "B/s", (rate,), {"threads": str(threads)}, "higher")
        for threads, rate in measured.bare.items()
    ]
    return Results(
        "storage",
        settings={**case.as_run(measured.data.workload), **asdict(emulation)},
        seeds={"seed": measured.data.workload.seed},
        figures=[*figures(epochs), *bare, *metadata],
        ratios=ratios(epochs),
        curves=list(curves(measured, epochs)),
        waterfalls=list(waterfalls(measured)),
        notes=notes,
        details=_details(measured, epochs),
        paths=(case.path,),
    )


def _details(measured: StorageMeasurements, epochs: list[LoaderEpochFigures]) -> dict[str, object]:
    """Further keys of the report: the workload, and each rank's and node's part."""
    return {
        "workload": asdict(measured.data.workload),
        "nodes": list(measured.nodes.names),
        "node_of_rank": measured.nodes.node_of.tolist(),
        "data_bytes": measured.data.data_bytes,
        "file_bytes": measured.data.file_bytes,
        "generated_files": measured.written_files,
        "generated_s": measured.generated_s,
        "served": [
            {
                "loader": each.loader,
                "repeat": each.repeat,
                "epoch": each.epoch,
                "cache": each.verdict.describe(),
                **asdict(each.served),
            }
            for each in epochs
        ],
        "by_rank": _by_rank(measured),
    }


def _by_rank(measured: StorageMeasurements) -> list[dict[str, object]]:
    """Latencies of batches and requests of each rank, and its use of the machine."""

    def shown(latencies: Latencies) -> dict[str, float]:
        return {f"p{share:g}_ms": 1e3 * latencies.percentile(share) for share in PERCENTILES}

    rows: list[dict[str, object]] = []
    for run in measured.runs:
        for rank, record in enumerate(run.ranks):
            batches, requests = latencies_of(record["epochs"])
            rows.append(
                {
                    "loader": run.loader,
                    "repeat": run.repeat,
                    "rank": rank,
                    "node": measured.nodes.names[measured.nodes.node_of[rank]],
                    "batches": shown(batches),
                    "requests": shown(requests),
                    "cpu_s": record["cpu_s"],
                    "memory_bytes": record["memory_bytes"],
                    "processes": record["processes"],
                }
            )
    return rows


def _notes(
    case: StorageCase, measured: StorageMeasurements, epochs: list[LoaderEpochFigures]
) -> list[str]:
    """Sentences on the page cache, on what was compared and on what was left out."""
    records = (record for run in measured.runs for record in run.ranks)
    notes = [note for record in records for epoch in record["epochs"] for note in epoch["notes"]]
    if case.cache == "keep":
        notes.append("the page cache was left as it was (--cache keep)")
    else:
        pages = "the data's pages were" if case.cache == "drop" else "all pages and names were"
        notes.append(
            f"{pages} dropped from the page cache before each epoch, and that was verified"
        )
    cached = [each for each in epochs if each.verdict.from_cache]
    if cached:
        names = ", ".join(f"{each.loader} epoch {each.epoch}" for each in cached)
        notes.append(f"{names}: {cached[0].verdict.describe()}")
    if not measured.compared:
        notes.append("the data is large: numbers of samples were compared, their bytes not")
    workload = measured.data.workload
    steps = min(run.steps for run in measured.runs)
    if steps - LEFT_OUT < LEAST_STEPS:
        unknown = "utilisation and throughput are" if steps <= LEFT_OUT else "utilisation is"
        notes.append(
            f"an epoch has {counted(steps, 'step')}, of which the first does not count: {unknown} "
            f"unknown below {LEFT_OUT + LEAST_STEPS}; give more files, or smaller batches"
        )
    ranks = len(measured.runs[0].ranks)
    if rest := workload.samples % (workload.batch_size * ranks):
        notes.append(
            f"{rest:,} of {counted(workload.samples, 'sample')} are left out of each epoch: they "
            f"fill no batch of {workload.batch_size} on {counted(ranks, 'rank')}"
        )
    notes += [
        f"{run.loader} leaves out {counted(run.left_out, 'sample')} of each epoch: its workers "
        "fill batches of whole files"
        for run in measured.runs
        if run.left_out
    ]
    return list(dict.fromkeys(notes))


def _show(
    case: StorageCase,
    measured: StorageMeasurements,
    epochs: list[LoaderEpochFigures],
    rates: list[MetadataRate],
    checked: Mapping[str, list[Check]],
    results: Results,
) -> None:
    for line in headline(measured):
        print(line)
    show_epochs(epochs)
    show_requests(epochs)
    for each in results.ratios:
        shown = ", ".join(f"{value:.2f}" for value in each.values)
        print(f"{each.name}, epoch {each.labels.get('epoch', '')}: {shown}")
    for rate in rates:
        print(
            f"metadata, {rate.operation}: {rate.per_second:,.0f}/s, p99 "
            f"{1e3 * rate.percentile(0.99):.3g} ms"
        )
    if checked:
        console().print(rules_table(checked, f"rules of MLPerf Storage {case.rules}"))
    show_notes([f"note: {note}" for note in results.notes])


# The measurement as tables


def headline(measured: StorageMeasurements) -> Iterator[str]:
    """Yield lines on the data and the storage."""
    workload = measured.data.workload
    ranks = len(measured.runs[0].ranks)
    yield (
        f"{workload.name}: {counted(workload.files, f'{workload.format} file')} of "
        f"{counted(workload.samples_per_file, 'sample')}, "
        f"{format_bytes(measured.data.file_bytes)}; "
        f"{counted(ranks, 'rank')} on {counted(len(measured.nodes.names), 'node')}, "
        f"batches of {workload.batch_size}, steps of {1e3 * workload.step_s:.0f} ms"
    )
    if workload.step_s:
        step_bytes = measured.data.data_bytes / workload.samples * workload.batch_size * ranks
        yield f"the accelerators want {format_bytes(int(step_bytes / workload.step_s))}/s"
    if measured.bare:
        threads, rate = max(measured.bare.items(), key=lambda each: each[1])
        yield (
            f"the storage gives {format_bytes(int(rate))}/s to bare reads by "
            f"{counted(threads, 'thread')} a rank"
        )


def show_epochs(epochs: Sequence[LoaderEpochFigures]) -> None:
    """Print a row for each loader and epoch: medians over the repeats."""
    heads = (
        *("loader", "epoch", "AU, %", "samples/s", "MiB/s", "epoch, s", "other ranks, s"),
        *("of least, %", "first, s", "p50, ms", "p99", "p99.9", "cached"),
    )
    rows = []
    for (loader, number), group in grouped(epochs).items():
        cached = [each.cached_percent for each in group if each.cached_percent is not None]
        batches = [each.batches for each in group if len(each.batches)]
        possible = [each.of_possible for each in group if each.of_possible is not None]
        rows.append(
            (
                loader if number == 1 else "",
                str(number),
                _middle([each.au for each in group], 1),
                _middle([each.samples_per_s for each in group], 1),
                _middle([each.mib_per_s for each in group], 1),
                _middle([each.seconds for each in group], 2),
                _middle([each.other_ranks_s for each in group], 2),
                _middle(possible, 1),
                _middle([each.first_batch_s for each in group], 2),
                *(
                    _middle([1e3 * each.percentile(share) for each in batches], 1)
                    for share in PERCENTILES
                ),
                f"{median(cached):.0f}%" if cached else "unknown",
            )
        )
    table("epochs, medians of the repeats", heads, rows)


def _middle(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.{digits}f}" if known else "-"


# Rules of MLPerf Storage and their outcomes, as a table


_STYLES: Final[dict[Outcome, str]] = {
    "passed": "green",
    "failed": "red",
    "unknown": "yellow",
    "not applicable": "dim",
}


def rules_table(checked: Mapping[str, Sequence[Check]], title: str | None = None) -> Table:
    """Return a row for each rule, with a column for each loader, whose rules are the same; the
    caption says that this is not a result of MLPerf."""
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


# A measurement held against the rules of MLPerf Storage


def _mean_au(percents: Sequence[float | None]) -> float | None:
    """Return the mean of the repeats, 0 to 1; None if it is not known."""
    known = [each / 100 for each in percents if each is not None]
    return mean(known) if known else None


def checks_of(
    case: StorageCase,
    overridden: Sequence[str],
    emulates: bool,
    measured: StorageMeasurements,
    epochs: Sequence[LoaderEpochFigures],
) -> dict[str, list[Check]]:
    """Return the checks of each loader; none if no rules are asked for."""
    if case.rules == "none":
        return {}
    shares = Counter(measured.nodes.node_of.tolist())
    result = {}
    for loader in dict.fromkeys(each.loader for each in epochs):
        mine = [each for each in epochs if each.loader == loader]
        numbers = sorted({each.epoch for each in mine})
        cached = [each.cached_percent for each in mine if each.cached_percent is not None]
        facts = TrainingFacts(
            workload=measured.data.workload,
            ranks=len(measured.runs[0].ranks),
            au=[_mean_au([each.au for each in mine if each.epoch == k]) for k in numbers],
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
