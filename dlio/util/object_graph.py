"""Objects that a user's object holds, to see what its code may do."""

import functools
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

_MOST_OBJECTS: Final = 2000
_MOST_ITEMS: Final = 200
"""Of a list or dictionary, that are looked at: longer ones are data."""
_DEPTH: Final = 6


def reachable(held: object) -> Iterator[object]:
    """Yield an object and those that it holds, with the functions of their classes.

    Classes of torch and numpy are passed over, and so is everything beyond 2,000
    objects, or 200 of one list.
    """
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(held, 0)]
    while queue and len(seen) < _MOST_OBJECTS:
        each, depth = queue.pop(0)
        if id(each) in seen or isinstance(each, str | bytes | int | float | np.ndarray):
            continue
        seen.add(id(each))
        yield each
        if depth < _DEPTH:
            queue += [(inner, depth + 1) for inner in _held(each)]


def _held(each: Any) -> list[Any]:
    if isinstance(each, types.ModuleType | type | types.CodeType):
        return []
    if isinstance(each, types.FunctionType):
        cells = [cell.cell_contents for cell in each.__closure__ or () if _is_full(cell)]
        called = [each.__globals__.get(name) for name in each.__code__.co_names]
        return cells + [inner for inner in called if isinstance(inner, types.FunctionType)]
    if isinstance(each, types.MethodType):
        return [each.__func__, each.__self__]
    if isinstance(each, functools.partial):
        return [each.func, each.args, each.keywords]
    if isinstance(each, dict):
        return list(islice(each.values(), _MOST_ITEMS))
    if isinstance(each, list | tuple | set):
        return list(islice(each, _MOST_ITEMS))
    held = list(getattr(each, "__dict__", {}).values())
    for kind in type(each).__mro__:
        if kind.__module__.split(".")[0] not in ("builtins", "torch", "typing", "numpy"):
            held += [own for own in vars(kind).values() if isinstance(own, types.FunctionType)]
    return held


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
