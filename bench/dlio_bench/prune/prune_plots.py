"""The pictures of `dlio bench prune`: accuracy and size against time, and widths of layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlio.util.plot_files import picture
from dlio_bench.prune.curves import TrainingCurve


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
