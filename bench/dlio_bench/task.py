"""The task that every contender of `dlio bench loader` performs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Pass", "Task"]

Pass = Callable[[], Iterator[int]]
"""One pass; gives the samples of each batch."""


@dataclass(frozen=True, slots=True)
class Task:
    """Pictures to be loaded as crops."""

    files: list[str]
    labels: list[int]
    size: int
    batch_size: int
    workers: int
    scratch: str
    """A folder of its own."""
