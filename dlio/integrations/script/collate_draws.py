"""Random numbers that a function draws while it makes a batch of samples.

A number for each sample is the sample's own, as those that a data set draws. One for all of them,
such as the weight by which mixup adds samples up, is drawn by each rank for its part of a batch:
its results differ from those of one process. Computations of NumPy's are not looked at.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from dlio.integrations.script.script_lines import is_foreign, line_of

_Call: TypeAlias = tuple[CodeType, int]

_ORDERS: Final = ("randperm", "permutation", "permuted", "shuffle")
"""Functions that draw one order, and not a number for each place of it."""


class CollateDraws(threading.local):
    """The random numbers that this thread draws between `watched`, by the calls that draw them."""

    _counts: Counter[_Call] | None = None
    _lines: dict[_Call, str]

    @contextmanager
    def watched(self, samples: int, say: Callable[[str], None]) -> Iterator[None]:
        """Tell of numbers that the `with` block draws for so many samples as a whole."""
        counts: Counter[_Call] = Counter()
        lines: dict[_Call, str] = {}
        self._counts, self._lines = counts, lines
        try:
            yield
        finally:
            self._counts = None
        of_all = [lines[call] for call, count in counts.items() if count % samples]
        if of_all:
            say(
                f"{', '.join(dict.fromkeys(of_all))}: random numbers are drawn there while samples "
                "are made a batch, and not as many for each sample: each rank draws them for its "
                "part of the batch, and one process once for all of it. What samples are mixed by "
                "(mixup), or a size of the whole batch, differs by rank, and the training is not "
                "quite that of one process"
            )

    def call(self, draw: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a function that draws random numbers, and count these."""
        if torch.compiler.is_compiling() or self._counts is None:
            return draw(*args, **options)
        counts, self._counts = self._counts, None  # It may call others.
        try:
            result = draw(*args, **options)
        finally:
            self._counts = counts
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            call = frame.f_code, frame.f_lasti
            is_order = draw.__name__ in _ORDERS or result is None
            counts[call] += 1 if is_order else _size(result)
            self._lines[call] = line_of(frame)
        return result


def _size(drawn: Any) -> int:
    return drawn.numel() if isinstance(drawn, torch.Tensor) else int(np.size(drawn))
