"""Ending a run that gets no better."""

from dlio.train.callbacks.base import Callback, Run
from dlio.train.report import EpochReport


class EarlyStopping(Callback):
    """Ends the run after `patience` epochs without a better held-out accuracy than before. Epochs
    in which neurons were cut out do not count: those that follow make good."""

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        # From the history, which a resumed run has, too.
        seen = [epoch.val_accuracy or 0.0 for epoch in run.history]
        best = seen.index(max(seen))
        since = run.history[best + 1 :]
        if sum(not _was_cut(epoch) for epoch in since) >= self._patience:
            run.stop(
                f"held-out accuracy has not been better than {seen[best]:.1%}, of epoch "
                f"{best + 1}, for {self._patience} epoch(s)"
            )


def _was_cut(epoch: EpochReport) -> bool:
    return any(each["removed"] for each in (epoch.pruning or {}).get("rounds", ()))
