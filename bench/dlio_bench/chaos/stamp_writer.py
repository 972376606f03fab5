"""The bench in each rank: a callback that stamps steps and makes some faults, and models of a size.

The bench kills and stops ranks from outside. For an exit or an exception it sends a signal, and
the callback does the rest.
"""

import faulthandler
import json
import os
import resource
import signal
import time
from dataclasses import asdict
from types import FrameType
from typing import IO, Final, Self

from torch import nn

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport
from dlio_bench.chaos.scheduled_faults import EXIT, HANG, RAISE, STACKS

_WIDTH: Final = 1024


class StampWriter(Callback):
    """Writes a line of JSON for each step and loss into a file of its rank; see `stamps`.

    Args:
        folder: folder of the job.
        bench: process of the bench; the rank ends when it is gone.
        pause_ms: time to sleep in each step, in milliseconds.
    """

    def __init__(self, folder: str, bench: int, pause_ms: float = 0.0) -> None:
        self._folder, self._bench, self._pause_s = folder, bench, pause_ms / 1000
        self._file = -1
        self._stacks: IO[str] | None = None
        self._run: Run | None = None
        self._losses = self._changes = 0
        self._generation = 0
        self._raises = self._hangs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._tell_losses(self._run)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._stamp({"kind": "end", "peak_KiB": peak})
        # The file stays open until the process ends, which may be by a late signal.

    def begins(self, run: Run) -> None:
        self._run = run
        name = f"{run.comm.rank}-{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(os.path.join(self._folder, f"rank-{name}.jsonl"), flags, 0o600)
        self._stacks = open(  # noqa: SIM115
            os.path.join(self._folder, f"stacks-{name}.txt"), "w", encoding="utf-8"
        )
        faulthandler.register(STACKS, self._stacks, all_threads=True)
        signal.signal(RAISE, self._on_raise)
        signal.signal(EXIT, self._on_exit)
        signal.signal(HANG, self._on_hang)
        # Those of ranks that this one takes the place of have been told.
        self._losses, self._changes = len(run.losses), len(run.changes)
        who = {"rank": run.comm.rank, "pid": os.getpid(), "step": run.updates}
        self._stamp({"kind": "begin", **who})

    def before_step(self, run: Run) -> bool:
        if self._pause_s:
            time.sleep(self._pause_s)
        if self._raises:
            raise RuntimeError("dlio bench chaos: a bug of this rank alone")
        while self._hangs:
            pass
        return True

    def after_step(self, run: Run) -> None:
        self._tell_losses(run)
        where = {"epoch": run.epoch_number, "step": run.updates}
        ranks = {"generation": self._generation, "ranks": run.comm.size}
        self._stamp({"kind": "step", **where, **ranks})
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
            self._stamp({**asdict(change), "kind": "loss", "change": change.kind})
        self._losses, self._changes = len(losses), len(changes)

    def _stamp(self, line: dict[str, object]) -> None:
        # One write: a rank that is killed leaves whole lines.
        os.write(self._file, json.dumps({"t": time.monotonic(), **line}).encode() + b"\n")

    def _on_raise(self, number: int, frame: FrameType | None) -> None:
        self._raises = True

    def _on_hang(self, number: int, frame: FrameType | None) -> None:
        self._hangs = True

    def _on_exit(self, number: int, frame: FrameType | None) -> None:
        os._exit(0)


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
