"""`--case unequal`: every exchange next to a rank at a third of the speed, with and without
`--balance`."""

import os
import statistics
import tempfile
from typing import Any, Final

from dlio_bench.exchange.options import Options
from dlio_bench.ranks import run
from dlio_bench.results.terminal import steps

__all__ = ["measure"]

_RANKS: Final = 4
_FACTOR: Final = 3.0
_EPOCHS: Final = 6
_TIMED: Final = 3
"""Epochs at the end whose median time counts; shares have settled before."""
_SAMPLE_S: Final = 0.004
_CLASSES: Final = 3
_HELD_OUT: Final = 300
_WAYS: Final = {"alike": (1.0, False), "even": (_FACTOR, False), "balanced": (_FACTOR, True)}
"""How much longer the last rank takes for a sample, and whether shares follow the speed."""


def measure(options: Options) -> dict[str, object]:
    """Trains on 4 ranks of equal speed, on ranks of which the last takes three times as long for a
    sample, and on these with `--balance`: seconds of an epoch over the ideal's, and held-out
    accuracy."""
    from dlio.cli.demo_pictures import draw_dataset
    from dlio.train.exchange import NAMES

    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        pictures = os.path.join(scratch, "pictures")
        draw_dataset(pictures, images=options.images, validation=_HELD_OUT, classes=_CLASSES)
        rows = [_row(pictures, each, options) for each in steps(options.exchanges or NAMES)]
    return {
        "rows": rows,
        "said": [
            f"{_RANKS} ranks that mostly sleep, {1000 * _SAMPLE_S:g} ms a sample; the last one "
            f"takes {_FACTOR:g} times as long (even, balanced) or as long as the others (alike). "
            f"Seconds of an epoch, median of the last {_TIMED} of {_EPOCHS}, over the ideal's: all "
            "samples over the sum of the ranks' rates without any other work. Accuracy is of held-"
            f"out pictures in percent, mean of {options.seeds} seed(s), with the deviation."
        ],
    }


def _row(pictures: str, exchange: str, options: Options) -> dict[str, Any]:
    from dlio_bench.results.statistics import deviation, spread

    row: dict[str, Any] = {"exchange": exchange}
    accuracies = {}
    for name, (factor, balance) in _WAYS.items():
        epochs = [_epochs(pictures, exchange, factor, balance, k) for k in range(options.seeds)]
        rate = (_RANKS - 1 + 1 / factor) / _SAMPLE_S
        ideal = options.images / rate
        row[f"{name}_over_ideal"] = spread(
            [statistics.median(e["seconds"] for e in each[-_TIMED:]) / ideal for each in epochs]
        )
        accuracies[f"{name}_percent"] = deviation(
            [100 * each[-1]["val_accuracy"] for each in epochs]
        )
    shares = epochs[-1][-1]["shares"]
    return {**row, **accuracies, "shares": " ".join(map(str, shares))}


def _epochs(
    pictures: str, exchange: str, factor: float, balance: bool, seed: int
) -> list[dict[str, Any]]:
    """Train and return the epochs."""
    task = {
        "source": os.path.join(pictures, "train"),
        "val": os.path.join(pictures, "val"),
        "epochs": _EPOCHS,
        "sample_s": _SAMPLE_S,
        "factor": factor,
        "balance": balance,
        "exchange": exchange,
        "seed": seed,
    }
    report: dict[str, Any] = run("dlio_bench.exchange.balanced", task, _RANKS)
    epochs: list[dict[str, Any]] = report["epochs"]
    return epochs
