"""`--case balance` and `--case unequal`: ranks of unequal speed, with even shares and with
`--balance`, compared with the best that they could do.

Their computation is almost all sleep, in proportion to their samples, so that a machine with fewer
cores than ranks does not distort it.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

from dlio.comm import Communicator
from dlio.util.units import counted
from dlio_bench.bench_data import draw_pictures
from dlio_bench.bench_ranks import TIMEOUT_S, TaskValue, run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.paced_network import PacedNetwork
from dlio_bench.results.repeats import deviation, ratio, spread

_Epochs = list[dict[str, Any]]

_FACTOR: Final = 3.0
"""How many times as long the last rank takes."""
_SAMPLE_S: Final = 0.004
_RANKS: Final = (2, 3)
"""Of the case balance."""
_EPOCHS: Final = 4
_UNEQUAL_RANKS: Final = 4
_UNEQUAL_EPOCHS: Final = 6
_TIMED: Final = 3
"""Epochs at the end whose median time counts; shares have settled before."""
_HELD_OUT: Final = 300


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Trains with and without `--balance`, the last rank three times as slow as the others. The
    ideal is all samples over the sum of the ranks' own rates, as the run with even shares has
    measured them; ratios are to that of the same repeat."""
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        source, _ = draw_pictures(scratch, options.images)
        rows = [_row(source, ranks, options) for ranks in _RANKS]
    return {
        "rows": rows,
        "said": [
            f"The last rank takes {_FACTOR:g} times {1000 * _SAMPLE_S:g} ms a sample; epochs' "
            "seconds over the ideal's, of which 1 is the best. Shares are of the last epoch."
        ],
    }


def _row(source: str, ranks: int, options: ExchangeBenchOptions) -> dict[str, Any]:
    ideal, even_s, first_s, last_s, shares = [], [], [], [], []
    settings = [{"source": source, "balance": chosen} for chosen in (False, True)]
    for _ in range(options.repeats):
        even, balanced = _trained(settings, _EPOCHS, ranks)
        ideal.append(options.images / sum(even[-1]["rates"]))
        even_s.append(even[-1]["seconds"])
        first_s.append(balanced[0]["seconds"])
        last_s.append(balanced[-1]["seconds"])
        shares.append(balanced[-1]["shares"])
    return {
        "ranks": ranks,
        "ideal_s": spread(ideal),
        "even_over_ideal": ratio(even_s, ideal),
        "first_epoch_over_ideal": ratio(first_s, ideal),
        "balanced_over_ideal": ratio(last_s, ideal),
        "shares": "; ".join(dict.fromkeys(" ".join(map(str, each)) for each in shares)),
    }


def measure_unequal(options: ExchangeBenchOptions) -> dict[str, object]:
    """Trains on 4 ranks, of which the last takes three times as long for a sample, with even shares
    and with `--balance`: seconds of an epoch over the ideal's, and held-out accuracy."""
    from dlio.exchange import NAMES

    exchanges = options.exchanges or NAMES
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        source, val = options.source, options.val
        if source is None or val is None:
            source, val = draw_pictures(scratch, options.images, _HELD_OUT)
        settings = [
            {"source": source, "val": val, "exchange": name, "balance": balance, "seed": seed}
            for name in exchanges
            for balance in (False, True)
            for seed in range(options.seeds)
        ]
        runs = iter(_trained(settings, _UNEQUAL_EPOCHS, _UNEQUAL_RANKS))
    rows = []
    for name in exchanges:
        even, balanced = ([next(runs) for _ in range(options.seeds)] for _ in range(2))
        rows.append(_unequal_row(name, even, balanced))
    return {
        "rows": rows,
        "said": [
            f"{_UNEQUAL_RANKS} ranks that mostly sleep, {1000 * _SAMPLE_S:g} ms a sample; the last "
            f"one takes {_FACTOR:g} times as long. Seconds of an epoch, median of the last "
            f"{_TIMED} of {_UNEQUAL_EPOCHS}, over the ideal's: all samples over the sum of the "
            "ranks' rates, without any other work. Accuracy is held out, in percent, mean and "
            f"deviation over {counted(options.seeds, 'seed')} of a small perceptron: it shows "
            "harm, and is "
            "not high."
        ],
    }


def _unequal_row(
    exchange: str, even: Sequence[_Epochs], balanced: Sequence[_Epochs]
) -> dict[str, Any]:
    ideal_s = _SAMPLE_S / (_UNEQUAL_RANKS - 1 + 1 / _FACTOR)  # Of a sample.
    return {
        "exchange": exchange,
        "even_over_ideal": spread([_sample_s(each) / ideal_s for each in even]),
        "balanced_over_ideal": spread([_sample_s(each) / ideal_s for each in balanced]),
        "even_percent": deviation([100 * each[-1]["val_accuracy"] for each in even]),
        "balanced_percent": deviation([100 * each[-1]["val_accuracy"] for each in balanced]),
        "shares": " ".join(map(str, balanced[-1][-1]["shares"])),
    }


def _sample_s(epochs: _Epochs) -> float:
    """Seconds per sample of the last epochs."""
    return float(statistics.median(each["seconds"] / each["samples"] for each in epochs[-_TIMED:]))


def _trained(settings: Sequence[Mapping[str, object]], epochs: int, ranks: int) -> list[_Epochs]:
    """Train with each of the settings, in the same processes; return the epochs of each."""
    task = {"epochs": epochs, "settings": settings}
    limit_s = TIMEOUT_S * len(settings)
    runs: list[_Epochs] = run(train_on_ranks, task, ranks, timeout_s=limit_s)["runs"]
    return runs


def train_on_ranks(
    comm: Communicator, epochs: int, settings: list[dict[str, TaskValue]]
) -> dict[str, list[_Epochs]]:
    """One rank's trainings, one after another, with options of `TrainConfig`."""
    from dlio.train.config import train_config
    from dlio.train.model import MODELS
    from dlio.train.trainer import train

    sample_s = _SAMPLE_S * (_FACTOR if comm.rank == comm.size - 1 else 1.0)

    def sleeping(classes: int, image_size: int) -> nn.Module:  # noqa: ARG001
        layers = (nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8**2, 64), nn.ReLU())
        return PacedNetwork(nn.Sequential(*layers, nn.Linear(64, classes)), sample_s)

    MODELS["sleeping"] = sleeping
    common = {"batch_size": 32, "model": "sleeping", "image_size": 32, "tiers": "ram:1GiB"}
    reports = [train(train_config(epochs=epochs, workers=1, **common, **own)) for own in settings]
    return {
        "runs": [
            [
                {
                    "seconds": epoch.seconds,
                    "samples": epoch.samples,
                    "shares": epoch.shares,
                    "rates": epoch.rank_samples_per_s,
                    "val_accuracy": epoch.val_accuracy,
                }
                for epoch in report.epochs
            ]
            for report in reports
        ]
    }
