"""Code that uses state of the whole process each time that it makes a sample.

A transform that is to treat a picture and its mask alike is called twice with the same seed; others
seed by the number of the sample, or keep an open file in a global variable. Threads share both:
between the seed and the draws of one come those of others, and the mask is changed otherwise than
its picture. Processes have states of their own.

Code is looked at and not run: what a data set's, a transform's or a collate function's methods may
call, in functions and classes that are not a library's.
"""

import dis
import mmap
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dlio.util.copied_classes import is_library
from dlio.util.object_graph import reachable

_SEEDS: Final = frozenset(
    "seed manual_seed setstate set_state set_rng_state fork_rng seed_everything set_seed "
    "set_random_seed set_determinism isolate_rng".split()
)
"""Functions and methods that set a generator's state."""
_GENERATORS: Final = frozenset("Generator Random RandomState default_rng".split())
"""Who calls one of these makes a generator of its own."""
_STARTS: Final = frozenset("__getitem__ __getitems__ __call__ forward".split())
"""Methods that make samples."""
_PASSED_OVER: Final = frozenset(
    "dlio dlio_readers torch numpy pandas pyarrow datasets PIL h5py zarr".split()
)
"""Packages that use no such state, or in ways that are looked at elsewhere."""
_OF_WORKERS: Final = {
    "initial_seed": "asks for torch's seed",
    "getpid": "asks for the number of its process",
    "current_process": "asks for its process",
}
"""Functions that give numbers by which workers are to differ."""
_ONE_THREAD: Final = frozenset(("netCDF4", "tables"))
"""Packages that one thread of a process may call at a time."""
_HANDLES: Final = {
    "cv2": "VideoCapture",
    "decord": "VideoReader",
    "av": "InputContainer",
    "rasterio": "DatasetReader",
    "osgeo": "Dataset",
    "netCDF4": "Dataset",
    "tables": "File",
}
"""Open files of packages, with a place or a state of their own that is not Python's."""
_PLACES: Final = frozenset(("read", "readline", "read_byte"))
"""Methods of a memory map that go on from its place."""
_MOST_FUNCTIONS: Final = 2000
_SHARED: Final = (type, types.ModuleType)
_SKIPPED: Final = frozenset("PRECALL PUSH_NULL CACHE EXTENDED_ARG NOP RESUME".split())
_GLOBALS: Final = frozenset("LOAD_GLOBAL LOAD_NAME".split())
_ATTRIBUTES: Final = frozenset("LOAD_METHOD LOAD_ATTR".split())


