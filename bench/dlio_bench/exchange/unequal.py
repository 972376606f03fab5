"""`--case unequal`: every exchange next to a rank at a third of the speed, with and without
`--balance`."""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlio_bench.exchange.options import Options
from dlio_bench.ranks import TIMEOUT_S, run
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


def measure(options: Options) -> dict[str, object]:
    """Trains on 4 ranks, of which the last takes three times as long for a sample, with even shares
    and with `--balance`: seconds of an epoch over the ideal's, and held-out accuracy."""
    from dlio.cli.demo_pictures import draw_dataset
    from dlio.train.exchange import NAMES

    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        source, val = options.source, options.val
        if source is None or val is None:
            pictures = os.path.join(scratch, "pictures")
            draw_dataset(pictures, images=options.images, validation=_HELD_OUT, classes=_CLASSES)
            source, val = os.path.join(pictures, "train"), os.path.join(pictures, "val")
        data = {"source": source, "val": val}
        rows = [_row(data, each, options.seeds) for each in steps(options.exchanges or NAMES)]
    return {
        "rows": rows,
        "said": [
            f"{_RANKS} ranks that mostly sleep, {1000 * _SAMPLE_S:g} ms a sample; the last one "
            f"takes {_FACTOR:g} times as long. Seconds of an epoch, median of the last {_TIMED} of "
            f"{_EPOCHS}, over the ideal's: all samples over the sum of the ranks' rates, without "
            "any other work. Accuracy is held out, in percent, mean and deviation over "
            f"{options.seeds} seed(s) of a small perceptron: it shows harm, and is not high."
        ],
    }


def _row(data: Mapping[str, str], exchange: str, seeds: int) -> dict[str, Any]:
    from dlio_bench.results.statistics import deviation, spread

    every = [(seed, balance) for balance in (False, True) for seed in range(seeds)]
    task = {
        "epochs": _EPOCHS,
        "sample_s": _SAMPLE_S,
        "factor": _FACTOR,
        "runs": [
            {**data, "exchange": exchange, "balance": balance, "seed": seed}
            for seed, balance in every
        ],
    }
    report: dict[str, Any] = run(
        "dlio_bench.exchange.balanced", task, _RANKS, timeout_s=TIMEOUT_S * len(every)
    )
    even, balanced = report["runs"][:seeds], report["runs"][seeds:]
    ideal_s = _SAMPLE_S / (_RANKS - 1 + 1 / _FACTOR)  # Of a sample.
    return {
        "exchange": exchange,
        "even_over_ideal": spread([_sample_s(each) / ideal_s for each in even]),
        "balanced_over_ideal": spread([_sample_s(each) / ideal_s for each in balanced]),
        "even_percent": deviation([100 * each[-1]["val_accuracy"] for each in even]),
        "balanced_percent": deviation([100 * each[-1]["val_accuracy"] for each in balanced]),
        "shares": " ".join(map(str, balanced[-1][-1]["shares"])),
    }


def _sample_s(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Seconds per sample of the last epochs."""
    return float(statistics.median(each["seconds"] / each["samples"] for each in epochs[-_TIMED:]))
