"""The callback that writes checkpoints during a run."""

from dlio.comm.board import elsewhere
from dlio.train.callbacks.base import Callback, Run
from dlio.train.checkpoint.folder import Checkpoints
from dlio.train.checkpoint.state import about, changed_by_updates, tensors_of
from dlio.train.report import EpochReport
from dlio.train.worker import Worker

__all__ = ["CheckpointCallback"]


class CheckpointCallback(Callback):
    """Write a checkpoint at the end of each epoch, and every so many steps.

    Args:
        worker: the run to save.
        checkpoints: the folder; the caller opens and closes it.
        every: optimizer steps between checkpoints; None for ends of epochs only.
    """

    def __init__(self, worker: Worker, checkpoints: Checkpoints, every: int | None) -> None:
        self._worker, self._checkpoints, self._every = worker, checkpoints, every
        self._last = worker.updates

    def begins(self, run: Run) -> None:
        self._worker.before_update = self._checkpoints.copied

    def after_step(self, run: Run) -> None:
        whole_epoch = run.position >= self._worker.samples
        if self._every is not None and not whole_epoch and run.updates % self._every == 0:
            self.save(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self.save(run)

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless the last one is of this step. Collective."""
        if run.updates != self._last:
            self._last = run.updates
            with elsewhere():
                self._checkpoints.wait()  # Ranks may have other numbers afterwards.
                tensors = tensors_of(self._worker)
                later = changed_by_updates(self._worker, tensors)
                self._checkpoints.save(run.updates, tensors, about(self._worker), later)
