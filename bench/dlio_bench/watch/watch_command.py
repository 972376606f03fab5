"""`dlio bench watch`: its options, runs and table."""

import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Final, Literal, TypedDict

import numpy as np

from dlio.cli.option_records import OutputOptions
from dlio.errors import SourceError, UsageError
from dlio.util.child_processes import module_command
from dlio.util.input_files import read_json
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import write_json
from dlio_bench.file_systems import check_scratch
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import interval_of_ratio
from dlio_bench.results.report_values import Better, Figure, Results, labels_text
from dlio_bench.results.saved_report import read_report
from dlio_bench.results.terminal import advance, show_notes, table, working

Verdict = Literal["worse", "same", "better", "too noisy", "changed", "new", "gone"]
Bound = Literal["processor", "memory", "disk"]
Runs = Mapping[str, Figure]
"""Figures by key; a value for each repeat of the part, normalised."""
_TOLERANCE: Final = 1.15
"""Ratio that a whole interval has to pass: calibration does not follow a load more closely."""
_WIDEST: Final = 2.0
"""Largest ratio of the ends of an interval that says anything."""
_COUNTS: Final = ("", "B", "bytes", "MiB", "messages", "requests", "copies")


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """A figure compared with its baseline."""

    key: str
    ratio: float | None
    """Of the speeds: above 1 is better than the baseline. Of counts: now over then."""
    interval: tuple[float, float] | None
    verdict: Verdict

    @property
    def fails(self) -> bool:
        """True if the watch ends with exit code 1."""
        return self.verdict in ("worse", "changed")


def normalised(figure: Figure, seconds: float) -> Figure:
    """Return a figure as it would be if the calibration took one second.

    A rate is multiplied by the calibration's seconds, and a time is divided by them. Counts,
    shares and ratios are left alone.
    """
    if figure.unit.endswith("/s"):
        factor = seconds
    elif figure.unit in ("s", "ms", "us", "µs"):
        factor = 1 / seconds
    else:
        return figure
    return replace(figure, values=tuple(value * factor for value in figure.values))


def judge(baseline: Runs, now: Runs) -> Iterator[FigureVerdict]:
    """Compare each figure that has a direction, and each count.

    Counts are compared where all repeats of the baseline agree: others depend on time.
    """
    for key in dict.fromkeys([*baseline, *now]):
        if key not in now:
            yield FigureVerdict(key, None, None, "gone")
        elif key not in baseline:
            yield FigureVerdict(key, None, None, "new")
        elif now[key].better:
            yield _speed(key, baseline[key], now[key])
        elif now[key].unit in _COUNTS and len(set(baseline[key].values)) == 1:
            yield _count(key, baseline[key].values[0], now[key].values)


def _count(key: str, then: float, now: Sequence[float]) -> FigureVerdict:
    same = all(math.isclose(value, then, rel_tol=1e-12) for value in now)
    return FigureVerdict(
        key, median(now) / then if then else None, None, "same" if same else "changed"
    )


def _speed(key: str, then: Figure, now: Figure) -> FigureVerdict:
    new, old = now.values, then.values
    if now.better == "lower":
        new, old = old, new
    if not median(old):
        return FigureVerdict(key, None, None, "too noisy")
    ratio = median(new) / median(old)
    interval = interval_of_ratio(new, old)
    if interval is None:
        return FigureVerdict(key, ratio, None, "too noisy")
    low, high = interval
    verdict: Verdict = "same"
    if high < 1 / _TOLERANCE:
        verdict = "worse"
    elif low > _TOLERANCE:
        verdict = "better"
    elif low <= 0 or high / low > _WIDEST:
        verdict = "too noisy"
    return FigureVerdict(key, ratio, interval, verdict)


class BaselineFigure(TypedDict):
    """A figure as JSON."""

    unit: str
    better: Better
    values: list[float]


def to_json(runs: Runs) -> dict[str, BaselineFigure]:
    """Return JSON values."""
    return {
        key: {"unit": each.unit, "better": each.better, "values": list(each.values)}
        for key, each in runs.items()
    }


def from_json(stored: Mapping[str, BaselineFigure]) -> dict[str, Figure]:
    """Return figures that `to_json` stored. Raises KeyError, TypeError or ValueError."""
    return {
        key: Figure(key, str(each["unit"]), tuple(map(float, each["values"])), {}, each["better"])
        for key, each in stored.items()
    }


