"""A file of metrics in Prometheus' text format, for the textfile collector of its node exporter."""

import time
from typing import Final

from dlio.storage.counters import PLACES
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.report import EpochReport
from dlio.util.whole_files import check_writable, write_whole

_EVERY_S: Final = 15.0
_HELP: Final = {
    "dlio_ranks": ("gauge", "Ranks that train."),
    "dlio_lost_ranks_total": ("counter", "Ranks lost since the run began."),
    "dlio_updates_total": ("counter", "Steps of the optimizer."),
    "dlio_epochs_total": ("counter", "Epochs that have ended."),
    "dlio_epoch_samples": ("gauge", "Samples that all ranks have taken of this epoch's order."),
    "dlio_learning_rate": ("gauge", "Learning rate of the last step."),
    "dlio_read_bytes_total": ("counter", "Payload bytes by the place that they came from."),
    "dlio_exchange_bytes_total": ("counter", "Bytes that the exchange sent."),
    "dlio_exchange_wait_seconds_total": ("counter", "Seconds that ranks waited in the exchange."),
    "dlio_loss": ("gauge", "Mean loss of the last epoch."),
    "dlio_val": ("gauge", "Metrics of the last evaluation."),
    "dlio_samples_per_second": ("gauge", "Samples per second of all ranks in the last epoch."),
    "dlio_stall_ratio": ("gauge", "Share of the last epoch in which ranks waited for data."),
    "dlio_written_seconds": ("gauge", "Time of this file, in seconds since 1970."),
}
"""Type and explanation of each metric."""


class Prometheus(Callback):
    """Write metrics of the run into a file, whole each time. Rank 0 writes, or the next one left.

    Args:
        file: its name should end in `.prom`, as the node exporter asks.
        every_s: seconds between two versions of the file; an epoch's end writes one, too.

    Raises UsageError if the file cannot be written.
    """

    def __init__(self, file: str, every_s: float = _EVERY_S) -> None:
        check_writable("--callback prometheus", file)
        self._file, self._every_s = file, every_s
        self._next = 0.0

    def begins(self, run: Run) -> None:
        self._write(run)

    def after_step(self, run: Run) -> None:
        if time.monotonic() >= self._next:
            self._write(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self._write(run)

    def _write(self, run: Run) -> None:
        if run.comm.rank:
            return
        self._next = time.monotonic() + self._every_s
        text = text_of(run, time.time())
        write_whole(self._file, lambda file: file.write(text.encode()))


def text_of(run: Run, now: float) -> str:
    """Return the metrics of a run as text; `now` is in seconds since 1970."""
    history = run.history
    values: dict[str, dict[str, float]] = {
        "dlio_ranks": {"": run.comm.size},
        "dlio_lost_ranks_total": {"": len(run.losses)},
        "dlio_updates_total": {"": run.updates},
        "dlio_epochs_total": {"": len(history)},
        "dlio_epoch_samples": {"": run.position},
        "dlio_learning_rate": {"": run.optimizer.param_groups[0]["lr"]},
        "dlio_read_bytes_total": {
            f'place="{place}"': sum(each.bytes[place] for each in history) for place in PLACES
        },
        "dlio_exchange_bytes_total": {"": sum(each.exchange_bytes for each in history)},
        "dlio_exchange_wait_seconds_total": {"": sum(each.exchange_wait_s for each in history)},
        "dlio_written_seconds": {"": now},
    }
    if history:
        last = history[-1]
        metrics: dict[str, float | None] = {
            f'metric="{name}"': value for name, value in last.metrics.items()
        }
        metrics['metric="accuracy"'] = last.val_accuracy
        figures = {
            "dlio_loss": last.loss,
            "dlio_samples_per_second": last.samples_per_s,
            "dlio_stall_ratio": last.stall_fraction,
        }
        values |= {name: {"": each} for name, each in figures.items() if each is not None}
        values["dlio_val"] = {name: each for name, each in metrics.items() if each is not None}
    lines = []
    for name, (kind, about) in _HELP.items():
        given = values.get(name, {})
        if given:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [
            f"{name}{{{labels}}} {float(value)!r}" if labels else f"{name} {float(value)!r}"
            for labels, value in given.items()
        ]
    return "\n".join(lines) + "\n"
