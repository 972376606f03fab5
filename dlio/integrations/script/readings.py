"""Numbers that a script reads from tensors while it trains, such as counts of right answers.

They are made of a rank's part of each batch, and nothing can tell how the script goes on with them:
the lines that read them are told.
"""

import ast
import linecache
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import FrameType
from typing import Any, Final

import torch

from dlio.integrations.script.script_lines import is_foreign, line_of, script_frames
from dlio.integrations.script.share import ScriptContext

METHODS: Final = ("item", "tolist", "numpy", "__float__", "__int__", "__format__", "__repr__")
"""Methods of tensors by which numbers leave torch."""
_COUNTS: Final = (torch.int64, torch.int32, torch.float64)
"""Types of counts, which scripts may read after the pass."""
_LINES: Final = 6
_LENGTHS: Final = ("size", "shape", "numel")
_TENSORS: Final = (torch._tensor.__file__, __file__)
"""Modules of methods that call others of these methods."""


class Readings:
    """The lines of a script that read numbers from its part of the training batches."""

    def __init__(self, context: ScriptContext) -> None:
        self._context = context
        self._lines: dict[str, None] = {}
        self._told = 0
        self._weighed: set[str] = set()
        """Lines that weigh the loss of the whole batch by the length of a part."""

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of `torch.Tensor`."""

        @wraps(original)
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self._context.divides_now:
                self._note(tensor)
            return original(tensor, *args, **options)

        return read

    def _note(self, tensor: torch.Tensor) -> None:
        context = self._context
        is_count = tensor.ndim == 0 and tensor.dtype in _COUNTS
        if not (context.is_in_pass or is_count) or isinstance(tensor, torch.nn.Parameter):
            return
        if any(tensor.data_ptr() == loss.data_ptr() for loss in context.whole_losses):
            self._note_weight()
            return
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and caller.f_code.co_filename in _TENSORS:
            caller = caller.f_back
        if caller is None or not is_foreign(caller.f_code.co_filename):
            return  # An optimizer of torch reads its own numbers.
        if frames := script_frames():
            self._lines.setdefault(line_of(frames[0]), None)

    def _note_weight(self) -> None:
        """Tell the user if a loss is weighed by the length of the batch, which is this rank's."""
        batch, frames = self._context.last_divided, script_frames()
        if not frames or batch is None or not self._context.is_in_pass:
            return
        place = line_of(frames[0])
        if place in self._weighed or int(batch.weight) == len(batch.samples):
            return
        part = int(batch.weight)
        if any(_is_length(each, frames[0], part) for each in _partners(*_place_of(frames[0]))):
            self._weighed.add(place)
            self._context.say(
                f"{place}: the loss that the script reads there is that of the whole batch, and "
                f"seems to be weighed by the length of rank 0's part ({part} of "
                f"{len(batch.samples)} samples): divide the sum by the samples seen and not by "
                "len(dataset); where parts are uneven the mean differs slightly"
            )

    def tell(self) -> None:
        """Tell the user of the lines that have been seen since the last call."""
        lines = list(self._lines)[self._told :]
        self._told = len(self._lines)
        if not lines:
            return
        batch = self._context.last_divided
        part = "part" if batch is None else f"{int(batch.weight)} of {len(batch.samples)} samples"
        more = "" if len(lines) <= _LINES else f" and {len(lines) - _LINES} more"
        self._context.say(
            f"{', '.join(lines[:_LINES])}{more}: numbers that the script reads there from training "
            f"batches are those of rank 0's part ({part} of the last one): counts and sums are a "
            "part of one process's, to be divided by the samples seen and not by len(dataset); "
            "means differ slightly"
        )


def _place_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


@cache
def _partners(file: str, line: int) -> tuple[ast.expr, ...]:
    """Return the expressions that a number is multiplied by, or passed with to a function, which
    the statement on a line reads from a tensor."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    partners: list[ast.expr] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp | ast.Call):
            continue
        if not node.lineno <= line <= (node.end_lineno or line):
            continue
        several = node.args if isinstance(node, ast.Call) else [node.left, node.right]
        if isinstance(node, ast.Call) or isinstance(node.op, ast.Mult):
            reads = [each for each in several if _reads(each)]
            partners += [each for each in several if each not in reads] if reads else []
    return tuple(partners)


def _reads(expression: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in METHODS for node in ast.walk(expression)
    )


def _is_length(expression: ast.expr, frame: FrameType, part: int) -> bool:
    """True for `len(x)`, `x.size(0)`, `x.shape[0]`, and a variable of that value."""
    if isinstance(expression, ast.Name):
        value = frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
        return isinstance(value, int) and value == part
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _LENGTHS)
        or (isinstance(node, ast.Name) and node.id == "len")
        for node in ast.walk(expression)
    )
