"""Code that uses state of the whole process each time that it makes a sample.

A transform that is to treat a picture and its mask alike is called twice with the same seed; others
seed by the number of the sample, or keep an open file in a global variable. Threads share both:
between the seed and the draws of one come those of others, and the mask is changed otherwise than
its picture. Processes have states of their own.

Code is looked at and not run: all that a data set's, a transform's or a collate function's methods
may call, in functions and classes that are not a library's.
"""

import dis
import io
import mmap
import os
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any, Final

from dlio.util.called_code import CalledCode, codes_of, package_of
from dlio.util.copied_classes import is_library
from dlio.util.copied_files import opening_again
from dlio.util.tokenizer_calls import tokenizer_call

_SEEDS: Final = frozenset(
    "seed manual_seed setstate set_state set_rng_state fork_rng seed_everything set_seed "
    "set_random_seed set_determinism isolate_rng".split()
)
"""Functions and methods that set a generator's state."""
_GENERATORS: Final = frozenset("Generator Random RandomState default_rng".split())
"""Who calls one of these makes a generator of its own."""
_OF_WORKERS: Final = {
    "initial_seed": "asks for torch's seed",
    "getpid": "asks for the number of its process",
    "current_process": "asks for its process",
    "chdir": "changes the working folder",
    "redirect_stdout": "redirects the output",
    "redirect_stderr": "redirects the output",
    "alarm": "sets an alarm",
    "setitimer": "sets an alarm",
}
"""Functions by which workers are to differ, or that set things of which a process has one."""
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
_STORES: Final = frozenset(
    dis.opmap[name]
    for name in (
        "STORE_GLOBAL",
        "STORE_DEREF",
        "STORE_ATTR",
        "STORE_SUBSCR",
        "STORE_SLICE",
        "IMPORT_FROM",
    )
    if name in dis.opmap
)
_SHARED: Final = (type, types.ModuleType)
_SKIPPED: Final = frozenset("PRECALL PUSH_NULL CACHE EXTENDED_ARG NOP RESUME".split())
_GLOBALS: Final = frozenset("LOAD_GLOBAL LOAD_NAME".split())
_ATTRIBUTES: Final = frozenset("LOAD_METHOD LOAD_ATTR".split())


@dataclass(frozen=True, slots=True)
class SharedState:
    """A use of state of the process, and its place, as `train.py:41`."""

    where: str
    what: str
    seeds: bool
    """True for random numbers, of which threads would get each other's."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def shared_state_of(held: object, only_seeds: bool = False) -> SharedState | None:
    """Return the first use of state that threads would share, by code with which an object makes
    samples; None if there is none. Objects in a tuple are looked at alike."""
    walk = CalledCode(held)
    first: SharedState | None = None
    functions = []
    for function in walk:
        functions.append(function)
        for code in codes_of(function.__code__):
            use = _CodeLook(code, function, walk).first_use()
            if use is not None and use.seeds:
                return use
            reads = not use and not _PLACES.isdisjoint(code.co_names)
            if reads and any(type(each) is mmap.mmap for each in walk.objects):
                use = SharedState("it", "reads at the place of a memory map", seeds=False)
            first = first or use
    for each in walk.objects:
        package = package_of(type(each))
        if package in _HANDLES and _HANDLES[package] == type(each).__name__:
            first = SharedState("it", f"holds a {package} {_HANDLES[package]}", seeds=False)
        if _is_seeding(each):
            return SharedState("it", "holds a function that seeds random numbers", seeds=True)
    if only_seeds:
        return None
    if first is None and (call := tokenizer_call(functions, walk.objects)) is not None:
        place, name = call
        effect = f"has the tokenizer {name} encode, which sets how it pads and cuts"
        return SharedState(place, effect, seeds=False)
    return first


def _is_seeding(value: object) -> bool:
    """True for a function of a library that seeds, by whatever name it was imported."""
    if getattr(value, "__name__", None) not in _SEEDS or not callable(value):
        return False
    return not isinstance(value, types.FunctionType) or is_library(value)


def _is_for_one_thread(value: object) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else package_of(value)
    return name.partition(".")[0] in _ONE_THREAD


def _is_open(value: object) -> bool:
    """True for an open file, picture or database, with a place that its users share."""
    is_cursor = (type(value).__module__, type(value).__name__) == ("sqlite3", "Cursor")
    if isinstance(value, io.TextIOBase | io.BufferedWriter):
        return isinstance(value, io.TextIOWrapper) and not value.closed and value.readable()
    return is_cursor or opening_again(value) is not None


def _use_of(value: object) -> str:
    """Return the effect of a library's function on the process; "" if nothing."""
    name = getattr(value, "__name__", "")
    if name not in _OF_WORKERS or (isinstance(value, types.FunctionType) and not is_library(value)):
        return ""
    return _OF_WORKERS[name]


