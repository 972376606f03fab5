"""The windows of steps that messages are planned for."""

from itertools import pairwise

from dlio.plan.epoch import EpochPlan
from dlio.plan.schedule import window_steps

_FIRST_WINDOW_STEPS = 2
"""Short, so that the first batch does not wait for a long window's messages."""
_MOST_WINDOW_STEPS = 32


def windows_of(plan: EpochPlan, mean_bytes: float) -> list[range]:
    """Return the steps of each window, the same on all ranks.

    On one node a window needs no memory but its plan, so windows are as long as possible there.

    Args:
        mean_bytes: mean payload bytes of a sample.
    """
    length = _MOST_WINDOW_STEPS
    if plan.ranks.nodes > 1:
        length = min(length, window_steps(mean_bytes, plan.largest_batch, plan.window_bytes))
    first = min(length, _FIRST_WINDOW_STEPS, plan.steps)
    edges = sorted({0, *range(first, plan.steps, length), plan.steps})
    return [range(start, stop) for start, stop in pairwise(edges)]
