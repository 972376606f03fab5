"""Objects that a user's object holds, to see what its code may do."""

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import numpy as np

_MOST_OBJECTS: Final = 2000
_MOST_ITEMS: Final = 200
"""Of a list or dictionary, that are looked at: longer ones are data."""
_DEPTH: Final = 24
_TRIES: Final = 1000
_LISTS: Final[tuple[Any, ...]] = (list, tuple, set, deque)
_SHORT: Final = 16
"""Items of a list in which steps of a transform are, at most; those of longer ones come last."""

_OF_PROCESS: Final = ("_stderr", "_invoke_excepthook")
"""Of each thread: the standard error and `sys.excepthook` of its start, a notebook's or a
script's own."""


def reachable(held: object, code: bool = True) -> Iterator[object]:
    """Yield an object and those that it holds; with `code`, also the functions of their classes,
    and global ones that functions name.

    Classes of torch and numpy are passed over, and so is everything beyond 2,000
    objects, or 200 of one list.
    """
    seen: set[int] = set()
    near, far = deque[tuple[Any, int]]([(held, 0)]), deque[tuple[Any, int]]()
    while (near or far) and len(seen) < _MOST_OBJECTS:
        queue = near or far
        each, depth = queue.popleft()
        if id(each) in seen or isinstance(each, str | bytes | int | float | np.ndarray):
            continue
        seen.add(id(each))
        yield each
        if depth < _DEPTH:
            inner = _held(each, code)
            is_data = isinstance(each, (dict, *_LISTS)) and len(inner) > _SHORT
            (far if is_data else queue).extend((one, depth + 1) for one in inner)


def _held(each: Any, code: bool) -> list[Any]:
    if isinstance(each, types.ModuleType | type | types.CodeType):
        return []
    if isinstance(each, types.FunctionType):
        cells = [cell.cell_contents for cell in each.__closure__ or () if _is_full(cell)]
        called = [each.__globals__.get(name) for name in each.__code__.co_names if code]
        return cells + [inner for inner in called if isinstance(inner, types.FunctionType)]
    if isinstance(each, types.MethodType):
        return [each.__func__, each.__self__]
    if isinstance(each, functools.partial):
        return [each.func, each.args, each.keywords]
    own = dict(getattr(each, "__dict__", {}))
    if isinstance(each, threading.Thread):
        own = {name: value for name, value in own.items() if name not in _OF_PROCESS}
    held = list(own.values())
    if isinstance(each, dict):
        held += _first(dict.values, each)
    for base in _LISTS:
        if isinstance(each, base):
            held += _first(base.__iter__, each)
    for kind in type(each).__mro__:
        if "__slots__" in vars(kind):
            slots = [one for one in vars(kind).values() if type(one) is types.MemberDescriptorType]
            held += [one.__get__(each) for one in slots if _is_set(one, each)]
        if code and kind.__module__.split(".")[0] not in ("builtins", "torch", "typing", "numpy"):
            held += [own for own in vars(kind).values() if isinstance(own, types.FunctionType)]
    return held


def _first(items: Callable[[Any], Iterable[Any]], each: Any) -> list[Any]:
    """Return the first items of a list or dictionary, which threads may change meanwhile."""
    for _ in range(_TRIES):
        with suppress(RuntimeError):
            return list(islice(items(each), _MOST_ITEMS))
    return []


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_set(slot: types.MemberDescriptorType, held: object) -> bool:
    try:
        return slot.__get__(held) is not None
    except AttributeError:
        return False
