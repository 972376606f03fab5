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
import io
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import numpy as np

from dlio.util.limits import open_regular
from dlio.util.printable import tell_once
from dlio.util.trusted_files import path_of

T = TypeVar("T")
_MOST_BYTES: Final = 4 << 20
"""Of an array that is copied: a buffer. Larger ones are data."""
_MOST_TOGETHER: Final = 16 << 20
"""Of all arrays that are copied."""
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

    In a tuple they are copied together: what several of them hold stays one object.

    No code of the object's is called. Generators of random numbers stay the same objects.
    """
    module = type(held[0] if isinstance(held, tuple) and held else held).__module__
    try:
        look = _CopyWalk(module)
        made: T = look.copied(held, 0)
        buffers = _buffers(look.arrays.values())
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
        """Return the copy of what an object holds in an attribute."""
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
            small = len(held) * getattr(held, "itemsize", 1) <= _MOST_BYTES
            return self._note(held, held[:]) if small else held
        if kind in _FILES:
            self.meets_files = True
            return self._note(held, _FILES[kind](held)) if self._opens else held
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
        own = _attributes(held)
        if not own and not callable(held) and _is_mark(kind):
            return held  # A mark: others may ask whether it is this very object.
        made = self._note(held, object.__new__(_without_end(kind)))
        self._fill(made, own, depth)
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
        if is_own and not (base is not collections.Counter and self._may_be_made(kind, base)):
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
            self._fill(made, _attributes(held), depth)
        return made

    def _may_be_made(self, kind: type, base: type) -> bool:
        """True for a class of a user's own upon a list or dictionary."""
        own = kind.__mro__[: kind.__mro__.index(base)]
        return not _is_library(kind) and not any(
            {"__new__", "__del__"} & vars(each).keys() or not each.__flags__ & _HEAP for each in own
        )

    def _library(self, held: Any, depth: int) -> Any:
        """Return an object of a library; a new one of those that are known to have state."""
        datasets, sqlite = sys.modules.get("datasets"), sys.modules.get("sqlite3")
        tarfile = sys.modules.get("tarfile")
        if tarfile is not None and type(held) is tarfile.TarFile:
            made = self._note(held, object.__new__(tarfile.TarFile))
            self._fill(made, _attributes(held), depth)
            return made
        if datasets is not None and type(held) is getattr(datasets, "Dataset", None):
            given = vars(held).get("_format_kwargs")
            if given and (kwargs := self._container(given, depth, may_keep=True)) is not given:
                made = self._note(held, object.__new__(_without_end(type(held))))
                made.__dict__.update(vars(held), _format_kwargs=kwargs)
                return made
        if sqlite is not None and type(held) is sqlite.Connection:
            self.meets_files = True
            return self._note(held, _connected_again(held)) if self._opens else held
        if sqlite is not None and type(held) is sqlite.Cursor:
            connection = self.copied(held.connection, depth + 1)
            if connection is not held.connection:
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
        """Return what a function uses. Lists and dictionaries in which it collects stay those of
        the code around it."""
        if id(held) not in self._made and type(held) in _CONTAINERS:
            return self._container(held, depth, may_keep=True)
        return self.copied(held, depth + 1)

    def _has_state(self, held: Any) -> bool:
        """True for a data set, a callable object, or one of a class of the user's own."""
        kind = type(held)
        if kind not in self._kinds:
            self._kinds[kind] = _may_be_copied(kind)
        if not self._kinds[kind]:
            return False
        asked = callable(held) or any("__getitem__" in vars(each) for each in kind.__mro__)
        if not asked and self._is_known_by_name(held):
            return False
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(held, torch.nn.Module) and not _is_step(held, torch.nn):
                return False
            if isinstance(held, torch.utils.data.Dataset):
                return True
        package = kind.__module__.partition(".")[0]
        return callable(held) or package == self._package or not _is_library(kind)

    def _is_known_by_name(self, held: Any) -> bool:
        """True for a variable of its class's module, by which others may know the object."""
        name = type(held).__module__
        if name == "__main__" or name not in sys.modules:
            return False
        if name not in self._named:
            self._named[name] = set(map(id, vars(sys.modules[name]).values()))
        return id(held) in self._named[name]


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


_FUNCTIONS: Final = (
    types.MethodType,
    types.FunctionType,
    functools.partial,
    functools._lru_cache_wrapper,
)


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


def _length_of(value: Any) -> int:
    return len(value) if type(value) in (list, dict, set, tuple) else 0


def _is_of_python(kind: type) -> bool:
    """False for a class that is written in C, with fields of its own."""
    slots = 0
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        slots += 1 if isinstance(names, str) else len(list(names))
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (slots + 2)


