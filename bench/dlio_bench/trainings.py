"""Runs of `dlio train`, whose reports are kept, so that an interrupted benchmark goes on; and when
a training was how good."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypedDict, cast

from dlio.errors import UsageError
from dlio.util.input_files import as_usage, read_json
from dlio.util.whole_files import make_folder

_TIMEOUT_S: Final = 7200.0


class TrainedEpoch(TypedDict, total=False):
    """An epoch in the report of `dlio train`."""

    samples: int
    seconds: float
    val_accuracy: float
    exchange_bytes: int
    consensus_distance: float
    bytes: dict[str, int]
    """Bytes read, by place."""
    pruning: Any
    """The `PruningReport` of `--prune`; None without it."""
    cpu_s: float
    """CPU seconds of rank 0 until the end of the epoch, of the callback `CpuTime`."""
    cut: Any
    """Parameters and widths of a network, of the callback `NetworkCutter`."""


class TrainingReport(TypedDict):
    """The report of `dlio train`; benchmarks read these fields."""

    config: dict[str, object]
    ranks: int
    epochs: list[TrainedEpoch]


def training_data(case: str, source: str | None, val: str | None) -> tuple[str, str]:
    """Return training and held-out data. Raises UsageError if a case that trains lacks one."""
    if source is None or val is None:
        raise UsageError(f"--case {case} needs a data set and held-out data: SRC --val VAL")
    return source, val


def check_plot(path: str | None) -> None:
    """Raise UsageError if the file of --plot has the name of neither a PNG nor an SVG file."""
    if path is not None and not path.endswith((".png", ".svg")):
        raise UsageError(f"--plot {path}: give a name that ends in .png or .svg")


@contextmanager
def kept_folder(keep: str | None) -> Iterator[str]:
    """Make a folder for reports: `keep`, or one for the time of the `with` statement."""
    with ExitStack() as stack:
        folder = keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="dlio-bench-"))
        make_folder(folder, "--keep")
        yield folder


def trained(
    name: str,
    folder: str,
    ranks: int,
    options: Mapping[str, object],
    unchecked: Mapping[str, object] | None = None,
) -> TrainingReport:
    """The report of a run; `name`.json in `folder`, where that is of the same run.

    Options of `dlio train` have their names in its report's `config`; `source` is its argument.
    Those that are `unchecked` may differ in a report that is there.

    Raises UsageError when the training fails, or the report that is there is another one's.
    """
    path = os.path.join(folder, f"{name}.json")
    wanted = {key: value for key, value in options.items() if value is not None}
    for key in ("source", "val"):
        wanted[key] = os.path.abspath(str(wanted[key]))
    if os.path.exists(path):
        with as_usage(path, "remove it"):
            kept = cast(TrainingReport, read_json(path))
            same = all(kept["config"].get(key) == value for key, value in wanted.items())
            if same and kept["ranks"] == ranks:
                return kept
        raise UsageError(
            f"{path} is the report of another training: name another folder by --keep, or remove it"
        )
    argv = ["train", str(wanted.pop("source")), "-n", str(ranks), "--report", path]
    for key, value in {**wanted, **(unchecked or {})}.items():
        option = f"--{key.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            if each is not False:
                argv += [option] if each is True else [option, str(each)]
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", *argv],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise UsageError(f"training {name}: {done.stderr.strip()[-800:]}")
    return cast(TrainingReport, read_json(path))


def first_at(goal: float, ends: Iterable[tuple[float, float]]) -> float | None:
    """Seconds until an accuracy reached `goal`, interpolated linearly between the ends of epochs,
    (seconds since the beginning, accuracy), and nothing at the beginning; None where it never
    did."""
    begun, before = 0.0, 0.0
    for seconds, reached in ends:
        if reached >= goal:
            share = (goal - before) / (reached - before) if reached > before else 0.0
            return begun + max(0.0, share) * (seconds - begun)
        begun, before = seconds, reached
    return None
