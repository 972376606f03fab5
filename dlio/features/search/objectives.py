"""Objectives: metrics of an epoch's report, or of a script's output, and their directions."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dlio.errors import UsageError
from dlio.util.arguments import nearest

if TYPE_CHECKING:
    from dlio.train.report import EpochReport

METRIC_LINE: Final = re.compile(r"dlio: metric (\S+) (\S+)\s*")
"""Line by which a script tells a metric."""
_SMALL: Final = re.compile(r"(.*_)?(loss|error|rmse|mae|seconds|bytes|parameters)")
"""Names of metrics that are better if they are smaller."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric to be made large or small."""

    name: str
    is_minimised: bool

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Word of Optuna."""
        return "minimize" if self.is_minimised else "maximize"

    def goodness(self, value: float | None) -> float:
        """Return a number that is greater for a better value; -inf for None and NaN."""
        if value is None or math.isnan(value):
            return -math.inf
        return -value if self.is_minimised else value


def parse_objectives(texts: Sequence[str], has_val: bool) -> tuple[Objective, ...]:
    """Parse the texts of --objective; the default depends on held-out data. Raises UsageError."""
    objectives = []
    for text in texts or ("val_accuracy" if has_val else "loss",):
        name, colon, word = text.partition(":")
        if not name or (colon and word not in ("min", "max")):
            raise UsageError(f"--objective {text}: write NAME, NAME:min or NAME:max")
        small = word == "min" if colon else _SMALL.fullmatch(name) is not None
        objectives.append(Objective(name, small))
    if len({each.name for each in objectives}) < len(objectives):
        raise UsageError(f"--objective {' '.join(texts)}: names a metric twice")
    return tuple(objectives)


def metrics_of(report: "EpochReport") -> dict[str, float | None]:
    """Return the metrics of an epoch by the names of --objective.

    Held-out metrics begin with val_; others are the report's numbers.
    """
    metrics: dict[str, float | None] = {
        name: getattr(report, name)
        for name in ("loss", "accuracy", "seconds", "samples_per_s", "exchange_bytes")
    }
    if (pruning := report.features.get("pruning")) is not None:
        metrics["parameters"] = pruning["parameters"]
    held_out = {f"val_{name}": value for name, value in report.metrics.items()}
    if report.val_accuracy is not None:
        held_out["val_accuracy"] = report.val_accuracy
    return {**metrics, **held_out}


def picked(metrics: Mapping[str, float | None], names: Sequence[str]) -> list[float | None]:
    """Return the values of objectives. Raises UsageError for a name that there is not."""
    for name in names:
        if name not in metrics:
            held_out = " (val_... need --val)" if name.startswith("val_") else ""
            raise UsageError(
                f"--objective {name}: no such metric{held_out}: there are "
                f"{', '.join(metrics)}{nearest(name, metrics)}"
            )
    return [metrics[name] for name in names]
