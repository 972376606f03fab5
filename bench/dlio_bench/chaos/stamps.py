"""The files in which the ranks of a job stamp their steps, read while and after they are written.

`rank-<number>-<process>.jsonl` holds lines of JSON; all have `t`, seconds of the machine's
monotonic clock, and a `kind`:

| kind | further fields |
|---|---|
| `begin` | `rank`, `pid`, `step`: optimizer steps before the first one of this process |
| `step` | a finished step: `epoch`, `step` (from 1), `generation`, `ranks` |
| `loss` | the fields of `dlio.comm.survival.recovery.MeasuredLoss`, of which `change` is the kind |
| `end` | `peak_KiB`: largest resident memory |
"""

import glob
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Self, TypedDict, cast

from torch import nn

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport
from dlio_bench.chaos.torchft_program import StampFile

_WIDTH: Final = 1024


class StepStamp(TypedDict):
    """A step that a rank has finished."""

    t: float
    epoch: int
    step: int
    generation: int
    ranks: int


class LossStamp(TypedDict):
    """A loss that a rank has survived, or another change of the ranks."""

    t: float
    change: str
    ranks: list[int]
    generation: int
    seconds: float
    renew_s: float
    settle_s: float
    samples_again: int


@dataclass(slots=True)
class RankStamps:
    """Stamps of one rank."""

    rank: int
    """Number when the job began."""
    pid: int
    begun: float
    steps: list[StepStamp] = field(default_factory=list)
    losses: list[LossStamp] = field(default_factory=list)
    peak_kib: int | None = None
    """Largest resident memory; None if the rank did not come to its end."""


class Stamps:
    """Stamps of all ranks of the run in a folder so far."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._of_file: dict[str, RankStamps] = {}
        self.newest = 0.0
        """Time of the last stamp; 0 if there is none."""

    @property
    def ranks(self) -> list[RankStamps]:
        """Stamps of each rank, by number."""
        return sorted(self._of_file.values(), key=lambda each: each.rank)

    def read(self) -> None:
        """Read lines that were added."""
        for path in glob.glob(os.path.join(glob.escape(self._folder), "rank-*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for text in whole.splitlines():
                self._add(path, json.loads(text))

    def _add(self, path: str, line: dict[str, object]) -> None:
        kind, t = line.pop("kind"), cast(float, line["t"])
        self.newest = max(self.newest, t)
        if kind == "begin":
            rank, pid = cast(int, line["rank"]), cast(int, line["pid"])
            self._of_file[path] = RankStamps(rank, pid, t)
        elif kind == "step":
            self._of_file[path].steps.append(cast(StepStamp, line))
        elif kind == "loss":
            self._of_file[path].losses.append(cast(LossStamp, line))
        else:
            self._of_file[path].peak_kib = cast(int, line["peak_KiB"])


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that a run has finished."""

    number: int
    """Optimizer steps since the job began, this one included."""
    at: float
    """Time when the last of its ranks had finished it."""
    ranks: int


def steps_of(ranks: Sequence[RankStamps]) -> list[FinishedStep]:
    """Return the steps of a run, ascending."""
    last: dict[int, StepStamp] = {}
    for each in ranks:
        for stamp in each.steps:
            other = last.get(stamp["step"])
            if other is None or stamp["t"] > other["t"]:
                last[stamp["step"]] = stamp
    return [FinishedStep(number, each["t"], each["ranks"]) for number, each in sorted(last.items())]


def next_of_all(ranks: Sequence[RankStamps], at: float, generation: int) -> float | None:
    """Return when all ranks had finished their first step after a time in a generation or a later
    one; None if none has. Ranks that joined after that time are not waited for."""
    firsts = [
        next(
            (
                step["t"]
                for step in each.steps
                if step["t"] >= at and step["generation"] >= generation
            ),
            None,
        )
        for each in ranks
        if each.steps and each.steps[0]["t"] <= at
    ]
    return max((first for first in firsts if first is not None), default=None)


# The bench in each rank: a callback that stamps steps, and models of a size


class StampWriter(Callback):
    """Writes a line of JSON for each step and loss into a file of its rank, and makes some faults.

    The rank sleeps in each step, and ends when the process of the bench is gone.
    """

    def __init__(self, folder: str, bench: int, pause_ms: float = 0.0) -> None:
        self._folder, self._bench, self._pause_s = folder, bench, pause_ms / 1000
        self._run: Run | None = None
        self._losses = self._changes = 0
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._tell_losses(self._run)
            self._file.end()

    def begins(self, run: Run) -> None:
        self._run = run
        self._file = StampFile(self._folder, run.comm.rank)
        # Those of ranks that this one takes the place of have been told.
        self._losses, self._changes = len(run.losses), len(run.changes)
        self._file.begin(run.updates)

    def before_step(self, run: Run) -> bool:
        self._file.pause(self._pause_s)
        return True

    def after_step(self, run: Run) -> None:
        self._tell_losses(run)
        self._file.step(run.epoch_number, run.updates, self._generation, run.comm.size)
        try:
            os.kill(self._bench, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self._tell_losses(run)

    def _tell_losses(self, run: Run) -> None:
        losses, changes = run.losses, run.changes
        added = (*losses[self._losses :], *changes[self._changes :])
        for change in sorted(added, key=lambda each: each.generation):
            self._generation = change.generation
            self._file.write({**asdict(change), "kind": "loss", "change": change.kind})
        self._losses, self._changes = len(losses), len(changes)


def sized(classes: int, image_size: int, megabytes: int = 25) -> nn.Module:
    """Make a perceptron whose float32 parameters take about `megabytes` MB.

    Input: float32 (n, 3, image_size, image_size); output: logits (n, classes).

    Raises ValueError if the first layer alone is larger than that.
    """
    pixels = 3 * image_size * image_size
    hidden = round((megabytes * 1e6 / 4 - pixels * _WIDTH) / _WIDTH**2)
    if hidden < 0:
        raise ValueError(f"{megabytes} MB: the first layer is larger")
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(pixels, _WIDTH)]
    for _ in range(hidden):
        layers += [nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(_WIDTH, classes))
