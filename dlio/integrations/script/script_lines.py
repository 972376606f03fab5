"""Lines of the script that is running, for messages and to tell its loops apart."""

import ast
import linecache
import os
import sys
import sysconfig
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

_ROOTS: Final = tuple(
    os.path.realpath(each) + os.sep
    for each in (
        sysconfig.get_path("stdlib"),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[2]),
    )
)
_HERE: Final = os.path.dirname(__file__) + os.sep
_RUNS: Final = "run_script"
"""The function of this package that runs a script."""


@cache
def is_foreign(file: str) -> bool:
    """True for a file that is not of torch or dlio."""
    return not os.path.realpath(file).startswith(_ROOTS[1:])


@cache
def is_script(file: str) -> bool:
    """True for a file of the user's: none of Python's, of an installed package or of dlio."""
    path = os.path.realpath(file)
    if file.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_ROOTS)


def script_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's files that is running, from one on outwards; None
    if there is none."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        code = frame.f_code
        if is_script(code.co_filename):
            return frame
        if code.co_name == _RUNS and code.co_filename.startswith(_HERE):
            return None  # Beyond it are the launcher's.
        frame = frame.f_back
    return None


def calling_frame() -> FrameType | None:
    """Return the frame of the user's files that has called this package itself; None if another
    one's code has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame if frame is not None and is_script(frame.f_code.co_filename) else None


def script_frames(most: int) -> list[FrameType]:
    """Return at most `most` frames of the user's files that are running, the innermost first: none
    of what started dlio."""
    frames: list[FrameType] = []
    frame = script_frame(sys._getframe(1))
    while frame is not None and len(frames) < most:
        frames.append(frame)
        frame = None if frame.f_back is None else script_frame(frame.f_back)
    return frames


def foreign_frames() -> tuple[list[FrameType], FrameType | None]:
    """Return the frames of frameworks and of the user that are running, from the innermost one to
    the first of the user's files, and this one; None if there is none."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_foreign(file):
            frames.append(frame)
            if is_script(file):
                break
        elif frame.f_code.co_name == _RUNS and file.startswith(_HERE):
            return frames, None
        frame = frame.f_back
    return frames, frame


@cache
def _nodes(file: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's syntax tree; none if it cannot be read."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return ()


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a file by name, but for names that several have."""
    several = [each for each in _nodes(file) if isinstance(each, ast.FunctionDef)]
    counts = Counter(each.name for each in several)
    return {each.name: each for each in several if counts[each.name] == 1}


@cache
def loops_at(file: str, line: int) -> tuple[ast.For, ...]:
    """Return the `for` loops whose headers are on a line of a file; none if it cannot be read."""
    return tuple(
        node
        for node in _nodes(file)
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or line)
    )


@cache
def loops_with_next(file: str, line: int) -> tuple[tuple[ast.For | ast.While, ast.Assign], ...]:
    """Return the innermost loop around an assignment of `next(...)` on a line of a file, and that
    assignment; none if there is none."""
    several = [
        (loop, node)
        for loop in _nodes(file)
        if isinstance(loop, ast.For | ast.While)
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign)
        and node.lineno == line
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "next"
    ]
    return tuple(several[-1:])  # Outer ones come first.


@cache
def statements_after(file: str, loop: ast.For | ast.While) -> tuple[ast.stmt, ...]:
    """Return the statements that follow a loop of a file in its block."""
    blocks = [getattr(node, name, ()) for node in _nodes(file) for name in ("body", "orelse")]
    block = next((each for each in blocks if isinstance(each, list) and loop in each), [loop])
    return tuple(block[block.index(loop) + 1 :])


@cache
def takes_size(code: CodeType, instruction: int) -> bool:
    """True if the call at an instruction (a frame's `f_lasti`) has an argument such as `len(x)`,
    `x.shape[0]` or `x.size(0)`, alone or in a tuple."""
    call = _call_at(code, instruction)
    return call is not None and any(
        _is_size(each) for each in (*call.args, *(named.value for named in call.keywords))
    )


@cache
def sizes_written(code: CodeType, instruction: int, dims: int) -> tuple[int | None, ...]:
    """Return the sizes of so many dimensions that the call at an instruction asks for and that the
    file itself tells, as a number or by a name that is one throughout; None for others."""
    call = _call_at(code, instruction)
    if call is None:
        return (None,) * dims
    named = {each.arg: each.value for each in call.keywords}
    given = [named[name] for name in ("size", "k") if name in named] or call.args
    tuples = [each.elts for each in given if isinstance(each, ast.Tuple | ast.List)]
    # `replace=False` may come after a size.
    numbers = [each for each in given if not _is_bool(each)]
    several = next((each for each in tuples if len(each) == dims), None)
    if several is None:
        function = getattr(call.func, "attr", getattr(call.func, "id", None))
        several = numbers if function in ("rand", "randn") else numbers[-1:]
    if len(several) != dims:
        return (None,) * dims
    known = _constants(code.co_filename)
    return tuple(
        _number(each) if not isinstance(each, ast.Name) else known.get(each.id) for each in several
    )


def _is_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _number(node: ast.expr | None) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@cache
def _constants(file: str) -> dict[str, int]:
    """Return the names of a file that are given one whole number, and nothing else anywhere."""
    nodes = _nodes(file)
    given: dict[str, set[int | None]] = {}
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs += zip(names, values, strict=False)
            case ast.Assign(targets=targets, value=value):
                pairs += [(each, value) for each in targets]
            case ast.AnnAssign(target=target, value=value):
                pairs.append((target, value))
            case ast.arg(arg=name):
                given.setdefault(name, set()).add(None)
    numbers = {id(target): _number(value) for target, value in pairs}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.setdefault(node.id, set()).add(numbers.get(id(node)))
    single = {name: each.pop() for name, each in given.items() if len(each) == 1}
    return {name: number for name, number in single.items() if number is not None}


def _call_at(code: CodeType, instruction: int) -> ast.Call | None:
    """Return the call at an instruction of a frame; None if its text cannot be read."""
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [each.encode() for each in linecache.getlines(code.co_filename)[line - 1 : end_line]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end_column]  # First: both columns may be of one line.
    lines[0] = lines[0][column:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return call if isinstance(call, ast.Call) else None


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Tuple(elts=several) | ast.List(elts=several):
            return any(map(_is_size, several))
        case ast.Call(func=ast.Name(id="len")) | ast.Call(func=ast.Attribute(attr="size")):
            return True
        case ast.Attribute(attr="shape") | ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
    return False


def line_of(frame: FrameType) -> str:
    """Return a frame's place, such as `train.py:41`."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def script_line() -> str:
    """Return the place in the user's files that is running, such as `train.py:41`."""
    frame = script_frame()
    return line_of(frame) if frame is not None else "the script"
