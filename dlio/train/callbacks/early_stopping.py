"""End a run whose held-out accuracy no longer improves."""

from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.feature_spec import find_features
from dlio.train.report import EpochReport
from dlio.train.tasks.metrics import goodness, label, show_metric
from dlio.util.units import counted


class EarlyStopping(Callback):
    """End the run after so many epochs without a better held-out accuracy, or other metric.

    Epochs in which neurons were removed do not count, because later epochs recover their loss.
    """

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        patience = run.config.callbacks.early_stopping
        assert patience is not None
        # The history also covers epochs before the run was resumed.
        values = [goodness(epoch.watch, epoch.watched) for epoch in run.history]
        best = values.index(max(values))
        first, since = run.history[best], run.history[best + 1 :]
        features = find_features()
        if sum(not any(each.was_cut(epoch) for each in features) for epoch in since) >= patience:
            run.stop(
                f"held-out {label(first.watch)} has not been better than "
                f"{show_metric(first.watch, first.watched)}, of epoch {best + 1}, for "
                f"{counted(patience, 'epoch')}"
            )
