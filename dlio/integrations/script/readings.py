"""Numbers that a script reads from tensors while it trains, such as counts of right answers.

Those that are made of a rank's part of each batch differ between ranks, and nothing can tell how
the script goes on with them: the lines that read them are told.
"""

import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

from dlio.comm.survival.recovery import uniform
from dlio.integrations.script.script_lines import is_foreign, line_of, script_frame
from dlio.integrations.script.share import ScriptContext
from dlio.util.units import counted

METHODS: Final = (
    *("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__"),
)
"""Methods of tensors by which numbers leave torch."""
_COUNTS: Final = (torch.int64, torch.int32, torch.float64)
"""Types of counts, which scripts may read after the pass."""
_LINES: Final = 6
_MOST: Final = 50_000
"""About the most numbers of an array that are compared."""
_LONGEST: Final = 200
_TENSORS: Final = (torch._tensor.__file__, __file__)
"""Modules of methods that call others of these methods."""


class Readings:
    """The lines of a script that read numbers from its part of the training batches."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._main = threading.main_thread().ident
        self._lines: dict[str, int] = {}
        """The lines since `tell`, with a digest of the numbers read."""
        self._told: set[str] = set()

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of `torch.Tensor`."""

        @wraps(original)
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            result = original(tensor, *args, **options)
            if not _reads_for_others():
                return result  # An optimizer of torch, or dlio, reads its own numbers.
            # A loss of the batches before may be read after an evaluation, too, or their outputs;
            # others are the same on all ranks, and so are not told.
            is_of_part = self._context.divides_now or tensor.grad_fn is not None
            is_of_part |= self._context.guard.active
            is_of_part &= not self._context.is_outside
            if is_of_part and threading.get_ident() == self._main:
                self._note(tensor, result)
            return result

        return read

    def _note(self, tensor: torch.Tensor, result: object) -> None:
        context = self._context
        if isinstance(tensor, torch.nn.Parameter):
            return
        if any(tensor.data_ptr() == loss.data_ptr() for loss in context.whole_losses):
            return
        if frame := script_frame():
            if tensor in context.mixed_losses:
                context.say(
                    f"{line_of(frame)}: the loss read there, or one that it is a part of, adds up "
                    "terms that count other elements, such as a sum and a mean: it is a mean of "
                    "the losses of the ranks' parts, not quite that of one process, and NaN where "
                    "a part has no element to count. No gradient differs for that reason"
                )
                return
            if isinstance(result, int | float):
                context.numbers_read.add(float(result))
            line = line_of(frame)
            self._lines[line] = zlib.crc32(_some_of(result), self._lines.get(line, 0))

    def tell(self) -> None:
        """Tell the user of the lines that have read other numbers on each rank since the last call.
        Collective."""
        comm, mine = self._context.comm, self._lines
        self._lines = {}
        theirs: list[dict[str, int]] = uniform(comm, lambda: comm.allgather(mine))
        differ = [line for line in mine if any(each.get(line) != mine[line] for each in theirs)]
        lines = [line for line in differ if line not in self._told]
        self._told.update(lines)
        batch = self._context.last_divided
        part = (
            "part"
            if batch is None
            else f"{int(batch.weight)} of {counted(len(batch.samples), 'sample')}"
        )
        if sizes := self._context.take_sizes():
            but = (
                f" (but for the first pass's: it began with whole batches, which count "
                f"{comm.size} times as much)"
                if self._context.counts_whole
                else ""
            )
            self._context.say(
                f"{_several(sizes)}: the size of a training batch, such as len(data), is there "
                f"that of rank 0's part ({part} of the last one), and a loss is that of the whole "
                f"batch once backward was called: means over the samples counted so are about "
                f"right{but}; counts, sums over len(dataset) and summed losses over such a size "
                "are not"
            )
        if not lines:
            return
        self._context.say(
            f"{_several(lines)}: numbers that the script reads there are from rank 0's part of "
            f"training batches ({part} of the last one), or follow from such numbers: counts and "
            "sums are a part of one process's, to be divided by the samples seen and not by "
            "len(dataset); means differ slightly, and a condition on them is decided by each rank"
        )


def _reads_for_others() -> bool:
    """True if the method that calls this was called by neither torch nor dlio."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_filename in _TENSORS:
        caller = caller.f_back
    return caller is not None and is_foreign(caller.f_code.co_filename)


def _some_of(result: object) -> bytes:
    """Return bytes by which the numbers that a method has returned differ from others."""
    if isinstance(result, np.ndarray):
        # Its text shows a few of them: of a picture, the margin.
        return np.ascontiguousarray(result.reshape(-1)[:: 1 + result.size // _MOST]).tobytes()
    if isinstance(result, list):
        result = result[:_LONGEST]
    return repr(result)[:_LONGEST].encode()


def _several(lines: Sequence[str]) -> str:
    more = "" if len(lines) <= _LINES else f" and {len(lines) - _LINES} more"
    return f"{', '.join(lines[:_LINES])}{more}"
