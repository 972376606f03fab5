"""`--case unequal`: every exchange next to a rank at a third of the speed, with and without
`--balance`."""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlio_bench.bench_ranks import TIMEOUT_S, run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions

_Key = tuple[str, bool, int]
"""Exchange, `--balance`, and seed."""
_Epochs = list[dict[str, Any]]

_RANKS: Final = 4
_FACTOR: Final = 3.0
_EPOCHS: Final = 6
_TIMED: Final = 3
"""Epochs at the end whose median time counts; shares have settled before."""
_SAMPLE_S: Final = 0.004
_CLASSES: Final = 3
_HELD_OUT: Final = 300


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Trains on 4 ranks, of which the last takes three times as long for a sample, with even shares
    and with `--balance`: seconds of an epoch over the ideal's, and held-out accuracy."""
    from dlio.cli.demo_pictures import draw_dataset
    from dlio.exchange import NAMES

    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        source, val = options.source, options.val
        if source is None or val is None:
            pictures = os.path.join(scratch, "pictures")
            draw_dataset(pictures, images=options.images, validation=_HELD_OUT, classes=_CLASSES)
            source, val = os.path.join(pictures, "train"), os.path.join(pictures, "val")
        every = [
            (exchange, balance, seed)
            for exchange in options.exchanges or NAMES
            for balance in (False, True)
            for seed in range(options.seeds)
        ]
        runs = dict(zip(every, _epochs(source, val, every), strict=True))
    rows = [_row(name, options.seeds, runs) for name in options.exchanges or NAMES]
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


def _epochs(source: str, val: str, every: Sequence[_Key]) -> list[_Epochs]:
    """Train with each exchange, with `--balance` or without, and seed, in the same processes."""
    task = {
        "epochs": _EPOCHS,
        "sample_s": _SAMPLE_S,
        "factor": _FACTOR,
        "runs": [
            {"source": source, "val": val, "exchange": exchange, "balance": balance, "seed": seed}
            for exchange, balance, seed in every
        ],
    }
    limit_s = TIMEOUT_S * len(every)
    report: dict[str, Any] = run(
        "dlio_bench.exchange_cases.balance_rank", task, _RANKS, timeout_s=limit_s
    )
    epochs: list[_Epochs] = report["runs"]
    return epochs


def _row(exchange: str, seeds: int, runs: Mapping[_Key, _Epochs]) -> dict[str, Any]:
    from dlio_bench.results.repeats import deviation, spread

    even = [runs[exchange, False, seed] for seed in range(seeds)]
    balanced = [runs[exchange, True, seed] for seed in range(seeds)]
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
