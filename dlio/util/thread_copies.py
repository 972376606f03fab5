"""Copies of a user's objects for threads that take the place of worker processes.

A process has a copy of a data set, and may keep anything in it: the file that is open, the
sample that is being made, a buffer. Threads that share the data set would overwrite each other's,
and hand out the samples of others. So each has its own copy of the objects that call themselves:
the data set, those that it holds, and transforms; with the lists, dictionaries and arrays in
which they may put a sample. Large ones, which are data, are shared, as are models and whatever
cannot be copied.
"""

import array
import collections
import functools
import sys
import threading
import types
import weakref
from typing import Any, Final, TypeVar

import numpy as np

from dlio.util.copied_classes import (
    attributes_of,
    class_attributes_of,
    is_library,
    is_mark,
    is_step,
    may_be_built,
    may_be_copied,
    without_end,
)
from dlio.util.copied_files import MOST_BYTES, buffers_of, opening_again
from dlio.util.printable import tell_once

T = TypeVar("T")
_MOST_ITEMS: Final = 1000
"""Of a list, tuple or dictionary that is looked through."""
_MOST_OBJECTS: Final = 5_000
"""That are looked at, but for numbers and texts."""
_MOST_VALUES: Final = 50_000
"""Of all lists, tuples and dictionaries that are copied."""
_DEEPEST: Final = 16
_MOST_KEPT: Final = 64
"""Objects of which a thread keeps copies, the latest: it may outlive many data sets."""
# fmt: off
_CONTAINERS: Final = (
    collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque, list,
    dict, set,
)
# fmt: on
_BUFFERS: Final = (bytearray, array.array)
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, type, range, slice))
_here = threading.local()


def own_copy(held: T) -> T:
    """Return an object as another thread is to have it; the same one if all of it is shared.

    In a tuple they are copied together: an object that several of them hold stays one.

    No code of the object's is called. Generators of random numbers stay the same objects.
    """
    module = type(held[0] if isinstance(held, tuple) and held else held).__module__
    try:
        look = _CopyWalk(module)
        made: T = look.copied(held, 0)
        buffers = buffers_of(look.arrays.values())
        if buffers or look.meets_files:
            made = _CopyWalk(module, buffers).copied(held, 0)
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
        if len(copies) >= _MOST_KEPT:
            del copies[next(iter(copies))]
        copies[id(held)] = kept = held, own_copy(held)  # It lives as long, so that its id stays.
    made: T = kept[1]
    return made


