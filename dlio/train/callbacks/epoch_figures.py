"""The figures of an epoch, by names that group them, for charts."""

from dlio.storage.counters import PLACES
from dlio.train.feature_spec import find_features
from dlio.train.report import EpochReport


def figures_of(report: EpochReport) -> dict[str, float]:
    """Return the figures that an epoch has, such as `epoch/loss` and `data/bytes_ram`."""
    figures = {
        "epoch/loss": report.loss,
        "epoch/accuracy": report.accuracy,
        "epoch/val_accuracy": report.val_accuracy,
        "epoch/samples_per_s": report.samples_per_s,
        "epoch/stall_fraction": report.stall_fraction,
        "epoch/step_ms_median": report.step_ms["median"],
        "epoch/step_ms_p95": report.step_ms["p95"],
        "epoch/skip_share": report.skip_share,
        "exchange/wait_s": report.exchange_wait_s,
        "exchange/bytes": float(report.exchange_bytes),
        "exchange/consensus_distance": report.consensus_distance,
        **{f"data/bytes_{place}": float(report.bytes[place]) for place in PLACES},
        **{
            name: value
            for feature in find_features()
            for name, value in feature.figures(report).items()
        },
        **{f"epoch/val_{name}": value for name, value in report.metrics.items()},
    }
    return {name: value for name, value in figures.items() if value is not None}
