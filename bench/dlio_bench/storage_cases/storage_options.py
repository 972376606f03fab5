"""Options of `dlio bench storage`, and the workload that they describe."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio.util.units import parse_bytes
from dlio_bench.storage_cases.dlio_keys import (
    WorkloadJob,
    check_reads,
    job_of,
    read_job,
    shape_names,
    with_format,
)
from dlio_bench.storage_cases.rules import VERSIONS
from dlio_bench.storage_cases.workload import FORMATS, Workload

LOADERS: Final = ("torch", "dlio")
_DEFAULT: Final[dict[str, object]] = {
    "dataset.format": "npz",
    "dataset.num_files_train": 256,
    "dataset.record_length_bytes": 1 << 20,
    "reader.batch_size": 8,
    "reader.read_threads": 4,
    "reader.sample_shuffle": "seed",
    "train.computation_time": 0.1,
    "train.epochs": 2,
    "train.seed": 0,
}
"""The workload without `--workload`."""
_RULES: Final = ("none", *VERSIONS)


_changes: Final = partial(Option, default_text="the workload's")


@dataclass(frozen=True, slots=True)
class StorageCase:
    """A measurement of storage; options of `dlio bench storage`."""

    path: Annotated[
        str,
        Option(
            "Folder to measure; data are generated in it.",
            positional=True,
            metavar="PATH",
        ),
    ]
    workload: Annotated[
        str,
        Option(
            "Workload: a YAML file with DLIO's keys, or one of "
            f"{', '.join(shape_names())}. The options below override it.",
            metavar="NAME",
            default_text="256 npz files of 1 MiB, batches of 8, steps of 100 ms, 2 epochs",
        ),
    ] = ""
    settings: Annotated[
        tuple[str, ...],
        Option(
            "Override one of DLIO's keys, such as reader.batch_size=4. Repeatable.",
            name="set",
            metavar="KEY=VALUE",
            needs="workload",
        ),
    ] = ()
    format: Annotated[str | None, _changes("Format of the data.", choices=FORMATS)] = None
    files: Annotated[int | None, _changes("Number of files.", least=1)] = None
    samples_per_file: Annotated[int | None, _changes("Samples in each file.", least=1)] = None
    sample_size: Annotated[
        str | None, _changes("Mean size of a sample, such as 100KiB.", metavar="SIZE")
    ] = None
    sample_stdev: Annotated[
        str | None, _changes("Standard deviation of the sizes of samples.", metavar="SIZE")
    ] = None
    batch_size: Annotated[int | None, _changes("Samples of a batch, per rank.", least=1)] = None
    step_ms: Annotated[
        float | None,
        _changes(
            "Time that the emulated accelerator computes on a batch.", unit="milliseconds", least=0
        ),
    ] = None
    epochs: Annotated[int | None, _changes("Number of epochs.", least=1)] = None
    workers: Annotated[
        int | None,
        _changes("Worker processes of torch's loader, threads of dlio's, per rank.", least=0),
    ] = None
    seed: Annotated[
        int | None, Option("Seed of data, order and step times.", least=0, default_text="0")
    ] = None
    loaders: Annotated[
        str,
        Option(
            "Loaders to measure, separated by commas: torch, dlio, or module:function for any "
            "other.",
            metavar="NAMES",
        ),
    ] = "torch,dlio"
    tiers: Annotated[
        str | None,
        Option(
            "Tiers of dlio, such as ram:2GiB,/local/scratch:20GiB.",
            metavar="TIERS",
            default_text="RAM up to a quarter of the free memory",
        ),
    ] = None
    repeats: Annotated[int, Option("Runs of each loader, in turn.", least=1)] = 1
    cache: Annotated[
        str,
        Option(
            "Page cache before each epoch. drop: drop the data's pages, and verify it. drop-all: "
            "drop all pages and names of this machine, which slows down its other users. keep: "
            "leave them, as data of 5 times the memory allows.",
            choices=("drop", "drop-all", "keep"),
        ),
    ] = "drop"
    bare_seconds: Annotated[
        float,
        Option(
            "Time for each trial of the bare parallel reads that show the most that the storage "
            "gives; 0 for none.",
            unit="seconds",
            least=0,
        ),
    ] = 3.0
    metadata_files: Annotated[
        int,
        Option(
            "Files per thread that measure the rate of metadata operations; 0 for none.", least=0
        ),
    ] = 200
    rules: Annotated[
        str,
        Option(
            "Round of MLPerf Storage whose rules are checked. Never an official result.",
            choices=_RULES,
        ),
    ] = "none"
    keep: Annotated[
        bool, Option("Keep the generated data, for further runs of the same workload.")
    ] = False

    csv: Annotated[
        str | None,
        Option(
            "Write the requests of each loader, repeat and epoch to this file, as CSV: IOPS, "
            "bandwidth, and fio's percentiles of latencies in microseconds.",
            metavar="FILE",
        ),
    ] = None
    plan: Annotated[
        bool,
        Option(
            "Say how many files and bytes the rules of MLPerf Storage ask for, on -n ranks and "
            "--memory, and measure nothing."
        ),
    ] = False
    memory: Annotated[
        str | None,
        Option(
            "Memory of all hosts together, for --plan, such as 512GiB.",
            metavar="SIZE",
            default_text="this machine's",
            needs="plan",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        self.names()
        if self.plan and self.csv is not None:
            raise UsageError(
                "--csv is of no use with --plan, which measures nothing: leave one out"
            )
        if self.memory is not None:
            parse_bytes(self.memory, "--memory")

    def names(self) -> tuple[str, ...]:
        """Return the loaders to measure. Raises UsageError for an unknown one."""
        chosen = tuple(name.strip() for name in self.loaders.split(","))
        for name in chosen:
            if name not in LOADERS and ":" not in name:
                raise UsageError(
                    f"--loaders {name}: choose {' or '.join(LOADERS)}, or name a function as "
                    "module:function"
                )
        if len(set(chosen)) < len(chosen):
            raise UsageError(f"--loaders {self.loaders}: names a loader twice")
        return chosen

    def asked(self) -> WorkloadJob:
        """Return the workload. Raises UsageError for options that contradict each other."""
        overrides = [*self.settings, *self._as_keys()]
        if self.workload:
            job = read_job(self.workload, overrides)
            check_reads(job.settings, self.workload)
        else:
            job = job_of(_DEFAULT, overrides, "custom", "the options")
            job = replace(job, overridden=())
        workload = job.workload
        if self.format is not None and self.format != workload.format:
            chosen = next(each for each in FORMATS if each == self.format)
            workload = with_format(workload, chosen)
            if self.files is not None and chosen == "folder":
                workload = replace(workload, files=self.files)
            job = replace(job, workload=workload, overridden=(*job.overridden, "dataset.format"))
        return job

    def as_run(self, workload: Workload) -> dict[str, object]:
        """Return settings for a report: those of the workload as it ran, however they were given,
        so that reports are compared by what was measured. The workload's name is among them."""
        given = {"settings", "sample_size", "sample_stdev", "step_ms"}
        settings = {name: value for name, value in asdict(self).items() if name not in given}
        run = asdict(workload)
        return {**settings, "workload": run.pop("name"), **run}

    def _as_keys(self) -> Sequence[str]:
        """The options that override the workload, as DLIO's keys."""
        values = {
            "dataset.num_files_train": self.files,
            "dataset.num_samples_per_file": self.samples_per_file,
            "dataset.record_length_bytes": self.sample_size
            and parse_bytes(self.sample_size, "--sample-size"),
            "dataset.record_length_bytes_stdev": self.sample_stdev
            and parse_bytes(self.sample_stdev, "--sample-stdev"),
            "reader.batch_size": self.batch_size,
            "reader.read_threads": self.workers,
            "train.computation_time": None if self.step_ms is None else self.step_ms / 1e3,
            "train.epochs": self.epochs,
            "train.seed": self.seed,
        }
        return [f"{key}={value}" for key, value in values.items() if value is not None]
