"""The callback that writes checkpoints during a run."""

import math
import time

import torch

from dlio.comm.board import off_the_record
from dlio.comm.survival.membership import AllLeave
from dlio.comm.survival.recovery import uniform
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio.train.checkpoint.state import about, changed_by_updates, tensors_of
from dlio.train.report import EpochReport
from dlio.train.run_requests import RequestChannel, RunRequest
from dlio.train.worker import Worker


class CheckpointCallback(Callback):
    """Write a checkpoint at the end of each epoch, every so many steps, and when any rank asks.

    `wishes` are any rank's, for a checkpoint, and for the end after it. The caller closes them,
    and the folder.
    """

    def __init__(
        self,
        worker: Worker,
        checkpoints: Checkpoints,
        wishes: RequestChannel | None,
    ) -> None:
        self._worker, self._checkpoints, self._wishes = worker, checkpoints, wishes
        minutes = worker.config.checkpoints.checkpoint_minutes
        self._period_s = math.inf if minutes is None else 60 * minutes
        self._due = time.monotonic() + self._period_s
        """When rank 0 asks for the next one."""
        checkpoints.last = worker.updates
        self._ends = False
        """True once all ranks have agreed to end."""

    def begins(self, run: Run) -> None:
        self._worker.before_update = self._checkpoints.copied

    def after_step(self, run: Run) -> None:
        whole_epoch = run.position >= self._worker.samples
        wish = RunRequest.NONE
        if self._wishes is not None:
            if run.comm.rank == 0 and time.monotonic() >= self._due:
                self._wishes.wish(RunRequest.SAVE)
            wish = self._wishes.after_step(run.updates, whole_epoch)
        self._ends = RunRequest.END in wish
        if whole_epoch:
            return  # `epoch_ends` saves.
        every = run.config.checkpoints.checkpoint_every
        if wish or (every is not None and run.updates % every == 0):
            self.save(run)
        if self._ends:
            raise AllLeave

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self.save(run)
        if self._ends and len(run.history) < run.config.optimizer.epochs:
            raise AllLeave

    def save(self, run: Run) -> None:
        """Write a checkpoint, unless the last one is of this step. Collective."""
        if run.updates != self._checkpoints.last:
            self._due = time.monotonic() + self._period_s
            with off_the_record():
                self._checkpoints.wait()
                # All ranks save in one generation: to collect waits for others, and a rank that
                # learns of a loss there has another number afterwards, and other partners.
                tensors = uniform(run.comm, self._collected)
                later = changed_by_updates(self._worker, tensors)
                self._checkpoints.save(run.updates, tensors, about(self._worker), later)

    def _collected(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save, with the names of the rank's present number."""
        recovery = self._worker.recovery
        while True:
            number = 0 if recovery is None else recovery.number
            tensors = tensors_of(self._worker)
            if recovery is None or recovery.number == number:
                return tensors
