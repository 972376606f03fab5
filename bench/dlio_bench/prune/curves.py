"""Trainings at the ends of their epochs, and summaries of several."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlio.util.plot_files import picture
from dlio.util.units import counted
from dlio_bench.results.repeats import deviation
from dlio_bench.trainings import first_at

_YARDSTICK = "unpruned"


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """A training, at the ends of its epochs."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of training since the beginning, without evaluation."""
    accuracy: list[float] = field(default_factory=list)
    """Held out, as a part of 1."""
    parameters: list[int] = field(default_factory=list)
    widths: list[tuple[int, ...]] = field(default_factory=list)
    """Neurons of the layers that they can go from, in the model's order."""
    extra: dict[str, float] = field(default_factory=dict)
    """Sums over the whole training."""

    def seconds_to(self, goal: float) -> float | None:
        """Until held-out accuracy reached `goal`, on lines between the ends of epochs and nothing
        at the beginning; None where it never did."""
        return first_at(goal, zip(self.seconds, self.accuracy, strict=True))


def summary(variants: Mapping[str, Sequence[TrainingCurve]], tolerance: float) -> dict[str, object]:
    """A row a variant, against the unpruned one of the same seed: final accuracy, parameters, and
    how much sooner it is as good as that one is in the end, and as good within the tolerance, in
    points. Each variant has a curve per seed."""
    unpruned = variants[_YARDSTICK]
    rows = []
    for name, curves in variants.items():
        pairs = list(zip(curves, unpruned, strict=True))
        rows.append(
            {
                "variant": name,
                "held_out_percent": deviation([100 * each.accuracy[-1] for each in curves]),
                "points_gained": deviation(
                    [100 * (each.accuracy[-1] - whole.accuracy[-1]) for each, whole in pairs]
                ),
                "parameters": round(statistics.mean(each.parameters[-1] for each in curves)),
                "times_fewer": statistics.mean(
                    whole.parameters[-1] / each.parameters[-1] for each, whole in pairs
                ),
                "seconds": deviation([each.seconds[-1] for each in curves]),
                "times_sooner": sooner(pairs, 0.0),
                f"within_{tolerance:g}_points": sooner(pairs, tolerance / 100),
                **{key: deviation([each.extra[key] for each in curves]) for key in curves[0].extra},
            }
        )
    curves_told = {name: [asdict(each) for each in curves] for name, curves in variants.items()}
    return {
        "rows": rows,
        "raw": curves_told,
        "said": [
            f"{counted(len(unpruned), 'seed')}: mean ± standard deviation. Sooner: seconds until "
            "the "
            "unpruned network first was as good as it is in the end, over those until a variant "
            "was; medians with the least and largest, and of how many seeds. Seconds are of "
            "training, evaluation aside."
        ],
    }


def sooner(pairs: Sequence[tuple[TrainingCurve, TrainingCurve]], less: float) -> str:
    """Speed-up of pairs (curve, yardstick): the yardstick's seconds over the curve's.

    The yardstick's are to its final accuracy, the curve's to that accuracy less `less`.
    """
    ratios = []
    for curve, whole in pairs:
        goal = whole.accuracy[-1]
        first, reached = whole.seconds_to(goal), curve.seconds_to(goal - less)
        if first and reached:
            ratios.append(first / reached)
    if not ratios:
        return "never"
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return spread if len(ratios) == len(pairs) else f"{spread}, {len(ratios)} of {len(pairs)}"


# The pictures of `dlio bench prune`: accuracy and size against time, and widths of layers


def draw(curves: Mapping[str, Sequence[TrainingCurve]], title: str, path: str) -> None:
    """Accuracy and parameters against seconds, a line a training and a colour a variant; and how
    wide each layer is in the end, next to the widths of the first variant. PNG or SVG by the name's
    ending.

    Raises UsageError without matplotlib.
    """
    with picture(path) as pyplot:
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5))
        for number, (name, runs) in enumerate(curves.items()):
            for again, curve in enumerate(runs):
                look = {"color": f"C{number}", "label": None if again else name}
                accuracy = [100 * each for each in curve.accuracy]
                if len(accuracy) == 1:
                    left.plot(curve.seconds, accuracy, "x", **look)
                else:
                    left.plot([0.0, *curve.seconds], [0.0, *accuracy], **look)
                    middle.plot(curve.seconds, curve.parameters, ".-", **look)
        _label(left, "seconds of training", "held-out accuracy, %")
        _label(middle, "seconds of training", "parameters")
        middle.set_yscale("log")
        _widths(right, curves)
        figure.suptitle(title, fontsize=10)
        figure.tight_layout()


def _widths(axes: Any, curves: Mapping[str, Sequence[TrainingCurve]]) -> None:
    drawn, labelled = set(), set()
    for number, (name, runs) in enumerate(curves.items()):
        for curve in runs:
            widths = curve.widths[-1]
            if widths and widths not in drawn:
                label = None if name in labelled else name
                drawn.add(widths)
                labelled.add(name)
                layers = range(1, len(widths) + 1)
                axes.step(layers, widths, where="mid", marker="o", color=f"C{number}", label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    _label(axes, "layer whose neurons can go", "neurons in the end")


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
