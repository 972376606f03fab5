"""Live progress: a bar on a terminal, drawn by the launcher where there is one; a line every ten
seconds in a batch log."""

import time
from typing import Self

from dlio.comm.launch_environment import shows_terminal
from dlio.comm.survival.recovery import MeasuredLoss
from dlio.train.callbacks.callback_base import Run
from dlio.train.feature_spec import find_features
from dlio.train.report import EpochReport
from dlio.train.tasks.metrics import show_metric
from dlio.util.live_figures import publish
from dlio.util.live_line import tell_launcher, tells_launcher
from dlio.util.progress_bar import ProgressBar

_LINE_EVERY_S = 10.0
_REFRESH_S = 0.1
_FIRST = "waiting for the first batch"


class TrainingProgress:
    """Show the progress of a run, on rank 0 only, and that of each rank to `dlio top`."""

    def __init__(self, run: Run) -> None:
        speaks = run.comm.rank == 0
        self._run, self.steps = run, run.steps
        """`steps` are those of the current epoch."""
        self._speaks = speaks
        self._tells = speaks and tells_launcher()
        draws = speaks and not self._tells and shows_terminal()
        self._bar = ProgressBar(force=True, transient=True) if draws else None
        self._epoch, self._step = -1, 0
        self._last = self._started = time.perf_counter()
        self._samples = 0

    def figures(self) -> dict[str, object]:
        """Return what `dlio top` shows of this rank's training."""
        return {
            "epoch": max(0, self._epoch) + 1,
            "epochs": self._run.config.optimizer.epochs,
            "step": self._step,
            "steps": self.steps,
        }

    def __enter__(self) -> Self:
        self._live = publish("training", self.figures)
        if self._bar is not None:
            self._bar.__enter__()
            self._bar.begin(_FIRST, None)
        if self._tells:
            tell_launcher(_FIRST, 0, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.close()
        if self._tells:
            tell_launcher("ending", 0, None)
        if self._bar is not None:
            self._bar.__exit__()

    def step(self, epoch: int, step: int, samples: int, stall_s: float) -> None:
        """Show a finished step of an epoch, both from 0, with its samples, over all ranks, and the
        seconds that this rank has waited for data in the epoch."""
        now, self._step = time.perf_counter(), step + 1
        is_first = epoch != self._epoch
        self._epoch = epoch
        if not self._speaks:
            return
        if is_first:
            # Do not time the first step, whose beginning is unknown here.
            self._samples, self._started = -samples, now
            if self._bar is not None:
                self._bar.begin(self._name(epoch), self.steps)
        self._samples += samples
        is_live = self._tells or self._bar is not None
        if not self._samples and self._tells:
            tell_launcher(self._name(epoch), step + 1, self.steps)
        if not self._samples or now - self._last < (_REFRESH_S if is_live else _LINE_EVERY_S):
            return
        self._last = now
        seconds = max(now - self._started, 1e-9)
        rate = self._samples / seconds
        said = f"{rate:,.0f} samples/s, waited {stall_s:.1f} s for data"
        if self._bar is not None:
            self._bar.update(step + 1, note=said)
        elif self._tells:
            tell_launcher(self._name(epoch), step + 1, self.steps, said)
        else:
            print(f"{self._name(epoch)} step {step + 1}/{self.steps}: {said}", flush=True)

    def lost(self, rank: int, loss: MeasuredLoss) -> None:
        """Show that ranks were lost and the others go on; the lowest of these shows progress now.

        `rank` is this process's among those that are left.
        """
        self._speaks = rank == 0
        self._tells = self._speaks and tells_launcher()
        if self._speaks:
            print(loss.sentence(), flush=True)

    def epoch_ends(self, report: EpochReport) -> None:
        """Show the results of an epoch."""
        if not self._speaks:
            return
        held_out = ""
        if report.watched is not None:
            held_out = f", held out {show_metric(report.watch, report.watched)}"
        loss = "-" if report.loss is None else f"{report.loss:.3f}"
        said = f"loss {loss}{held_out}, {report.samples_per_s:,.0f} samples/s"
        said += "".join(feature.progress(report) for feature in find_features())
        if self._tells:
            tell_launcher(self._name(report.epoch), self.steps, self.steps)
        elif self._bar is not None:
            self._bar.update(self.steps)
        line = f"{self._name(report.epoch)}: {said} in {report.seconds:.1f} s"
        print(line, flush=True)

    def _name(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._run.config.optimizer.epochs}"
