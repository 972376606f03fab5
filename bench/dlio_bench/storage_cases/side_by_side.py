"""`dlio bench agreement`: figures of `dlio bench storage` next to those of Argonne's DLIO.

Both programs read the same files with the same batches, steps, epochs and workers, each through
torch's loader and through dlio's. Each runs in processes of its own, one after the other.
"""

import glob
import itertools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Annotated, Any, Final, cast

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.launch.mpi_launch import launch
from dlio.util.child_processes import module_command
from dlio.util.input_files import read_json
from dlio.util.options import Option, check
from dlio.util.units import counted, parse_bytes
from dlio_bench.file_systems import check_scratch
from dlio_bench.peers.environments import folder, missing, shared_environment
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.repeats import ratio
from dlio_bench.results.report_values import Figure, Ratio, Results
from dlio_bench.results.terminal import show_notes, table

LOADERS: Final = ("torch", "dlio")
_OURS: Final = "dlio bench storage"
_PEER: Final = "dlio_benchmark"
_CLASS: Final = "dlio.integrations.dlio_benchmark.DlioLoader"
MOST_PERCENT: Final = 3.0
"""Difference of throughputs within which the programs agree."""
MOST_POINTS: Final = 2.0
"""Difference of accelerator utilisations within which they agree, in percentage points."""


@dataclass(frozen=True, slots=True)
class AgreementOptions:
    """A workload that both programs run; options of `dlio bench agreement`."""

    path: Annotated[
        str, Option("Folder for the data, on the storage to read.", positional=True, metavar="PATH")
    ]
    ranks: Annotated[int, Option("Number of ranks.", short="-n", least=1)] = 2
    files: Annotated[int, Option("Number of files, each of one sample.", least=4)] = 320
    sample_size: Annotated[str, Option("Size of a sample.", metavar="SIZE")] = "256KiB"
    batch_size: Annotated[int, Option("Samples per rank and step.", least=1)] = 4
    step_ms: Annotated[
        float, Option("Time of the emulated step.", unit="milliseconds", least=1)
    ] = 100.0
    epochs: Annotated[int, Option("Number of epochs.", least=1)] = 3
    workers: Annotated[int, Option("Workers per rank.", least=1)] = 2
    repeats: Annotated[int, Option("Runs of each program and loader, in turn.", least=1)] = 1
    tiers: Annotated[str, Option("Tiers of dlio's loader.", metavar="TIERS")] = "ram:1GiB"
    patience: Annotated[
        float, Option("Time after which a run is ended.", unit="seconds", least=1)
    ] = 600.0

    def __post_init__(self) -> None:
        check(self)
        if self.files // (self.batch_size * self.ranks) < 4:
            raise UsageError(
                f"--files {self.files}: an epoch needs 4 steps of {counted(self.ranks, 'rank')} "
                "and batches "
                f"of {self.batch_size}: give at least {4 * self.batch_size * self.ranks}"
            )


@dataclass(frozen=True, slots=True)
class ProgramFigures:
    """A program's figures of a run, means over the epochs."""

    au: float
    """Accelerator utilisation in percent."""
    samples_per_s: float
    """Throughput of all ranks as DLIO counts it."""
    au_by_epoch: tuple[float, ...]


def command(case: AgreementOptions, output: OutputOptions) -> None:
    """Compare `dlio bench storage` with Argonne's DLIO benchmark, on the same files.

    Needs `dlio bench peers install dlio_benchmark --archive FILE`. Each program reads the files
    through torch's loader and dlio's, from the page cache where they fit there. Ends with exit code
    0 also where the figures differ by more than 3 % or 2 points; the table says so.
    """
    if (reason := missing(_PEER)) is not None:
        raise UsageError(f"{_PEER} is {reason}")
    started = begin(output)
    runs: dict[tuple[str, str], list[ProgramFigures]] = {}
    programs = {_OURS: _storage, _PEER: _benchmark}
    with _folder(case.path) as place:
        for repeat, loader, program in itertools.product(range(case.repeats), LOADERS, programs):
            show_notes([f"{program}, {loader}, repeat {repeat + 1}"])
            run = programs[program](case, loader, place)
            runs.setdefault((loader, program), []).append(run)
    _show(runs)
    finish(output, _results(case, runs), started)


