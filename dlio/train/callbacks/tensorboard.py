"""TensorBoard: curves of a run, and summaries of its gradients and weights."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch

from dlio.errors import UsageError
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.callbacks.epoch_figures import figures_of
from dlio.train.callbacks.event_file import EventFile
from dlio.train.report import EpochReport
from dlio.util.extras import how_to_install
from dlio.util.whole_files import unwritable

_LOSS_EVERY: Final = 10
"""Steps between two losses; reading a loss waits for the device."""


class TensorBoard(Callback):
    """Write events of rank 0, by optimizer steps; an epoch's figures stand at its last step.

    If rank 0 is lost, the next one goes on in an event file of its own. A run that is resumed has
    readers drop the events of steps that it makes again. A summary of each parameter (--summaries)
    has norms of weight and gradient, their ratio, and histograms.
    """

    def __init__(self) -> None:
        self._folder: str | None = None
        self._losses = 0
        """Losses of ranks that were written, or that another rank has written."""
        self._open: EventFile | None = None
        self._purge: int | None = None
        """First step whose earlier events do not count, because this run makes it again."""

    @contextmanager
    def _writing(self) -> Iterator[EventFile]:
        """Yield the file of events, which is made at its first use.

        Raises UsageError if TensorBoard is not installed, or the file cannot be written.
        """
        try:
            if self._open is None:
                assert self._folder is not None
                self._open = EventFile(self._folder, self._purge)
            yield self._open
        except ImportError as error:
            raise UsageError(
                f"--tensorboard: {error}; install it: {how_to_install('tensorboard')}"
            ) from error
        except OSError as error:
            raise unwritable(f"--tensorboard {self._folder}", error) from error

    def __exit__(self, *error: object) -> None:
        if self._open is None:
            return
        # An error of the run, maybe this file's, is told, and not what follows from it.
        with suppress(OSError) if any(error) else self._writing():
            self._open.__exit__()

    def begins(self, run: Run) -> None:
        self._folder = run.config.callbacks.tensorboard
        if run.comm.rank:
            return
        first = run.updates
        if run.updates or run.config.checkpoints.resume:
            # The step that was made last has its events, unless it was step 0, which has none.
            first = self._purge = run.updates + bool(run.updates)
        self._scalar("ranks/number", run.comm.size, first)

    def after_step(self, run: Run) -> None:
        if run.comm.rank:
            return
        self._tell_losses(run)
        if run.updates % _LOSS_EVERY == 1:
            count = max(1, len(run.loader.last_samples))
            self._scalar("train/loss", float(run.last_loss) / count, run.updates)
            self._scalar("train/lr", run.optimizer.param_groups[0]["lr"], run.updates)
            if run.gradient_norm is not None:
                self._scalar("train/gradient_norm", float(run.gradient_norm), run.updates)
        summaries = run.config.callbacks.summaries
        if summaries is not None and run.updates % summaries == 0:
            self._summarise(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        if run.comm.rank:
            return
        self._tell_losses(run)
        step = run.updates
        for name, value in figures_of(report).items():
            self._scalar(name, value, step)
        with self._writing() as file:
            file.flush()

    def _tell_losses(self, run: Run) -> None:
        for loss in run.losses[self._losses :]:
            with self._writing() as file:
                file.add_text("ranks/losses", loss.sentence(), loss.step)
            self._scalar("ranks/number", loss.left, loss.step)
            self._scalar("ranks/recovery_s", loss.seconds, loss.step)
        self._losses = len(run.losses)

    @torch.no_grad()
    def _summarise(self, run: Run) -> None:
        for name, parameter in run.model.named_parameters():
            weight = parameter.detach().float()
            self._histogram(f"weights/{name}", weight, run.updates)
            size = float(weight.norm())
            self._scalar(f"weight_norm/{name}", size, run.updates)
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            if bool(gradient.isfinite().all()):
                self._histogram(f"gradients/{name}", gradient, run.updates)
            norm = float(gradient.norm())
            self._scalar(f"gradient_norm/{name}", norm, run.updates)
            self._scalar(f"gradient_to_weight/{name}", norm / max(size, 1e-12), run.updates)

    def _scalar(self, name: str, value: float, step: int) -> None:
        with self._writing() as file:
            file.add_scalar(name, value, step)

    def _histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        with self._writing() as file:
            file.add_histogram(name, values.cpu(), step)