# Parts of the watch: small runs of benchmarks, and the work that limits each


@dataclass(frozen=True, slots=True)
class WatchPart:
    """A run of `dlio bench`. `{folder}` in an argument stands for a temporary folder."""

    arguments: tuple[str, ...]
    bound: Bound


PARTS: Final = {
    "loader": WatchPart(
        ("loader", "--peers", "torch,dlio", "--repeats", "2", "--image-size", "96"), "processor"
    ),
    "readers": WatchPart(
        (
            *("readers", "--samples", "200", "--sample-bytes", "20000", "--repeats", "2"),
            *("--format", "shard", "--format", "tar", "--format", "parquet"),
        ),
        "memory",
    ),
    "tiers": WatchPart(
        ("tiers", "--tiers", "ram:64MiB,{folder}:64MiB", "--size", "32MiB", "--no-keep"), "memory"
    ),
    "storage": WatchPart(
        (
            *("storage", "{folder}", "--files", "32", "--sample-size", "128KiB", "--step-ms", "5"),
            *("--epochs", "2", "--workers", "2", "--bare-seconds", "0.5"),
            # The file system's own rates would vary threefold from run to run.
            *("--metadata-files", "0"),
        ),
        "disk",
    ),
    "shuffle": WatchPart(("shuffle", "--case", "mixing", "--repeats", "1"), "processor"),
    "exchange": WatchPart(
        (
            *("exchange", "--case", "messages", "--fabric", "memory", "--repeats", "1"),
            *("--exchange", "allreduce", "--exchange", "gossip"),
        ),
        "processor",
    ),
    "staging": WatchPart(
        (
            *("staging", "--case", "local", "--quick", "--repeats", "1"),
            *("--folder", "{folder}"),
        ),
        "disk",
    ),
}
"""Parts by name. One run of all takes about four minutes on an idle machine of two cores."""


# The command: its options, runs and table


_SCHEMA: Final = "dlio-watch/1"
_PART_TIMEOUT_S: Final = 900.0
_ROUNDS: Final = 3
_PIECE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Watch(CheckedOptions):
    """The options of `dlio bench watch`."""

    part: Annotated[
        tuple[str, ...],
        Option("Part to run. Repeatable.", choices=tuple(PARTS), default_text="all"),
    ] = ()
    baseline: Annotated[
        str, Option("Figures to compare with, as --update wrote them.", metavar="FILE")
    ] = "bench/baseline.json"
    update: Annotated[bool, Option("Write the figures to --baseline instead.")] = False
    repeats: Annotated[int, Option("Runs of each part.", least=2)] = 3
    folder: Annotated[
        str, Option("Folder on the disk to measure.", metavar="FOLDER", default_text="here")
    ] = "."


def command(watch: Watch, output: OutputOptions) -> None:
    """Run a small part of each benchmark, and compare it with a stored run.

    Fixed work is timed before and after each run, and figures are compared in units of it. Ends
    with exit code 1 if the whole confidence interval of a figure is worse than the baseline, or a
    count differs.
    """
    check_scratch(watch.folder)
    started = begin(output)
    wanted = watch.part or tuple(PARTS)
    stored = {} if watch.update and not os.path.exists(watch.baseline) else _read(watch.baseline)
    measured: dict[str, dict[str, Figure]] = {}
    with working("watch", len(wanted) * watch.repeats):
        for name in wanted:
            runs = []
            for _ in range(watch.repeats):
                advance(name, 0)
                runs.append(run_part(PARTS[name], watch.folder))
                advance(name)
            measured[name] = _joined(runs)
    if watch.update:
        parts = {**stored, **{name: to_json(runs) for name, runs in measured.items()}}
        machine = describe_machine(())
        write_json(watch.baseline, {"schema": _SCHEMA, "machine": machine, "parts": parts})
        show_notes([f"{watch.baseline} is written"])
        return
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise UsageError(f"{watch.baseline} has no {', '.join(missing)}: run with --update first")
    judged = {name: list(judge(from_json(stored[name]), measured[name])) for name in wanted}
    _show(judged)
    figures = [
        replace(each, labels={"part": name})
        for name, runs in measured.items()
        for each in runs.values()
    ]
    verdicts = {name: {each.key: each.verdict for each in rows} for name, rows in judged.items()}
    results = Results(
        "watch",
        {"parts": wanted, "repeats": watch.repeats},
        figures=figures,
        details={"verdicts": verdicts},
        paths=(watch.folder,),
    )
    finish(output, results, started)
    if any(each.fails for rows in judged.values() for each in rows):
        sys.exit(1)