@dataclass(frozen=True, slots=True)
class SharedState:
    """What code does to state of the process, and where, as `train.py:41`."""

    where: str
    what: str
    seeds: bool
    """True for random numbers, of which threads would get each other's."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def shared_state_of(held: object, only_seeds: bool = False) -> SharedState | None:
    """Return the first use of state that threads would share, by code with which an object makes
    samples; None if nothing is found. Objects in a tuple are looked at alike."""
    named: dict[str, list[types.FunctionType]] = {}
    queue: list[types.FunctionType] = []
    whose = held if isinstance(held, tuple) else (held,)
    packages = frozenset(_package_of(type(each)) for each in whose) - _PASSED_OVER
    first: SharedState | None = None
    has_map = False
    for each in reachable(held):
        has_map = has_map or type(each) is mmap.mmap
        package = _package_of(type(each))
        if package in _HANDLES and _HANDLES[package] == type(each).__name__:
            first = SharedState("it", f"holds a {package} {_HANDLES[package]}", seeds=False)
        if isinstance(each, types.FunctionType) and _is_own(each, packages):
            if _is_method(each):
                named.setdefault(each.__name__, []).append(each)
            else:
                queue.append(each)
    queue += [each for name in _STARTS for each in named.get(name, [])]
    seen: set[int] = set()
    while queue and len(seen) < _MOST_FUNCTIONS:
        function = queue.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for code in _codes(function.__code__):
            found = _CodeLook(code, function.__globals__).found()
            if found is not None and found.seeds:
                return found
            if has_map and not found and not _PLACES.isdisjoint(code.co_names):
                found = SharedState("it", "reads at the place of a memory map", seeds=False)
            first = first or found
            for name in code.co_names:
                queue += named.get(name, [])
            called = _called(code.co_names, function.__globals__)
            queue += [each for each in called if _is_own(each, packages)]
    return None if only_seeds else first


def _is_method(function: types.FunctionType) -> bool:
    return "." in function.__qualname__.rpartition("<locals>.")[2]


def _package_of(kind: Any) -> str:
    name: object = getattr(kind, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_own(function: Any, packages: frozenset[str]) -> bool:
    """True for the user's code, and for that of the package of the data set's class."""
    package = _package_of(function)
    if package in _PASSED_OVER:
        return False
    return package in packages or not is_library(function)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _called(names: Iterable[str], known: dict[str, Any]) -> list[types.FunctionType]:
    """Return functions that code may call: global ones, those of modules, and methods of
    classes, but for what happens once when an object is made."""
    names = set(names)
    found: list[Any] = []
    for value in map(known.get, names):
        if isinstance(value, types.ModuleType):
            found += [vars(value).get(name) for name in names]
        elif isinstance(value, type):
            found += [vars(value).get(name) for name in {*names, *_STARTS}]
        else:
            found.append(value)
    return [each for each in found if isinstance(each, types.FunctionType)]


def _is_seeding(value: object) -> bool:
    """True for a function of a library that seeds, by whatever name it was imported."""
    if getattr(value, "__name__", None) not in _SEEDS or not callable(value):
        return False
    return not isinstance(value, types.FunctionType) or is_library(value)


def _is_for_one_thread(value: object) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else _package_of(value)
    return name.partition(".")[0] in _ONE_THREAD


class _CodeLook:
    """One look at the instructions of some code; `known` are its global variables."""

    def __init__(self, code: types.CodeType, known: dict[str, Any]) -> None:
        self._code, self._known = code, known
        names = set(code.co_names)
        self._aliases = {name for name in names if _is_seeding(known.get(name))}
        self._makes_own = not _GENERATORS.isdisjoint(names)
        self._may_seed = bool(self._aliases) or not _SEEDS.isdisjoint(names)
        self._imported: set[Any] = set()
        self._chain: list[dis.Instruction] = []
        """A variable, and the attributes that are taken of it one after another."""
        self._is_constant = False
        """True if what comes before the chain is a constant."""

    def _may_be_found(self) -> bool:
        """False for code whose names and instructions cannot be a use: most, in a short time."""
        names, known = self._code.co_names, self._known
        if self._may_seed or not _OF_WORKERS.keys().isdisjoint(names):
            return True
        instructions = set(self._code.co_code[::2])
        values = [known.get(name) for name in names]
        return (
            dis.opmap["STORE_GLOBAL"] in instructions
            or any(map(_is_for_one_thread, values))
            or (
                dis.opmap["STORE_ATTR"] in instructions
                and ("__class__" in names or any(isinstance(v, _SHARED) for v in values))
            )
        )

    def found(self) -> SharedState | None:
        """Return the first use of shared state; a seed if there is one."""
        if not self._may_be_found():
            return None
        first: SharedState | None = None
        line = self._code.co_firstlineno
        before: dis.Instruction | None = None
        for each in dis.get_instructions(self._code):
            if each.opname in _SKIPPED:
                continue
            line = each.positions.lineno if each.positions and each.positions.lineno else line
            if before is not None and before.opname in ("IMPORT_NAME", "IMPORT_FROM"):
                self._imported.add(each.argval)
            seeds = self._may_seed and self._seeds(each)
            what = "seeds random numbers" if seeds else self._used(each)
            if each.opname not in _ATTRIBUTES:
                self._chain = []
                self._is_constant = before is not None and before.opname == "LOAD_CONST"
            self._chain.append(each)
            if what:
                where = f"{os.path.basename(self._code.co_filename)}:{line}"
                state = SharedState(where, what, seeds)
                if seeds:
                    return state
                first = first or state
            before = each
        return first

    def _used(self, each: dis.Instruction) -> str:
        """Return what is done to a global variable or an attribute of a class, or to a library that
        is not for threads; "" if nothing."""
        if each.argval in _OF_WORKERS and each.opname in (*_GLOBALS, *_ATTRIBUTES):
            return _OF_WORKERS[each.argval]
        if each.opname == "STORE_GLOBAL":
            return f"sets the global variable {each.argval}"
        if each.opname in _GLOBALS:
            value = self._known.get(each.argval)
            return f"uses {each.argval}" if _is_for_one_thread(value) else ""
        if not self._chain:
            return ""
        root = self._chain[0]
        value = self._known.get(root.argval) if root.opname in _GLOBALS else None
        if each.opname == "STORE_ATTR":
            is_class = any(part.argval == "__class__" for part in self._chain)
            # A module's setting that is the same each time is for all.
            is_setting = isinstance(value, types.ModuleType) and self._is_constant
            if is_class or (isinstance(value, _SHARED) and not is_setting):
                return f"sets the attribute {each.argval} of a class or module"
        return ""

    def _seeds(self, each: dis.Instruction) -> bool:
        """True if the seeding method of what a chain of attributes leads to is called, and that is
        not a generator that the code has made."""
        if each.opname not in _ATTRIBUTES:
            return each.opname in _GLOBALS and each.argval in self._aliases
        if each.argval not in _SEEDS or not self._chain:
            return False
        root, inner = self._chain[0], self._chain[1:]
        is_method = each.opname == "LOAD_METHOD" or bool(
            sys.version_info >= (3, 12) and (each.arg or 0) & 1
        )
        if root.opname in _GLOBALS:
            value = self._known.get(root.argval)
            for part in inner:
                if not isinstance(value, types.ModuleType):
                    return is_method
                value = getattr(value, part.argval, None)
            return callable(getattr(value, each.argval, None))
        if root.opname.startswith("LOAD_FAST") and not inner:
            is_local = is_method and root.argval != "self" and not self._makes_own
            return root.argval in self._imported or is_local
        return is_method and root.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
