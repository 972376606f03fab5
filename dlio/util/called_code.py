"""Functions that a user's objects may call when they make a sample."""

import functools
import opcode
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

from dlio.util.copied_classes import is_library
from dlio.util.object_graph import reachable

_STARTS: Final = frozenset("__getitem__ __getitems__ __call__ forward __enter__ __exit__".split())
"""Methods that make samples, or are called without being named."""
_MADE: Final = frozenset("__init__ __new__ __post_init__ __iter__ __next__".split())
"""Methods of objects that are made for one sample."""
_PASSED_OVER: Final = frozenset(
    "dlio dlio_readers torch numpy pandas pyarrow datasets PIL h5py zarr transformers lightning "
    "pytorch_lightning".split()
)
"""Packages that use no state of the process, or in ways that are looked at elsewhere."""
_MOST_FUNCTIONS: Final = 2000
_DEEPEST_MODULE: Final = 4
_IMPORTS: Final = opcode.opmap["IMPORT_NAME"]
_EXTENDED: Final = opcode.opmap["EXTENDED_ARG"]
_GLOBAL: Final = opcode.opmap["LOAD_GLOBAL"]
_DATA: Final = (list, tuple, dict, set)
_HOLDING: Final = (*_DATA, functools.partial, functools._lru_cache_wrapper)


class CalledCode:
    """A walk over functions of the user's, beginning with those of an object that make samples.
    Objects in a tuple are looked at alike.

    It follows the names in functions: other functions, methods, classes and objects, of their own
    module and of others. Code of libraries is left out, but for the data set's own package.
    """

    def __init__(self, held: object) -> None:
        whose = held if isinstance(held, tuple) else (held,)
        self._packages = frozenset(package_of(type(each)) for each in whose) - _PASSED_OVER
        self.objects: list[object] = []
        """All that was met."""
        self.of_globals: set[int] = set()
        """Ids of methods of objects that are global variables."""
        self._named: dict[str, list[types.FunctionType]] = {}
        self._asked: set[str] = set(_STARTS)
        self._queue: list[types.FunctionType] = []
        self._seen: set[int] = set()
        self._kinds: set[type] = set()
        self._add(held)

    def __iter__(self) -> Iterator[types.FunctionType]:
        looked: set[int] = set()
        while self._queue and len(looked) < _MOST_FUNCTIONS:
            function = self._queue.pop()
            if id(function) in looked:
                continue
            looked.add(id(function))
            for cell in function.__closure__ or ():
                try:
                    self._add(cell.cell_contents)
                except ValueError:  # Not assigned yet.
                    continue
            self._add(function.__defaults__)
            if not self._is_own(function):
                continue
            for code in codes_of(function.__code__):
                self._follow(code, function.__globals__)
            yield function

    def names_method(self, name: str) -> bool:
        """True if a class of the user's that was met has such a method."""
        return name in self._named

    def has_of_library(self, name: str) -> bool:
        """True if an object of a library that was met has such a method."""
        kinds = {type(each) for each in self.objects} - self._kinds
        return any(hasattr(kind, name) for kind in kinds)

    def _is_own(self, held: Any) -> bool:
        """True for a class, function or module of the user's, and of the data set's package."""
        package = package_of(held)
        return package not in _PASSED_OVER and (package in self._packages or not is_library(held))

    def _add(self, held: object, is_global: bool = False) -> None:
        """Note all that an object holds: functions are called, methods if their name is."""
        if held is None or id(held) in self._seen:
            return
        for each in reachable(held, code=False):
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            self.objects.append(each)
            if isinstance(each, functools._lru_cache_wrapper):
                each = each.__wrapped__
            if isinstance(each, types.FunctionType):
                self._queue.append(each)
            elif not isinstance(each, type | types.ModuleType) and type(each) not in _DATA:
                self._add_methods(type(each), is_global and each is held)

    def _add_methods(self, kind: type, is_global: bool, is_made: bool = False) -> None:
        if kind in self._kinds and not is_global and not is_made:
            return
        for base in kind.__mro__[:-1]:
            if not self._is_own(base):
                continue
            self._kinds.add(kind)
            for name, value in list(vars(base).items()):
                if _may_hold_code(value):
                    self._add(value)
                for function in _functions_of(value):
                    self._named.setdefault(name, []).append(function)
                    if name in self._asked or (is_made and name in _MADE):
                        self._queue.append(function)
                    if is_global:
                        self.of_globals.add(id(function))

    def _follow(self, code: types.CodeType, known: dict[str, Any]) -> None:
        """Note the names in some code."""
        names = set(code.co_names)
        if "getattr" in names:
            names.update(each for each in code.co_consts if isinstance(each, str))
        for name in names - self._asked:
            self._queue += self._named.get(name, [])
        self._asked |= names
        for name, is_called in _globals_of(code).items():
            self._value(known.get(name), names, is_called)
        if _IMPORTS in code.co_code[::2]:
            for module in _imported(names, known):
                self._value(module, names, True)

    def _value(self, value: Any, names: set[str], is_called: bool, depth: int = 0) -> None:
        """Note a variable that code names, and what it names of a module or class."""
        if isinstance(value, types.ModuleType):
            if depth > _DEEPEST_MODULE or not self._is_own(value):
                return
            for inner in names & vars(value).keys():
                self._value(vars(value)[inner], names, True, depth + 1)
        elif isinstance(value, type):
            if self._is_own(value):
                self._add_class(value, names, is_called)
        elif isinstance(value, types.FunctionType | types.MethodType):
            if getattr(value, "__closure__", None) or self._is_own(value):
                self._add(value)
        elif _may_hold_code(value):
            self._add(value, is_global=True)

    def _add_class(self, kind: type, names: set[str], is_made: bool) -> None:
        if is_made:
            self._add_methods(kind, False, is_made=True)
            return
        for base in kind.__mro__[:-1]:
            for name, value in list(vars(base).items()) if self._is_own(base) else ():
                if _may_hold_code(value):
                    self._add(value)
                elif name in names:
                    self._queue += _functions_of(value)


def package_of(held: object) -> str:
    """Return the name of the package of a class, function or module."""
    is_module = isinstance(held, types.ModuleType)
    name: object = getattr(held, "__name__" if is_module else "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_of(inner)


def _imported(names: Iterable[str], known: dict[str, Any]) -> list[types.ModuleType]:
    """Return modules that code with these names may import, as far as they are in memory."""
    package = known.get("__package__") or ""
    modules = [sys.modules.get(n) or sys.modules.get(f"{package}.{n}") for n in names if n]
    return [each for each in modules if each is not None]


def _may_hold_code(value: Any) -> bool:
    """True for lists and the like, and for objects that are not those of Python's own library."""
    if isinstance(value, _HOLDING):
        return True
    is_code = isinstance(value, type | types.ModuleType | types.FunctionType)
    return not is_code and package_of(type(value)) not in sys.stdlib_module_names


def _globals_of(code: types.CodeType) -> dict[str, bool]:
    """Return the global variables that some code names, and whether it calls them."""
    called: dict[str, bool] = {}
    extended = 0
    for name, given in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        at = extended | given
        extended = at << 8 if name == _EXTENDED else 0
        if name == _GLOBAL:
            called[code.co_names[at >> 1]] = bool(at & 1) or called.get(
                code.co_names[at >> 1], False
            )
    return called


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions of an entry of a class: a method, or a property's."""
    if isinstance(value, property):
        held: list[Any] = [value.fget, value.fset]
    else:
        held = [getattr(value, name, None) for name in ("__func__", "__wrapped__", "func")]
        held.append(value)
    return [each for each in held if isinstance(each, types.FunctionType)]
