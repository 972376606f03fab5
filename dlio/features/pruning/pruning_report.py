"""The report of pruning in an epoch, as JSON types."""

from collections.abc import Sequence
from typing import TypedDict


class RoundRecord(TypedDict):
    """A Round as JSON types."""

    step: int
    parameters: int
    removed: dict[str, int]
    bounds: dict[str, float]
    widths: dict[str, int]
    undone: list[str]
    loss_before: float | None
    loss_after: float | None
    allowed: float | None
    seconds: float


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
    rounds: list[RoundRecord]
    """The epoch's rounds."""
    undone: int
    """Number of rounds in which removals were rejected."""
    statistics: dict[str, float]
    """Cost: `steps` sampled; `share` and `rounds_share`, the fractions of the time since the start
    spent on sampling and on rounds."""
    stopped: str
    """Reason why there are no more rounds; empty while there may be."""
    left_alone: list[str]
    """Layers that cannot be pruned, with reasons."""


def removed_by_kind(epochs: Sequence[PruningReport]) -> dict[str, int]:
    """Number of neurons removed in these epochs, by kind."""
    kinds: dict[str, int] = {}
    for epoch in epochs:
        for each in epoch["rounds"]:
            for kind, count in each["removed"].items():
                kinds[kind] = kinds.get(kind, 0) + count
    return kinds