class _CopyWalk:
    """One look at an object and all that it holds; makes the copy.

    `arrays` are those that were met. Those in `buffers`, by id, have these copies; without it, no
    file is opened, and `meets_files` tells whether one has been met.
    """

    def __init__(self, module: str, buffers: dict[int, Any] | None = None) -> None:
        self._package = module.partition(".")[0]
        self._made: dict[int, Any] = dict(buffers or {})
        self._opens = buffers is not None
        self.meets_files = False
        self._kept: list[Any] = []  # Their ids stay theirs as long as they live.
        self._looked = self._values = 0
        self._kinds: dict[type, bool] = {}
        self._named: dict[str, set[int]] = {}
        self.arrays: dict[int, Any] = {}

    def copied(self, held: Any, depth: int) -> Any:
        """Return the copy of the value of an attribute."""
        kind = type(held)
        if kind in _PLAIN:
            return held
        if id(held) in self._made:
            return self._made[id(held)]
        if depth > _DEEPEST or self._looked >= _MOST_OBJECTS:
            return held
        self._looked += 1
        torch = sys.modules.get("torch")
        if isinstance(held, np.ndarray) or (torch is not None and isinstance(held, torch.Tensor)):
            self.arrays[id(held)] = held
            return held
        if isinstance(held, tuple):
            return self._tuple(held, depth)
        if isinstance(held, _CONTAINERS):
            self._values += min(len(held), _MOST_ITEMS) if kind in _CONTAINERS else 0
            if self._values > _MOST_VALUES:
                return held
            return self._container(held, depth)
        if kind in _BUFFERS:
            small = len(held) * getattr(held, "itemsize", 1) <= MOST_BYTES
            return self._note(held, held[:]) if small else held
        open_again = opening_again(held)
        if open_again is not None:
            self.meets_files = True
            return self._note(held, open_again(held)) if self._opens else held
        if kind is types.SimpleNamespace:
            made = self._note(held, types.SimpleNamespace())
            made.__dict__.update({k: self.copied(v, depth + 1) for k, v in vars(held).items()})
            return made
        if kind is weakref.ref:
            to = held()
            made = self.copied(to, depth + 1)
            return held if made is to else weakref.ref(made)
        if kind in _FUNCTIONS:
            return self._function(held, depth)
        if not self._has_state(held):
            return self._library(held, depth)
        own = attributes_of(held)
        shared = class_attributes_of(kind) if hasattr(held, "__dict__") else {}
        if not own and not callable(held) and is_mark(kind):
            return held  # A mark: others may ask whether it is this very object.
        made = self._note(held, object.__new__(without_end(kind)))
        self._fill(made, own, depth)
        for name in shared.keys() - own.keys():
            copy = self.copied(shared[name], depth + 1)
            if copy is not shared[name]:
                object.__setattr__(made, name, copy)
        return made

    def _note(self, held: Any, made: T) -> T:
        if made is not held:
            self._made[id(held)] = made
            self._kept.append(held)
        return made

    def _fill(self, made: Any, own: dict[str, Any], depth: int) -> None:
        """Give a copy its attributes; long ones last, which may be the last to be looked at."""
        for name in sorted(own, key=lambda each: _length_of(own[each])):
            object.__setattr__(made, name, self.copied(own[name], depth + 1))

    def _tuple(self, held: Any, depth: int) -> Any:
        """Return a tuple; a new one if some of its objects are copied."""
        if len(held) > _MOST_ITEMS or _PLAIN.issuperset(map(type, held)):
            return held
        copies = [self.copied(value, depth + 1) for value in tuple.__iter__(held)]
        if all(one is other for one, other in zip(held, copies, strict=True)):
            return held
        if type(held) is not tuple and not hasattr(held, "_fields"):
            return held
        return self._note(held, tuple.__new__(type(held), copies))

    def _container(self, held: Any, depth: int, may_keep: bool = False) -> Any:
        """Return a new list or the like, or the same one if it is long: data. With `may_keep`,
        also if none of its objects is copied."""
        kind = type(held)
        base: Any = next(each for each in _CONTAINERS if isinstance(held, each))
        is_own = kind is not base
        if is_own and not (base is not collections.Counter and may_be_built(kind, base)):
            return held
        if not is_own and len(held) > _MOST_ITEMS:
            return held
        short = base.__len__(held) <= _MOST_ITEMS
        if base is collections.deque:
            made = base.__new__(kind)
            base.__init__(made, maxlen=held.maxlen)
        elif base is set:
            return self._note(held, held.copy()) if kind is set and not may_keep else held
        else:
            made = base.__new__(kind)
        if base is collections.defaultdict:
            made.default_factory = self.copied(held.default_factory, depth + 1)
        self._note(held, made)
        is_map = issubclass(base, dict)
        values = list(dict.values(held) if is_map else base.__iter__(held))
        copies = values
        if short and not _PLAIN.issuperset(map(type, values)):
            copies = [self.copied(value, depth + 1) for value in values]
        if may_keep and all(one is other for one, other in zip(values, copies, strict=True)):
            del self._made[id(held)]
            return held
        if is_map:
            put = base.__setitem__
            for key, copy in zip(dict.__iter__(held), copies, strict=True):
                put(made, key, copy)
        else:
            base.extend(made, copies)
        if is_own:
            self._fill(made, attributes_of(held), depth)
        return made

    def _library(self, held: Any, depth: int) -> Any:
        """Return an object of a library; a new one of those that are known to have state."""
        datasets, sqlite = sys.modules.get("datasets"), sys.modules.get("sqlite3")
        tarfile = sys.modules.get("tarfile")
        if tarfile is not None and type(held) is tarfile.TarFile:
            made = self._note(held, object.__new__(tarfile.TarFile))
            self._fill(made, attributes_of(held), depth)
            return made
        if datasets is not None and type(held) is getattr(datasets, "Dataset", None):
            given = vars(held).get("_format_kwargs")
            if given and (kwargs := self._container(given, depth, may_keep=True)) is not given:
                made = self._note(held, object.__new__(without_end(type(held))))
                made.__dict__.update(vars(held), _format_kwargs=kwargs)
                return made
        if sqlite is not None and type(held) is sqlite.Cursor:
            connection = self.copied(held.connection, depth + 1)
            made = self._note(held, connection.cursor())
            made.row_factory, made.arraysize = held.row_factory, held.arraysize
            return made
        return held

    def _function(self, held: Any, depth: int) -> Any:
        """Return a function; a new one if its object, or one that it closes over, is copied."""
        if isinstance(held, types.MethodType):
            owner = self.copied(held.__self__, depth + 1)
            return held if owner is held.__self__ else types.MethodType(held.__func__, owner)
        if isinstance(held, functools.partial):
            parts = [held.func, held.args, held.keywords]
            copies = [self._closed_over(part, depth) for part in parts]
            if all(one is other for one, other in zip(parts, copies, strict=True)):
                return held
            function, arguments, keywords = copies
            return functools.partial(function, *arguments, **keywords)
        if isinstance(held, functools._lru_cache_wrapper):
            inner = self.copied(held.__wrapped__, depth + 1)
            if inner is held.__wrapped__:
                return held
            return self._note(held, functools.lru_cache(**held.cache_parameters())(inner))
        try:
            values = [cell.cell_contents for cell in held.__closure__ or ()]
        except ValueError:  # One is not assigned yet.
            return held
        copies = [self._closed_over(value, depth) for value in values]
        defaults = self._tuple(held.__defaults__ or (), depth)
        same = defaults is (held.__defaults__ or defaults)
        if same and all(one is other for one, other in zip(values, copies, strict=True)):
            return held
        cells = tuple(map(types.CellType, copies))
        names = held.__name__, defaults or None, cells
        made = types.FunctionType(held.__code__, held.__globals__, *names)
        made.__kwdefaults__ = held.__kwdefaults__
        made.__dict__.update(held.__dict__)
        return made

    def _closed_over(self, held: Any, depth: int) -> Any:
        """Return a value that a function uses. Lists and dictionaries in which it collects stay
        those of the code around it."""
        if id(held) not in self._made and type(held) in _CONTAINERS:
            return self._container(held, depth, may_keep=True)
        return self.copied(held, depth + 1)

    def _has_state(self, held: Any) -> bool:
        """True for a data set, a callable object, or one of a class of the user's own."""
        kind = type(held)
        if kind not in self._kinds:
            self._kinds[kind] = may_be_copied(kind)
        if not self._kinds[kind]:
            return False
        asked = callable(held) or any("__getitem__" in vars(each) for each in kind.__mro__)
        if not asked and self._is_known_by_name(held):
            return False
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(held, torch.nn.Module) and not is_step(held, torch.nn):
                return False
            if isinstance(held, torch.utils.data.Dataset):
                return True
        package = kind.__module__.partition(".")[0]
        return callable(held) or package == self._package or not is_library(kind)

    def _is_known_by_name(self, held: Any) -> bool:
        """True for a variable of its class's module, by which others may know the object."""
        name = type(held).__module__
        if name == "__main__" or name not in sys.modules:
            return False
        if name not in self._named:
            self._named[name] = set(map(id, vars(sys.modules[name]).values()))
        return id(held) in self._named[name]


_FUNCTIONS: Final = (
    types.MethodType,
    types.FunctionType,
    functools.partial,
    functools._lru_cache_wrapper,
)


def _length_of(value: Any) -> int:
    return len(value) if type(value) in (list, dict, set, tuple) else 0
