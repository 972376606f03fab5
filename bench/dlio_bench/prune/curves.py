"""Trainings at the ends of their epochs, and summaries of several."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

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
    how much sooner it is as good as that one is in the end, and as good within the tolerance.

    Args:
        variants: curves of each variant, one per seed.
        tolerance: points.
    """
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
            f"{len(unpruned)} seed(s): mean ± standard deviation. Sooner: seconds until the "
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
        first, reached = (
            whole.seconds_to(whole.accuracy[-1]),
            curve.seconds_to(whole.accuracy[-1] - less),
        )
        if first and reached:
            ratios.append(first / reached)
    if not ratios:
        return "never"
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return spread if len(ratios) == len(pairs) else f"{spread}, {len(ratios)} of {len(pairs)}"
