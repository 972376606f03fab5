"""Ending a run that gets no better."""

from dlio.train.callbacks.base import Callback, Run
from dlio.train.report import EpochReport


class EarlyStopping(Callback):
    """Ends the run after `patience` epochs without a better held-out accuracy than before."""

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        # From the history, which a resumed run has, too.
        seen = [epoch.val_accuracy or 0.0 for epoch in run.history]
        best = seen.index(max(seen))
        if len(seen) - 1 - best >= self._patience:
            run.stop(
                f"held-out accuracy has not been better than {seen[best]:.1%}, of epoch "
                f"{best + 1}, for {self._patience} epoch(s)"
            )