def agreement(
    ours: Sequence[ProgramFigures], theirs: Sequence[ProgramFigures]
) -> tuple[float, float, bool]:
    """Return (throughput's difference in percent, utilisation's in points, both are small), of
    medians."""
    rates, busy = _medians(ours, theirs)
    percent, points = 100 * (rates[0] / rates[1] - 1), busy[0] - busy[1]
    return percent, points, abs(percent) <= MOST_PERCENT and abs(points) <= MOST_POINTS


def _medians(*programs: Sequence[ProgramFigures]) -> tuple[list[float], list[float]]:
    """Return the medians of (throughput, utilisation) of each program."""
    rates = [median([each.samples_per_s for each in runs]) for runs in programs]
    return rates, [median([each.au for each in runs]) for runs in programs]


def dlio_keys(case: AgreementOptions, loader: str, data: str, results: str) -> list[str]:
    """Return the arguments of dlio_benchmark, for a folder with the folder `train`, and another one
    for its results."""
    size = parse_bytes(case.sample_size, "--sample-size")
    keys: dict[str, object] = {
        "framework": "pytorch",
        "workflow.generate_data": False,
        "workflow.train": True,
        "workflow.evaluation": False,
        "workflow.checkpoint": False,
        "workflow.profiling": False,
        "dataset.format": "npz",
        "dataset.data_folder": data,
        "dataset.num_files_train": case.files,
        "dataset.num_files_eval": 0,
        "dataset.num_samples_per_file": 1,
        "dataset.num_subfolders_train": 0,
        "dataset.record_length_bytes": size,
        "dataset.record_length_bytes_stdev": 0,
        "dataset.record_length_bytes_resize": size,
        "reader.data_loader": "pytorch",
        "reader.batch_size": case.batch_size,
        "reader.read_threads": case.workers,
        "reader.prefetch_size": 2 * case.workers,
        "reader.sample_shuffle": "seed",
        "train.epochs": case.epochs,
        "train.computation_time": case.step_ms / 1e3,
    }
    if loader == "dlio":
        keys["reader.data_loader_classname"] = _CLASS
        keys["reader.data_loader_sampler"] = "index"
        keys["storage.storage_options.dlio_tiers"] = case.tiers
    given = [f"++workload.{key}={value}" for key, value in keys.items()]
    return ["workload=default", *given, f"hydra.run.dir={results}"]