def _is_mark(kind: type) -> bool:
    """True for a class that has nothing but a name, and methods of Python's own protocols."""
    names = {name for each in kind.__mro__[:-1] for name in vars(each)}
    return "__getitem__" not in names and all(name.startswith("__") for name in names)


def _may_be_copied(kind: type) -> bool:
    """False for a class whose objects are made, ended or kept in a way of its own."""
    if issubclass(kind, type | types.ModuleType):
        return False
    bases = kind.__mro__[:-1]
    asked = any({"__call__", "__getitem__"} & vars(each).keys() for each in bases)
    if not asked and hasattr(kind, "__del__"):
        return False
    for each in bases:
        made = vars(each).get("__new__")
        if made is not None and not (asked and isinstance(made, staticmethod)):
            return False
    # It may have parts that are not Python's.
    if not all(each.__flags__ & _HEAP for each in bases) or not _is_of_python(kind):
        return False
    return _SHARED.isdisjoint(each.__module__.partition(".")[0] for each in bases)


def _is_step(module: Any, nn: Any) -> bool:
    """True for a transform that is a module of torch's. Models have parameters, or their own way
    to be called."""
    home = type(module).__module__
    if home.startswith("torch.") and home != nn.modules.container.__name__:
        return False
    return next(nn.Module.parameters(module), None) is None


def _without_end(kind: type) -> type:
    """Return a class without its `__del__`, which would end what the original goes on using."""
    if not hasattr(kind, "__del__"):
        return kind
    own = {"__slots__": (), "__del__": lambda _: None, "__module__": kind.__module__}
    own["__qualname__"], own["__doc__"] = kind.__qualname__, kind.__doc__
    made: type = type.__new__(type(kind), kind.__name__, (kind,), own)
    return made


def _text_again(held: Any) -> Any:
    """Return a file in memory with a place of its own."""
    if held.closed:
        return held
    if isinstance(held, io.BytesIO):
        made: Any = io.BytesIO(held.getvalue())  # They share the bytes until one is written.
    else:
        made = io.StringIO(held.getvalue(), newline="\n")
    made.seek(held.tell())
    return made


_FILES: Final[dict[type, Callable[[Any], Any]]] = {
    io.FileIO: _opened_again,
    io.BufferedReader: _opened_again,
    io.BytesIO: _text_again,
    io.StringIO: _text_again,
}


def _connected_again(held: Any) -> Any:
    """Return another connection to a file of SQLite's; the same one to any other place."""
    sqlite = sys.modules["sqlite3"]
    try:
        places = [row[2] for row in held.cursor().execute("pragma database_list")]
        if len(places) != 1 or not places[0] or held.in_transaction:
            return held
        made = sqlite.connect(
            places[0], check_same_thread=False, isolation_level=held.isolation_level
        )
    except sqlite.Error:
        return held
    made.row_factory, made.text_factory = held.row_factory, held.text_factory
    return made


def _buffers(arrays: Iterable[Any]) -> dict[int, Any]:
    """Return copies of the small ones among arrays, by id. Not of those that others refer to, or
    share memory with: another array's view, another process."""
    spans: list[tuple[int, int, Any]] = []
    torch = sys.modules.get("torch")
    for held in arrays:
        if isinstance(held, np.ndarray):
            root = held
            while type(root.base) is np.ndarray:
                root = root.base
            mine_alone = type(held) is np.ndarray and root.flags.owndata and held.flags.writeable
            small = mine_alone and root.nbytes <= _MOST_BYTES
            spans.append((root.ctypes.data, root.nbytes, held if small else None))
        elif torch is not None and held.device.type == "cpu" and held.layout is torch.strided:
            size = held.untyped_storage().nbytes()
            small = type(held) is torch.Tensor and size <= _MOST_BYTES
            small = small and not held.requires_grad and not held.is_shared()
            spans.append((held.untyped_storage().data_ptr(), size, held if small else None))
    spans.sort(key=lambda span: span[0])
    alone: list[tuple[int, Any]] = []
    ends = 0
    for begin, size, held in spans:
        if begin < ends:
            alone[-1] = size, None
        else:
            alone.append((size, held))
        ends = max(ends, begin + max(1, size))
    made: dict[int, Any] = {}
    left = _MOST_TOGETHER
    for size, held in sorted(alone, key=lambda each: each[0]):
        left -= 0 if held is None else size
        if held is not None and left >= 0:
            made[id(held)] = held.copy() if isinstance(held, np.ndarray) else held.clone()
    return made
