"""Rules for the classes of a user's objects: which are copied for each thread, and how."""

import sys
import sysconfig
import types
from typing import Final

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
_HEAP: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes that Python code defines."""


def is_library(held: type | types.FunctionType | types.ModuleType) -> bool:
    """True for an installed package's, or Python's own, module, and for a class or function in
    one."""
    name = held.__name__ if isinstance(held, types.ModuleType) else held.__module__
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or file.startswith(_HOMES)


def attributes_of(held: object) -> dict[str, object]:
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


def class_attributes_of(kind: type) -> dict[str, object]:
    """Return attributes of a user's own classes that all their objects share, but for methods."""
    held: dict[str, object] = {}
    for each in reversed(kind.__mro__[:-1]):
        if not is_library(each):
            held.update((n, v) for n, v in vars(each).items() if not n.startswith("__"))
    return {
        name: value
        for name, value in held.items()
        if not isinstance(value, type) and not hasattr(type(value), "__get__")
    }


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _is_of_python(kind: type) -> bool:
    """False for a class that is written in C, with fields of its own."""
    slots = 0
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        slots += 1 if isinstance(names, str) else len(list(names))
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (slots + 2)


def is_mark(kind: type) -> bool:
    """True for a class that has nothing but a name, and methods of Python's own protocols."""
    names = {name for each in kind.__mro__[:-1] for name in vars(each)}
    return "__getitem__" not in names and all(name.startswith("__") for name in names)


def may_be_copied(kind: type) -> bool:
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


def may_be_built(kind: type, base: type) -> bool:
    """True for a class of a user's own upon a list or dictionary."""
    own = kind.__mro__[: kind.__mro__.index(base)]
    return not is_library(kind) and not any(
        {"__new__", "__del__"} & vars(each).keys() or not each.__flags__ & _HEAP for each in own
    )


def is_step(module: object, nn: types.ModuleType) -> bool:
    """True for a transform that is a module of torch's. Models have parameters, or their own way
    to be called."""
    home = type(module).__module__
    if home.startswith("torch.") and home != nn.modules.container.__name__:
        return False
    return next(iter(nn.Module.parameters(module)), None) is None


def without_end(kind: type) -> type:
    """Return a class without its `__del__`, which would end parts of the original."""
    if not hasattr(kind, "__del__"):
        return kind
    own = {"__slots__": (), "__del__": lambda _: None, "__module__": kind.__module__}
    own["__qualname__"], own["__doc__"] = kind.__qualname__, kind.__doc__
    made: type = type.__new__(type(kind), kind.__name__, (kind,), own)
    return made
