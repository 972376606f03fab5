"""`dlio bench storage`: a storage system, read as training reads it."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.comm.world import world
from dlio.launch.command_ranks import on_ranks
from dlio_bench.emulated.emulation_options import Emulation
from dlio_bench.file_systems import check_folder
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import console, show_notes
from dlio_bench.storage_cases.claim import remove_unclaimed
from dlio_bench.storage_cases.latencies import PERCENTILES, Latencies
from dlio_bench.storage_cases.metadata import MetadataRate, measure_metadata
from dlio_bench.storage_cases.rules import Check
from dlio_bench.storage_cases.storage_job import StorageMeasurements, data_folder, measure
from dlio_bench.storage_cases.storage_options import StorageCase
from dlio_bench.storage_cases.storage_table import (
    checks_of,
    headline,
    rules_as_json,
    rules_table,
    show_epochs,
)
from dlio_bench.storage_cases.summary import (
    LoaderEpochFigures,
    curves,
    epochs_of,
    figures,
    ratios,
    waterfalls,
)
from dlio_bench.storage_cases.utilisation import LEFT_OUT

_METADATA_THREADS: Final = 4


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
        files, threads = case.metadata_files, _METADATA_THREADS
        rates = measure_metadata(case.path, files=files, threads=threads)
    checked = checks_of(case, asked.overridden, emulation.profile.emulates, measured, epochs)
    notes = [*asked.notes, *_notes(case, measured, epochs)]
    results = _results(case, emulation, measured, epochs, rates, notes)
    if checked:
        rules = {name: rules_as_json(checks) for name, checks in checked.items()}
        results.details = {**results.details, "rules": rules}
    _show(case, measured, epochs, rates, checked, results)
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
        settings={**asdict(case), **asdict(emulation)},
        seeds={"seed": measured.workload.seed},
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
        "workload": asdict(measured.workload),
        "nodes": list(measured.nodes.names),
        "node_of_rank": measured.nodes.node_of.tolist(),
        "data_bytes": measured.data_bytes,
        "file_bytes": measured.file_bytes,
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
            batches, requests = Latencies(), Latencies()
            for epoch in record["epochs"]:
                batches.add(epoch["steps"]["load_s"][LEFT_OUT:])
                requests.merge(Latencies.from_json(epoch["requests"]))
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
    drops = (epoch["dropped"] for record in records for epoch in record["epochs"])
    notes = [note for dropped in drops if dropped is not None for note in dropped["notes"]]
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
    notes += [
        f"{run.loader} leaves out {run.left_out:,} samples of each epoch: its workers fill "
        "batches of whole files"
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
    for each in results.ratios:
        shown = ", ".join(f"{value:.2f}" for value in each.values)
        print(f"{each.name}, epoch {each.labels.get('epoch', '')}: {shown}")
    for rate in rates:
        print(
            f"metadata, {rate.operation}: {rate.per_second:,.0f}/s, p99 "
            f"{1e3 * rate.percentile(0.99):.2f} ms"
        )
    if checked:
        console().print(rules_table(checked, f"rules of MLPerf Storage {case.rules}"))
    show_notes([f"note: {note}" for note in results.notes])
