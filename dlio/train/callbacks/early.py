"""End a run whose held-out accuracy no longer improves."""

from dlio.train.callbacks.base import Callback, Run
from dlio.train.report import EpochReport

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """End the run after `patience` epochs without a new best held-out accuracy.

    Epochs in which neurons were removed do not count, because later epochs recover their loss.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        # The history also covers epochs before the run was resumed.
        accuracies = [epoch.val_accuracy or 0.0 for epoch in run.history]
        best = accuracies.index(max(accuracies))
        since = run.history[best + 1 :]
        if sum(not _was_cut(epoch) for epoch in since) >= self._patience:
            run.stop(
                f"held-out accuracy has not been better than {accuracies[best]:.1%}, of epoch "
                f"{best + 1}, for {self._patience} epoch(s)"
            )


def _was_cut(epoch: EpochReport) -> bool:
    return epoch.pruning is not None and any(each["removed"] for each in epoch.pruning["rounds"])
