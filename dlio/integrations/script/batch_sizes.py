"""Lines of a training loop that take the size of a batch as a number, found in its source.

On ranks `len(data)` is the size of a part. Where it shapes a tensor, that is right. Where it counts
samples, weighs a loss or decides, the script computes another number than one process.
"""

import ast
import os
from collections.abc import Sequence
from enum import Enum, auto
from functools import cache
from typing import Final

from dlio.integrations.script.script_lines import loops_at, loops_with_next, statements_after

_KEEPS: Final = ("int", "float", "str", "round", "max", "min", "abs", "sum")
"""Functions that return a number of their arguments."""
_JOINS: Final = "gather_for_metrics"
"""Method of Accelerate's that returns the rows of all ranks."""
_REPORTS: Final = tuple(
    "print format info debug warning log write update add append set_postfix set_description "
    "add_scalar".split()
)
"""Functions and methods that take a size as a number; others take it as a shape."""


class _Use(Enum):
    """Use of an expression's value."""

    PLAIN = auto()
    """It gets a name, or none."""
    SHAPE = auto()
    """It is passed to a function, or is an index."""
    NUMBER = auto()


@cache
def size_lines(file: str, line: int, dim: int = 0) -> tuple[str, ...]:
    """Return the places, such as `train.py:41`, in the loop that takes its batches at a line of a
    file, by `for` or `next`, and after it in its block, that take the size of these, whose samples
    are in dimension `dim`, as a number."""
    loops: list[tuple[ast.For | ast.While, list[ast.expr]]]
    loops = [(each, [each.target]) for each in loops_at(file, line)]
    loops += [(each, taken.targets) for each, taken in loops_with_next(file, line)]
    several = [
        _Sizes(targets, loop.body, statements_after(file, loop), dim) for loop, targets in loops
    ]
    numbers = {number for each in several for number in each.lines}
    return tuple(f"{os.path.basename(file)}:{number}" for number in sorted(numbers))


class _Sizes:
    """The sizes that a loop takes of its batches, followed by name through its body and what
    comes after it."""

    def __init__(
        self,
        targets: Sequence[ast.expr],
        body: Sequence[ast.stmt],
        after: Sequence[ast.stmt],
        dim: int,
    ) -> None:
        self._dim = dim
        self._batches = {name for each in targets for name in _names(each)}
        """Names of batches, and of all that is computed from them."""
        self._sizes: set[str] = set()
        self.lines: set[int] = set()
        self._is_after = False
        for statement in body:
            self._statement(statement)
        self._is_after = (
            True  # Names may be those of other batches there, such as of an evaluation.
        )
        for statement in after:
            self._statement(statement)

    def _statement(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            return
        use = _Use.NUMBER if isinstance(node, ast.AugAssign) else _Use.PLAIN
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, use)
        if isinstance(node, ast.Assign):
            self._assigned(node.value, node.targets)
        elif isinstance(node, ast.For):
            self._assigned(node.iter, [node.target])
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                self._statement(child)

    def _assigned(self, value: ast.expr, targets: list[ast.expr]) -> None:
        names = {name for target in targets for name in _names(target)}
        if self._is_size(value):
            self._sizes |= names
        elif self._mentions(value):
            self._batches |= names
        elif _joins(value) or self._is_after:
            self._batches -= names
            self._sizes -= names

    def _expression(self, node: ast.AST, use: _Use) -> None:
        if self._is_size(node):
            if use is _Use.NUMBER and isinstance(node, ast.expr):
                self.lines.add(node.lineno)
            return
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in _KEEPS:
                use = _Use.NUMBER if name in _REPORTS else _Use.SHAPE
        elif isinstance(node, ast.Compare | ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and use is _Use.PLAIN
        ):
            use = _Use.NUMBER
        elif isinstance(node, ast.Subscript):
            use = _Use.SHAPE
        for child in ast.iter_child_nodes(node):
            self._expression(child, use)

    def _is_size(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._sizes
            case ast.Call(func=ast.Name(id="len"), args=[of]):
                return self._dim == 0 and self._mentions(of)
            case ast.Call(
                func=ast.Attribute(attr="size", value=of), args=[ast.Constant(value=dim)]
            ):
                return dim == self._dim and self._mentions(of)
            case ast.Subscript(
                value=ast.Attribute(attr="shape", value=of)
                | ast.Call(func=ast.Attribute(attr="size", value=of), args=[]),
                slice=ast.Constant(value=dim),
            ):
                return dim == self._dim and self._mentions(of)
        return False

    def _mentions(self, node: ast.AST) -> bool:
        return not (_joins(node) or self._batches.isdisjoint(_names(node)))


def _joins(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == _JOINS


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
