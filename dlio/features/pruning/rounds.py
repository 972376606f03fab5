"""The record of one pruning round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

from dlio.features.pruning.pruning_report import RoundRecord
from dlio.features.pruning.removal_plan import Removal


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of one round, for reports and checkpoints."""

    step: int
    """Optimizer step after which the round happened."""
    parameters: int
    """Number of parameters after the round."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of neurons removed, by kind: dead, constant, twin, unneeded."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Greatest bound by kind; the docstring of `removal` gives the unit."""
    widths: dict[str, int] = field(default_factory=dict)
    """Neurons after the round of each group that shrank."""
    undone: tuple[str, ...] = ()
    """Groups whose removals were tried and rejected."""
    loss_before: float | None = None
    """Mean loss of the probe before the round; None without a probe."""
    loss_after: float | None = None
    """Mean loss of the probe after the round."""
    allowed: float | None = None
    """Allowed rise of the probe's loss."""
    seconds: float = 0.0
    """Time that the round took on this rank."""

    def to_json(self) -> RoundRecord:
        """Convert to JSON types."""
        return cast(RoundRecord, {**asdict(self), "undone": list(self.undone)})

    @staticmethod
    def from_json(record: RoundRecord) -> "Round":
        """Rebuild the round that `to_json` converted."""
        return Round(
            step=record["step"],
            parameters=record["parameters"],
            removed=record["removed"],
            bounds=record["bounds"],
            widths=record["widths"],
            undone=tuple(record["undone"]),
            loss_before=record["loss_before"],
            loss_after=record["loss_after"],
            allowed=record["allowed"],
            seconds=record["seconds"],
        )


def kinds_and_bounds(removals: Sequence[Removal]) -> tuple[dict[str, int], dict[str, float]]:
    """Count removals by kind, and return the greatest bound of each kind."""
    bounds: dict[str, float] = {}
    for removal in removals:
        bounds[removal.kind] = max(removal.bound, bounds.get(removal.kind, 0.0))
    return dict(Counter(removal.kind for removal in removals)), bounds
