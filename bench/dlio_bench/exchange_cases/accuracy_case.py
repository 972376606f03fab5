"""`--case training`: accuracy with each exchange, and the time to it."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, Final

from dlio.util.units import counted
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.results.repeats import deviation
from dlio_bench.results.terminal import steps
from dlio_bench.trainings import TrainedEpoch, TrainingReport, first_at, kept_folder, trained

_COMPRESSED: Final = (
    "allreduce+onebit",
    "allreduce+threshold",
    "allreduce+adaptive",
    "allreduce+bf16",
)
_YARDSTICK: Final = "allreduce"
_POINT: Final = 0.01


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Runs of `dlio train` of every exchange by seed, reports kept as they come: final held-out
    accuracy, seconds to allreduce's mean accuracy less a point, bytes, and how far ranks' weights
    lie apart."""
    from dlio.exchange import NAMES

    exchanges = options.exchanges or (*NAMES, *_COMPRESSED)
    reports: dict[str, list[TrainingReport]] = {name: [] for name in exchanges}
    common = {
        **options.train_options(),
        "source": options.source,
        "val": options.val,
        "epochs": options.epochs,
    }
    with kept_folder(options.keep) as folder:
        for seed in range(options.seeds):
            for name in steps(exchanges):
                settings = {**common, "exchange": name, "seed": seed}
                report = trained(f"{name}-{seed}", folder, options.ranks, settings)
                reports[name].append(report)
    finals = {name: [final_accuracy(each) for each in runs] for name, runs in reports.items()}
    goal = None
    if _YARDSTICK in finals:
        goal = statistics.mean(finals[_YARDSTICK]) - _POINT
    yardstick = reports.get(_YARDSTICK)
    rows = [_row(name, runs, finals[name], goal, yardstick) for name, runs in reports.items()]
    said = [
        f"{counted(options.ranks, 'rank')}, {counted(options.seeds, 'seed')}, "
        f"{counted(options.epochs, 'epoch')}: mean ± "
        "standard deviation. Accuracy lies on a line between the ends of epochs, for the time to "
        "it; seconds are of training, evaluation aside. Points are of one seed with both "
        "exchanges. Bytes are all ranks', over the run."
    ]
    if goal is not None:
        said.append(f"The goal is {goal:.1%}, allreduce's mean less a point.")
    return {"rows": rows, "goal": goal, "accuracies": finals, "said": said}


def final_accuracy(report: TrainingReport) -> float:
    """Held out, after the last epoch."""
    return float(report["epochs"][-1]["val_accuracy"])


def seconds_to(goal: float, epochs: Sequence[TrainedEpoch]) -> float | None:
    """Seconds of training until held-out accuracy reached `goal`, interpolated linearly between
    the ends of epochs and nothing at the beginning; None where it never did."""
    ends = itertools.accumulate(float(epoch["seconds"]) for epoch in epochs)
    return first_at(goal, zip(ends, (epoch["val_accuracy"] for epoch in epochs), strict=True))


def _row(
    name: str,
    reports: Sequence[TrainingReport],
    finals: Sequence[float],
    goal: float | None,
    yardstick: Sequence[TrainingReport] | None,
) -> dict[str, Any]:
    epochs = [report["epochs"] for report in reports]
    sent = [sum(epoch["exchange_bytes"] for epoch in each) for each in epochs]
    row: dict[str, Any] = {
        "exchange": name,
        "held_out_percent": deviation([100 * each for each in finals]),
        "seconds": deviation([sum(epoch["seconds"] for epoch in each) for each in epochs]),
        "sent_MB": statistics.mean(sent) / 1e6,
        "distance": statistics.mean(each[-1]["consensus_distance"] for each in epochs),
    }
    if goal is not None:
        times = [seconds_to(goal, each) for each in epochs]
        reached = [each for each in times if each is not None]
        row["seconds_to_goal"] = deviation(reached) if reached else "-"
        row["reached"] = f"{len(reached)} of {len(times)}"
    if yardstick is not None:
        pairs = zip(finals, map(final_accuracy, yardstick), strict=True)
        row["points_from_allreduce"] = deviation([100 * (own - its) for own, its in pairs])
        exact = [sum(epoch["exchange_bytes"] for epoch in each["epochs"]) for each in yardstick]
        row["allreduce_over_sent"] = statistics.mean(exact) / max(1.0, statistics.mean(sent))
    return row
