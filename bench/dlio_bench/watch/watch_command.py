"""`dlio bench watch`: its options, runs and table."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np

from dlio.cli.option_records import OutputOptions
from dlio.errors import SourceError, UsageError
from dlio.util.child_processes import module_command
from dlio.util.options import CheckedOptions, Option
from dlio.util.whole_files import write_json
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.saved_report import read_report
from dlio_bench.results.terminal import advance, show_notes, table, working
from dlio_bench.watch.judge import (
    PARTS,
    BaselineFigure,
    Bound,
    FigureVerdict,
    WatchPart,
    from_json,
    judge,
    normalised,
    to_json,
)

_SCHEMA: Final = "dlio-watch/1"
_PART_TIMEOUT_S: Final = 900.0
_ROUNDS: Final = 3
_PIECE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Watch(CheckedOptions):
    """The options of `dlio bench watch`."""

    part: Annotated[
        tuple[str, ...],
        Option("WatchPart to run. Repeatable.", choices=tuple(PARTS), default_text="all"),
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
    labels = ", ".join(f"{name} {value}" for name, value in sorted(figure.labels.items()))
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
        with open(path, encoding="utf-8") as file:
            loaded = json.load(file)
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
