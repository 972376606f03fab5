"""The place of a run between two batches."""

from typing import TypedDict

from dlio.loader.assignment.assigner import EpochWire


class RunPosition(TypedDict):
    """Where a run is, between two batches, for a rank that joins; as JSON types."""

    step: tuple[int, int, int | None, int]
    said: tuple[int, int]
    """Numbers of losses and of changes that have been shown."""
    dealing: EpochWire
