"""Deliberate faults: for each promise of a suite, an implementation that breaks exactly it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from dlio.testing import promises_of


@dataclass(frozen=True)
class Fault:
    """A promise, and a way to break it."""

    promise: str
    """Name of the test method that must fail."""
    suite: Callable[[], object]
    """Makes the suite of a broken implementation."""

    def __str__(self) -> str:
        name = getattr(self.suite, "__name__", "fault")
        return f"{self.promise.removeprefix('test_')}-{name.strip('_')}"


def assert_caught(fault: Fault, *fixtures: object) -> None:
    """Run the promise's test on the broken implementation: an assertion of it must fail."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        _run(fault, fixtures)


def _run(fault: Fault, fixtures: Sequence[object]) -> None:
    try:
        getattr(fault.suite(), fault.promise)(*fixtures)
    except pytest.skip.Exception as skipped:
        raise RuntimeError(f"the promise was not tested: {skipped}") from skipped


def assert_complete(suite: type, faults: Sequence[Fault]) -> None:
    """Each promise of a suite has a fault that breaks it."""
    assert sorted({fault.promise for fault in faults}) == promises_of(suite)