def run_part(part: WatchPart, folder: str) -> dict[str, Figure]:
    """Run a part once, with a calibration before and after; return its figures, normalised.

    Raises SourceError if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="dlio-bench-watch-", dir=folder) as scratch:
        report = os.path.join(scratch, "report.json")
        data = os.path.join(scratch, "data")
        os.mkdir(data, mode=0o700)
        arguments = [each.replace("{folder}", data) for each in part.arguments]
        before = calibrate(scratch)
        try:
            done = subprocess.run(
                [*module_command("dlio.cli", "bench"), *arguments, "--report", report],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_PART_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(
                f"dlio bench {part.arguments[0]}: not done after {_PART_TIMEOUT_S:.0f} s: run it "
                "by itself"
            ) from error
        after = calibrate(scratch)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise SourceError(f"dlio bench {part.arguments[0]} failed: {last}")
        seconds = (before[part.bound] + after[part.bound]) / 2
        figures = [normalised(each, seconds) for each in read_report(report).figures]
    return {_key(each).replace(data, "FOLDER"): each for each in figures}


def calibrate(folder: str) -> dict[Bound, float]:
    """Seconds of fixed work, which tell how fast the machine is at the moment, load included.

    Hashes and sorts, copies of memory, and a file that is written through to `folder` are timed.
    Each is the mean of 3 rounds, a second in all: a load that comes and goes is met in part.
    """
    data = np.random.default_rng(0).integers(0, 256, _PIECE, np.uint8)
    copy = np.empty_like(data)
    text = data.tobytes()

    def compute() -> None:
        hashlib.sha256(text).digest()
        np.sort(data.view(np.uint32))

    def move() -> None:
        for _ in range(20):
            np.copyto(copy, data)

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".dlio-bench-") as file:
            for _ in range(4):
                file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def seconds(work: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(_ROUNDS):
            work()
        return (time.perf_counter() - started) / _ROUNDS

    return {"processor": seconds(compute), "memory": seconds(move), "disk": seconds(write)}


def _key(figure: Figure) -> str:
    labels = labels_text(dict(sorted(figure.labels.items())), alone=())
    return f"{figure.name} ({labels})" if labels else figure.name


def _joined(runs: list[dict[str, Figure]]) -> dict[str, Figure]:
    """Return each figure with the values of all runs, where no run lacks it."""
    first = runs[0]
    return {
        key: replace(
            each,
            name=key,
            values=tuple(value for run in runs for value in run[key].values),
            labels={},
        )
        for key, each in first.items()
        if all(key in run for run in runs)
    }


def _read(path: str) -> dict[str, Mapping[str, BaselineFigure]]:
    """Return the stored parts. Raises UsageError if the file is not a baseline."""
    try:
        loaded: Any = read_json(path)
        if loaded["schema"] != _SCHEMA:
            raise ValueError(loaded["schema"])
        parts = dict(loaded["parts"])
        for each in parts.values():
            from_json(each)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: run with --update first") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a baseline of {_SCHEMA}: run with --update") from error
    return parts


def _show(judged: Mapping[str, list[FigureVerdict]]) -> None:
    rows = [
        [
            name,
            each.key,
            each.verdict,
            "-" if each.ratio is None else f"{each.ratio:.2f}",
            "-" if each.interval is None else f"{each.interval[0]:.2f} to {each.interval[1]:.2f}",
        ]
        for name, each_rows in judged.items()
        for each in each_rows
        if each.verdict != "same" or each.interval is not None
    ]
    table(
        "compared with the baseline; above 1 is better",
        ["part", "figure", "verdict", "ratio", "95 % interval"],
        rows,
        left=3,
    )
    counts = sum(
        each.interval is None and each.verdict == "same" for r in judged.values() for each in r
    )
    show_notes([f"{counts} counts are the same"])
