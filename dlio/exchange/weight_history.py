"""The weights that a rank had a moment ago, for messages that are as old."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

_DEPTH: Final = 4


class WeightHistory:
    """A rank's weights after each of its last steps, with the times of these steps.

    Takes as much memory as four copies of the weights.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, torch.Tensor]] = deque()

    def note(self, time_ns: int, weights: torch.Tensor) -> None:
        """Copy the weights that the rank has from now on; shape (entries,)."""
        full = len(self._marks) == _DEPTH
        memory = self._marks.popleft()[1] if full else torch.empty_like(weights)
        self._marks.append((time_ns, memory.copy_(weights)))

    def at(self, time_ns: int) -> torch.Tensor:
        """Return the weights that the rank had at a time: the oldest known, if it was before."""
        for since, weights in reversed(self._marks):
            if since <= time_ns:
                return weights
        return self._marks[0][1]

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights, from the oldest to the newest."""
        return [weights for _, weights in self._marks]

    def replace(self, weights: Sequence[torch.Tensor]) -> None:
        """Put others in the place of `weights`, such as ones of other shapes."""
        times = [since for since, _ in self._marks]
        self._marks = deque(zip(times, weights, strict=True))
