"""Copies of a user's objects for threads that take the place of worker processes.

A process has a copy of a data set, and may keep anything in it: the file that is open, the
sample that is being made, a buffer. Threads that share the data set would overwrite each other's,
and hand out the samples of others. So each has its own copy of the objects that call themselves:
the data set, those that it holds, and transforms. Data that is only read is shared: lists of
files, dictionaries that keep samples, large arrays, models, and whatever cannot be copied.
"""

import functools
import io
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from dlio.util.limits import open_regular
from dlio.util.printable import tell_once
from dlio.util.trusted_files import path_of

T = TypeVar("T")
_MOST_BYTES: Final = 1 << 20
"""Of an array that is copied: a buffer. Larger ones are data."""
_MOST_ITEMS: Final = 1000
"""Of a list, tuple or dictionary that is looked through."""
_MOST_NESTED: Final = 100_000
"""Of all those within one attribute of an object together."""
_MOST_OBJECTS: Final = 10_000
_DEEPEST: Final = 16
# fmt: off
_SHARED: Final = frozenset((
    "dlio", "datasets", "pandas", "pyarrow", "numpy", "logging", "threading", "multiprocessing",
    "queue", "concurrent", "asyncio", "contextvars", "weakref", "socket", "subprocess",
))
# fmt: on
"""Packages whose objects, and those of classes upon them, are for threads, or have no state of a
sample."""
_HOMES: Final = tuple(
    sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_here = threading.local()


def own_copy(held: T) -> T:
    """Return an object as another thread is to have it; the same one if all of it is shared.

    No code of the object's is called. Generators of random numbers stay the same objects.
    """
    walk = _CopyWalk(type(held).__module__)
    try:
        made: T = walk.copied(held, 0)
    except Exception as error:
        tell_once(
            f"{type(held).__name__} cannot be copied for each thread ({error}), which share it: "
            "workers='process' makes copies"
        )
        return held
    return made


def mine(held: T) -> T:
    """Return this thread's own copy of an object; the object itself in the main thread."""
    if threading.current_thread() is threading.main_thread():
        return held
    copies: dict[int, tuple[Any, Any]] = _here.__dict__.setdefault("copies", {})
    kept = copies.get(id(held))
    if kept is None:
        copies[id(held)] = kept = held, own_copy(held)  # It lives as long, so that its id stays.
    made: T = kept[1]
    return made


class _CopyWalk:
    def __init__(self, module: str) -> None:
        self._package = module.partition(".")[0]
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # Their ids stay theirs as long as they live.
        self._objects, self._left = 0, _MOST_NESTED

    def copied(self, held: Any, depth: int) -> Any:
        if id(held) in self._made:
            return self._made[id(held)]
        if depth > _DEEPEST or self._objects >= _MOST_OBJECTS:
            return held
        kind = type(held)
        if kind in (list, tuple, dict):
            return self._container(held, depth)
        if kind in (io.FileIO, io.BufferedReader):
            return _opened_again(held)
        if kind in (types.MethodType, types.FunctionType, functools.partial):
            return self._function(held, depth)
        if not self._has_state(held):
            return held
        own = _attributes(held)
        if not own and not callable(held) and not hasattr(held, "__getitem__"):
            return held  # A mark: others may ask whether it is this very object.
        made: Any = self._known(held, object.__new__(kind))
        self._objects += 1
        buffers, left = _buffers(own), self._left
        for name, value in own.items():
            self._left = _MOST_NESTED
            copied = buffers[name]() if name in buffers else self.copied(value, depth + 1)
            object.__setattr__(made, name, copied)
        self._left = left
        return made

    def _known(self, held: Any, made: Any) -> Any:
        """Return what is made of an object, or the object itself, and again wherever it is met, so
        that each is looked through once, also if it holds itself."""
        self._made[id(held)] = made
        self._kept.append(held)
        return made

    def _container(self, held: Any, depth: int) -> Any:
        """Return a list, tuple or dictionary; a new one if some of its objects are copied."""
        if len(held) > min(_MOST_ITEMS, self._left):
            return held
        self._left -= len(held)
        made: Any = () if isinstance(held, tuple) else self._known(held, type(held)())
        values = list(held.values()) if isinstance(held, dict) else list(held)
        copies = [self.copied(value, depth + 1) for value in values]
        if _are_same(values, copies):
            return self._known(held, held)
        if isinstance(held, tuple):
            return self._known(held, tuple(copies))
        if isinstance(held, dict):
            made.update(zip(held, copies, strict=True))
        else:
            made += copies
        return made

    def _function(self, held: Any, depth: int) -> Any:
        """Return a function; a new one if its object, or one that it closes over, is copied."""
        if isinstance(held, types.MethodType):
            owner = self.copied(held.__self__, depth + 1)
            return held if owner is held.__self__ else types.MethodType(held.__func__, owner)
        if isinstance(held, functools.partial):
            parts = [held.func, held.args, held.keywords]
            copies = [self.copied(part, depth + 1) for part in parts]
            if _are_same(parts, copies):
                return self._known(held, held)
            function, arguments, keywords = copies
            return self._known(held, functools.partial(function, *arguments, **keywords))
        try:
            values = [cell.cell_contents for cell in held.__closure__ or ()]
        except ValueError:  # One is not assigned yet.
            return held
        cells = tuple(types.CellType() for _ in values)
        names = held.__name__, held.__defaults__, cells
        made = self._known(held, types.FunctionType(held.__code__, held.__globals__, *names))
        copies = [self.copied(value, depth + 1) for value in values]
        if _are_same(values, copies):
            return self._known(held, held)
        for cell, copied in zip(cells, copies, strict=True):
            cell.cell_contents = copied
        made.__kwdefaults__ = held.__kwdefaults__
        made.__dict__.update(held.__dict__)
        return made

    def _has_state(self, held: Any) -> bool:
        """True for a data set, a callable object, or one of a class of the user's own."""
        kind = type(held)
        if isinstance(held, type | types.ModuleType):
            return False
        package = kind.__module__.partition(".")[0]
        # The end of a copy would end the file that both hold: `__del__` closes it.
        bases = kind.__mro__[:-1]
        if hasattr(kind, "__del__") or any("__new__" in vars(each) for each in bases):
            return False
        if not all(each.__flags__ & _HEAP for each in bases):
            return False  # It has parts that are not Python's.
        if not _SHARED.isdisjoint(each.__module__.partition(".")[0] for each in bases):
            return False
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(held, torch.nn.Module):
                return False
            if isinstance(held, torch.utils.data.Dataset):
                return True
        return callable(held) or package == self._package or not _is_library(kind)


def _are_same(values: list[Any], copies: list[Any]) -> bool:
    return all(one is other for one, other in zip(values, copies, strict=True))


def _opened_again(file: Any) -> Any:
    """Return a regular file that is open for reading with a place of its own; another as it is.

    Processes that share a file's place, as torch's do, read where others have sought.
    """
    try:
        if file.closed or file.writable():
            return file
        descriptor = open_regular(path_of(file.fileno()))
        again = os.fdopen(descriptor, "rb", buffering=0 if type(file) is io.FileIO else -1)
        again.seek(file.tell())
    except (OSError, ValueError):
        return file
    return again


_HEAP: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes that Python code defines."""


def _is_library(kind: type) -> bool:
    """True for a class of an installed package, or of Python's own library."""
    if kind.__module__ == "__main__":
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or file.startswith(_HOMES)


def _attributes(held: Any) -> dict[str, Any]:
    """Return the attributes of an object, with those in slots."""
    own = dict(getattr(held, "__dict__", {}))
    for kind in type(held).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                name = f"_{kind.__name__.lstrip('_')}{name}" if _is_private(name) else name
                if hasattr(held, name):
                    own[name] = getattr(held, name)
    return own


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _buffers(own: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return how the small arrays among attributes are copied, by name. Not those that others
    refer to, or share memory with: another array's view, another process."""
    spans: list[tuple[int, int, str, Callable[[], Any]]] = []
    torch = sys.modules.get("torch")
    for name, value in own.items():
        if type(value) is bytearray and len(value) <= _MOST_BYTES:
            spans.append((id(value), 1, name, value.copy))
        elif isinstance(value, np.ndarray):
            is_own = type(value) is np.ndarray and value.flags.owndata and value.flags.writeable
            small = is_own and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
            spans.append((value.ctypes.data, value.nbytes, name if small else "", value.copy))
        elif torch is not None and type(value) is torch.Tensor and value.device.type == "cpu":
            if value.layout is not torch.strided:
                continue
            size = value.untyped_storage().nbytes()
            small = size <= _MOST_BYTES and not value.requires_grad and not value.is_shared()
            begin = value.untyped_storage().data_ptr()
            spans.append((begin, size, name if small else "", value.clone))
    alone = {}
    for begin, size, name, copy in spans:
        same = sum(begin < b + max(1, s) and b < begin + max(1, size) for b, s, _, _ in spans)
        if name and same == 1:
            alone[name] = copy
    return alone