class _CodeLook:
    """One look at the instructions of a function, or of code in it."""

    def __init__(
        self, code: types.CodeType, function: types.FunctionType, walk: CalledCode
    ) -> None:
        self._code, self._known, self._walk = code, function.__globals__, walk
        known = self._known
        self._is_of_global = id(function) in walk.of_globals
        self._is_outer = code is function.__code__
        names = set(code.co_names)
        self._aliases = {name for name in names if _is_seeding(known.get(name))}
        self._makes_own = not _GENERATORS.isdisjoint(names)
        self._may_seed = bool(self._aliases) or not _SEEDS.isdisjoint(names)
        self._may_seed = self._may_seed or "bit_generator" in names
        self._imported: set[Any] = set()
        self._chain: list[dis.Instruction] = []
        """A variable, and the attributes that are taken of it one after another."""
        self._before: list[dis.Instruction] = []
        """The instructions so far."""
        self._is_constant = False
        """True if a constant comes before the chain."""

    def _may_be_found(self) -> bool:
        """False for code whose names and instructions cannot be a use: most, in a short time."""
        names, known = self._code.co_names, self._known
        if self._may_seed or not _OF_WORKERS.keys().isdisjoint(names):
            return True
        return not _STORES.isdisjoint(self._code.co_code[::2]) or any(
            _is_for_one_thread(known.get(name))
            or _is_open(known.get(name))
            or _use_of(known.get(name))
            for name in names
        )

    def first_use(self) -> SharedState | None:
        """Return the first use of shared state; a seed if there is one."""
        if not self._may_be_found():
            return None
        first: SharedState | None = None
        line = self._code.co_firstlineno
        for each in dis.get_instructions(self._code):
            if each.opname in _SKIPPED:
                continue
            line = each.positions.lineno if each.positions and each.positions.lineno else line
            before = self._before[-1] if self._before else None
            if before is not None and before.opname in ("IMPORT_NAME", "IMPORT_FROM"):
                self._imported.add(each.argval)
            seeds = self._may_seed and self._seeds(each)
            what = "seeds random numbers" if seeds else self._used(each)
            if each.opname not in _ATTRIBUTES:
                self._chain = []
                self._is_constant = before is not None and before.opname == "LOAD_CONST"
            self._chain.append(each)
            self._before.append(each)
            if what:
                where = f"{os.path.basename(self._code.co_filename)}:{line}"
                state = SharedState(where, what, seeds)
                if seeds:
                    return state
                first = first or state
        return first

    def _used(self, each: dis.Instruction) -> str:
        """Return the use of a global variable, an attribute of a class, or a library that is not
        for threads; "" if there is none."""
        if each.opname == "STORE_GLOBAL":
            return f"sets the global variable {each.argval}"
        if each.opname == "STORE_DEREF":
            is_kept = self._is_outer and each.argval in self._code.co_freevars
            return f"sets {each.argval} of the function around it" if is_kept else ""
        if each.opname == "IMPORT_FROM":
            return _OF_WORKERS.get(each.argval, "")
        if each.opname in _GLOBALS:
            value = self._known.get(each.argval)
            if _is_open(value):
                return f"uses the open file or database {each.argval} of a global variable"
            return f"uses {each.argval}" if _is_for_one_thread(value) else _use_of(value)
        if each.opname in ("STORE_SUBSCR", "STORE_SLICE"):
            return self._item_set()
        if not self._chain:
            return ""
        root = self._chain[0]
        if each.opname in _ATTRIBUTES and each.argval in _OF_WORKERS:
            value = self._value_of(root)
            is_module = isinstance(value, types.ModuleType) or root.argval in self._imported
            return _OF_WORKERS[each.argval] if is_module else ""
        return self._attribute_set(each, root) if each.opname == "STORE_ATTR" else ""

    def _value_of(self, root: dis.Instruction) -> Any:
        return self._known.get(root.argval) if root.opname in _GLOBALS else None

    def _attribute_set(self, each: dis.Instruction, root: dis.Instruction) -> str:
        value = self._value_of(root)
        # A module's switch that is set alike each time is for all.
        if isinstance(value, types.ModuleType) and self._is_constant:
            return ""
        names = self._code.co_varnames
        is_first = root.opname.startswith("LOAD_FAST") and names[:1] == (root.argval,)
        is_class = any(part.argval == "__class__" for part in self._chain)
        is_class = is_class or (is_first and root.argval == "cls")
        if not is_class and root.opname.startswith("CALL"):
            made = [one.argval for one in self._before[-3:-1]]
            is_class = made[:1] == ["type"] and len(self._chain) == 1
        if is_class or isinstance(value, _SHARED):
            return f"sets the attribute {each.argval} of a class or module"
        if value is not None and not isinstance(value, threading.local):
            return f"sets an attribute of the global variable {root.argval}"
        if is_first and self._is_of_global:
            return f"sets the attribute {each.argval} of an object that is a global variable"
        return ""

    def _item_set(self) -> str:
        """Return the use of a global dictionary or array of which an entry by a constant, or
        a slice, is set. Entries by variables are a cache's, which threads may share."""
        at = len(self._before) - 1
        while at >= 0 and self._before[at].opname in ("LOAD_CONST", "BUILD_SLICE"):
            at -= 1
        last = at
        while at >= 0 and self._before[at].opname in _ATTRIBUTES:
            at -= 1
        if at < 0 or last == len(self._before) - 1 or self._before[at].opname not in _GLOBALS:
            return ""
        value = self._value_of(self._before[at])
        is_constant = at > 0 and self._before[at - 1].opname == "LOAD_CONST"
        if isinstance(value, threading.local) or (isinstance(value, _SHARED) and is_constant):
            return ""
        return f"sets an entry of the global variable {self._before[at].argval}"

    def _seeds(self, each: dis.Instruction) -> bool:
        """True if the seeding method of the end of a chain of attributes is called, and that is
        not a generator that the code has made, nor an object of the user's own."""
        if each.opname == "IMPORT_FROM" and each.argval in _SEEDS:
            module = self._before[-1].argval if self._before[-1].opname == "IMPORT_NAME" else ""
            value = getattr(sys.modules.get(module), each.argval, None)
            return value is None or _is_seeding(value)
        if each.opname == "STORE_ATTR" and each.argval == "state" and self._chain:
            return bool(self._chain[-1].argval == "bit_generator")
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
            value = getattr(value, each.argval, None)
            if isinstance(value, types.FunctionType | types.MethodType):
                return _is_seeding(getattr(value, "__func__", value))
            return callable(value)
        is_own = self._walk.names_method(each.argval) and not self._walk.has_of_library(each.argval)
        if root.argval in self._imported:
            return True
        if root.opname.startswith("LOAD_FAST") and not inner:
            is_own = is_own or self._makes_own or root.argval == "self"
            return is_method and not is_own
        return is_method and not is_own and root.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
