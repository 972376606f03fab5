"""Compare figures with a baseline, each in units of the calibration that was made around it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypedDict

from dlio_bench.results.repeats import interval_of_ratio, median
from dlio_bench.results.report_values import Better, Figure

Verdict = Literal["worse", "same", "better", "too noisy", "changed", "new", "gone"]
Bound = Literal["processor", "memory", "disk"]
Runs = Mapping[str, Figure]
"""Figures by key; a value for each repeat of the part, normalised."""
_TOLERANCE: Final = 1.15
"""Ratio that a whole interval has to pass: calibration does not follow a load more closely."""
_WIDEST: Final = 2.0
"""Largest ratio of the ends of an interval that says anything."""
_COUNTS: Final = ("", "B", "bytes", "MiB", "messages", "requests", "copies")


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """A figure compared with its baseline."""

    key: str
    ratio: float | None
    """Of the speeds: above 1 is better than the baseline. Of counts: now over then."""
    interval: tuple[float, float] | None
    verdict: Verdict

    @property
    def fails(self) -> bool:
        """True if the watch ends with exit code 1."""
        return self.verdict in ("worse", "changed")


def normalised(figure: Figure, seconds: float) -> Figure:
    """Return a figure as it would be if the calibration took one second.

    A rate is multiplied by the calibration's seconds, and a time is divided by them. Counts,
    shares and ratios are left alone.
    """
    if figure.unit.endswith("/s"):
        factor = seconds
    elif figure.unit in ("s", "ms", "us", "µs"):
        factor = 1 / seconds
    else:
        return figure
    return replace(figure, values=tuple(value * factor for value in figure.values))


def judge(baseline: Runs, now: Runs) -> Iterator[FigureVerdict]:
    """Compare each figure that has a direction, and each count.

    Counts are compared where all repeats of the baseline agree: others depend on time.
    """
    for key in dict.fromkeys([*baseline, *now]):
        if key not in now:
            yield FigureVerdict(key, None, None, "gone")
        elif key not in baseline:
            yield FigureVerdict(key, None, None, "new")
        elif now[key].better:
            yield _speed(key, baseline[key], now[key])
        elif now[key].unit in _COUNTS and len(set(baseline[key].values)) == 1:
            yield _count(key, baseline[key].values[0], now[key].values)


def _count(key: str, then: float, now: Sequence[float]) -> FigureVerdict:
    same = all(math.isclose(value, then, rel_tol=1e-12) for value in now)
    return FigureVerdict(
        key, median(now) / then if then else None, None, "same" if same else "changed"
    )


def _speed(key: str, then: Figure, now: Figure) -> FigureVerdict:
    new, old = now.values, then.values
    if now.better == "lower":
        new, old = old, new
    if not median(old):
        return FigureVerdict(key, None, None, "too noisy")
    ratio = median(new) / median(old)
    interval = interval_of_ratio(new, old)
    if interval is None:
        return FigureVerdict(key, ratio, None, "too noisy")
    low, high = interval
    verdict: Verdict = "same"
    if high < 1 / _TOLERANCE:
        verdict = "worse"
    elif low > _TOLERANCE:
        verdict = "better"
    elif low <= 0 or high / low > _WIDEST:
        verdict = "too noisy"
    return FigureVerdict(key, ratio, interval, verdict)


class BaselineFigure(TypedDict):
    """A figure as JSON."""

    unit: str
    better: Better
    values: list[float]


def to_json(runs: Runs) -> dict[str, BaselineFigure]:
    """Return JSON values."""
    return {
        key: {"unit": each.unit, "better": each.better, "values": list(each.values)}
        for key, each in runs.items()
    }


def from_json(stored: Mapping[str, BaselineFigure]) -> dict[str, Figure]:
    """Return figures that `to_json` stored. Raises KeyError, TypeError or ValueError."""
    return {
        key: Figure(key, str(each["unit"]), tuple(map(float, each["values"])), {}, each["better"])
        for key, each in stored.items()
    }


# Parts of the watch: small runs of benchmarks, and the work that limits each


@dataclass(frozen=True, slots=True)
class WatchPart:
    """A run of `dlio bench`. `{folder}` in an argument stands for a temporary folder."""

    arguments: tuple[str, ...]
    bound: Bound


PARTS: Final = {
    "loader": WatchPart(
        ("loader", "--peers", "torch,dlio", "--repeats", "2", "--image-size", "96"), "processor"
    ),
    "readers": WatchPart(
        (
            *("readers", "--samples", "200", "--sample-bytes", "20000", "--repeats", "2"),
            *("--format", "shard", "--format", "tar", "--format", "parquet"),
        ),
        "memory",
    ),
    "tiers": WatchPart(
        ("tiers", "--tiers", "ram:64MiB,{folder}:64MiB", "--size", "32MiB", "--no-keep"), "memory"
    ),
    "storage": WatchPart(
        (
            *("storage", "{folder}", "--files", "32", "--sample-size", "128KiB", "--step-ms", "5"),
            *("--epochs", "2", "--workers", "2", "--bare-seconds", "0.5"),
            # The file system's own rates would vary threefold from run to run.
            *("--metadata-files", "0"),
        ),
        "disk",
    ),
    "shuffle": WatchPart(("shuffle", "--case", "mixing", "--repeats", "1"), "processor"),
    "exchange": WatchPart(
        (
            *("exchange", "--case", "messages", "--fabric", "memory", "--repeats", "1"),
            *("--exchange", "allreduce", "--exchange", "gossip"),
        ),
        "processor",
    ),
    "staging": WatchPart(
        (
            *("staging", "--case", "local", "--quick", "--repeats", "1"),
            *("--folder", "{folder}"),
        ),
        "disk",
    ),
}
"""Parts by name. One run of all takes about four minutes on an idle machine of two cores."""