def _storage(case: AgreementOptions, loader: str, place: str) -> ProgramFigures:
    report = os.path.join(place, "storage.json")
    options = {
        "--format": "npz",
        "--files": case.files,
        "--sample-size": case.sample_size,
        "--batch-size": case.batch_size,
        "--step-ms": case.step_ms,
        "--epochs": case.epochs,
        "--workers": case.workers,
        "--tiers": case.tiers,
        "--loaders": loader,
        "--cache": "keep",
        "--bare-seconds": 0,
        "--metadata-files": 0,
        "--report": report,
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    _run(
        [*module_command("dlio.cli", "bench", "storage", place, "--keep"), *words], case, _OURS, {}
    )
    figures = cast(dict[str, list[Any]], read_json(report))["figures"]

    def by_epoch(name: str) -> list[float]:
        chosen = [each for each in figures if each["name"] == name]
        chosen.sort(key=lambda each: int(each["labels"]["epoch"]))
        return [float(each["values"][0]) for each in chosen]

    au = by_epoch("accelerator utilisation")
    rates = by_epoch("throughput as DLIO counts it")
    if not au or not rates:
        raise UsageError("epochs of few steps have no utilisation: give more files")
    return ProgramFigures(fmean(au), fmean(rates), tuple(au))


def _benchmark(case: AgreementOptions, loader: str, place: str) -> ProgramFigures:
    """Run dlio_benchmark on the files that `dlio bench storage` has made."""
    made = glob.glob(os.path.join(glob.escape(place), "dlio-bench-*", "train"))
    if len(made) != 1:
        raise UsageError(f"{place}: {counted(len(made), 'folder')} of data, and not one: run again")
    results = os.path.join(place, "results")
    program = os.path.join(folder(_PEER), "bin", "dlio_benchmark")
    keys = dlio_keys(case, loader, os.path.dirname(made[0]), results)
    _run([program, *keys], case, _PEER, shared_environment())
    metric = cast(dict[str, Any], read_json(os.path.join(results, "summary.json")))["metric"]
    return ProgramFigures(
        float(metric["train_au_mean_percentage"]),
        float(metric["train_throughput_mean_samples_per_second"]),
        tuple(float(each) for each in metric["train_au_percentage"]),
    )


def _run(words: list[str], case: AgreementOptions, name: str, environment: dict[str, str]) -> None:
    try:
        done = launch(
            words,
            case.ranks,
            environment=environment,
            capture=True,
            timeout_s=case.patience,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"{name} took more than {case.patience:g} s and was ended: give it more with "
            "--patience, or ask for less"
        ) from error
    if done.returncode:
        raise UsageError(f"{name} failed: {(done.stderr or done.stdout).strip()[-800:]}")


def _folder(path: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for the data and the results, which is removed in the end."""
    check_scratch(path)
    return tempfile.TemporaryDirectory(
        prefix="dlio-pair-", dir=os.path.abspath(path), ignore_cleanup_errors=True
    )


def _results(case: AgreementOptions, runs: dict[tuple[str, str], list[ProgramFigures]]) -> Results:
    figures, ratios, compared = [], [], {}
    for (loader, program), passes in runs.items():
        labels = {"loader": loader, "program": program}
        speed = tuple(each.samples_per_s for each in passes)
        busy = tuple(each.au for each in passes)
        figures.append(Figure("throughput as DLIO counts it", "samples/s", speed, labels, "higher"))
        figures.append(Figure("accelerator utilisation", "%", busy, labels, "higher"))
        for epoch in range(case.epochs):
            each = tuple(one.au_by_epoch[epoch] for one in passes)
            by = {**labels, "epoch": str(epoch + 1)}
            figures.append(Figure("accelerator utilisation by epoch", "%", each, by, "higher"))
    for loader in LOADERS:
        ours, theirs = runs[loader, _OURS], runs[loader, _PEER]
        rates, others = ([each.samples_per_s for each in some] for some in (ours, theirs))
        name, values = f"throughput, {_OURS} / {_PEER}", tuple(ratio(rates, others)["all"])
        ratios.append(Ratio(name, values, {"loader": loader}, ""))
        percent, points, agrees = agreement(ours, theirs)
        compared[loader] = {"percent": percent, "points": points, "agrees": agrees}
    return Results(
        "dlio-benchmark",
        settings=asdict(case),
        figures=figures,
        ratios=ratios,
        notes=["the files were read from the page cache where it held them"],
        details={"agreement": compared},
        paths=(case.path,),
    )


def _show(runs: dict[tuple[str, str], list[ProgramFigures]]) -> None:
    rows = []
    for loader in LOADERS:
        ours, theirs = runs[loader, _OURS], runs[loader, _PEER]
        percent, points, agrees = agreement(ours, theirs)
        rates, busy = _medians(ours, theirs)
        shown = [f"{rate:,.1f} samples/s" for rate in rates]
        rows.append((loader, *shown, f"{percent:+.1f} %", "yes" if agrees else "no"))
        rows.append(("", *(f"AU {each:.1f} %" for each in busy), f"{points:+.1f} points", ""))
    title = "The same files and settings in both programs, medians of the repeats"
    table(title, ("loader", _OURS, _PEER, "difference", "agree"), rows)
