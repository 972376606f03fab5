"""The record of a pruning round, and the report of an epoch, as JSON types."""

from dataclasses import asdict, dataclass, field
from typing import TypedDict

from dlio.features.pruning.neuron_groups import JsonRecord


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

    def to_json(self) -> JsonRecord:
        """Convert to JSON types."""
        return {**asdict(self), "undone": list(self.undone)}

    @staticmethod
    def from_json(record: JsonRecord) -> "Round":
        """Rebuild the round that `to_json` converted."""
        return Round(**{**record, "undone": tuple(record["undone"])})


class PruningReport(TypedDict):
    """The pruning of one epoch, from rank 0."""

    parameters: int
    """Number of parameters now."""
    parameters_at_first: int
    layers: dict[str, int]
    """Number of parameters of each module, by name."""
    flops_per_sample: int
    """FLOPs of a forward pass now."""
    flops_at_first: int
    rounds: list[JsonRecord]
    """The epoch's `Round`s."""
    undone: int
    """Number of rounds in which removals were rejected."""
    statistics: dict[str, float]
    """Cost: `steps` sampled; `share` and `rounds_share`, the fractions of the time since the start
    spent on sampling and on rounds."""
    stopped: str
    """Reason why there are no more rounds; empty while there may be."""
    left_alone: list[str]
    """Layers that cannot be pruned, with reasons."""
