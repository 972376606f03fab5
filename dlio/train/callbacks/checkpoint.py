"""Checkpoints while a run goes on."""

from dlio.train.callbacks import Callback
from dlio.train.checkpoint.folder import Checkpoints
from dlio.train.checkpoint.state import about, tensors_of
from dlio.train.report import EpochReport
from dlio.train.worker import Worker


class CheckpointCallback(Callback):
    """One every so many steps, and at the end of each epoch.

    Args:
        checkpoints: opened, and closed, by somebody else.
        every: steps of the optimizer; None for the ends of epochs alone.
    """

    def __init__(self, checkpoints: Checkpoints, every: int | None) -> None:
        self._checkpoints, self._every = checkpoints, every
        self._last = -1

    def begins(self, run: Worker) -> None:
        self._last = run.updates

    def after_step(self, run: Worker) -> None:
        whole_epoch = run.position >= len(run.loader.data)
        if self._every is not None and not whole_epoch and run.updates % self._every == 0:
            self._save(run)

    def epoch_ends(self, run: Worker, report: EpochReport) -> None:
        self._save(run)

    def _save(self, run: Worker) -> None:
        if run.updates == self._last:
            return
        self._last = run.updates
        self._checkpoints.save(run.updates, tensors_of(run), about(run))
