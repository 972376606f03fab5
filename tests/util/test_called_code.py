"""Code that a data set reaches through modules, classes and global variables is looked at."""

import contextlib
import functools
import io
import os
import random
import signal
import sqlite3
import sys
import threading
import types
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split

import tests.util.seeding_code
from dlio.util.shared_state import shared_state_of
from tests.util import seeding_code
from tests.util.seeding_code import (
    BY_NAME,
    Decorating,
    Flip,
    Helpers,
    InContext,
    MadeFromSeed,
    alike,
    flip,
    jitter,
    remembered,
    seed_three,
    seeded,
)

_opened: Any = None
_seed_by_alias = random.seed
_steps = torch.nn.Sequential(torch.nn.Identity())
_settings: dict[str, float] = {}
_buffer = np.zeros(4)
_space = types.SimpleNamespace()
_local = threading.local()
_counts: dict[Any, int] = {}


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, make: Callable[[Any, int], object], **held: object) -> None:
        self.make = make
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> object:
        return self.make(self, index)


class _Step(torch.nn.Module):
    def forward(self, value: object) -> object:
        torch.manual_seed(1)
        return value


class _ByStatic(_Rows):
    @staticmethod
    def before(index: int) -> None:
        random.seed(index)

    @property
    def drawn(self) -> float:
        random.seed(1)
        return random.random()

    @classmethod
    def of_class(cls, index: int) -> None:
        random.seed(index)

    @functools.cached_property
    def kept(self) -> float:
        random.seed(1)
        return random.random()

    @alike
    def decorated(self, index: int) -> int:
        return index


class _OfClass(_Rows):
    transform = Flip()


class _Slots:
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = _Step()

    def __getitem__(self, index: int) -> Any:
        return self.step(index)


class _OwnList(list[int]):
    def __getitem__(self, index: Any) -> Any:
        random.seed(index)
        return list.__getitem__(self, index)


def _in_context(_: object, index: int) -> float:
    with InContext(index):
        return random.random()


def _in_function_context(_: object, index: int) -> float:
    with seeding_code.seeded(index):
        return random.random()


@Decorating(1)
def _decorated(_: object, index: int) -> float:
    return random.random() + index


def _imports_function(_: object, index: int) -> None:
    from tests.util.seeding_code import seed_all

    seed_all(index)


def _imports_seed(_: object, index: int) -> None:
    from random import seed

    seed(index)


def _imports_module(_: object, index: int) -> None:
    import tests.util.seeding_code as helpers

    helpers.seed_all(index)


def _closing_over() -> Callable[[Any, int], object]:
    seed = torch.manual_seed
    return lambda _, i: seed(i)


def _seeds_by_default(_: object, index: int, seed: Callable[[int], None] = random.seed) -> None:
    seed(index)


def _restores_numpy(rows: Any, _: int) -> float:
    rows.rng.bit_generator.state = rows.state
    return float(rows.rng.random())


def _deep() -> Any:
    data = _Rows(lambda rows, i: rows.step(i), step=torch.nn.Sequential(_Step()))
    return random_split(ConcatDataset([Subset(ConcatDataset([data]), range(8))]), [4, 4])[0]


_pair = namedtuple("_pair", "step other")
_ANNOTATIONS = [{key: [[1], [2]] for key in "abcdefghijkl"} for _ in range(500)]
_SEEDING: dict[str, Any] = {
    "module in packages": _Rows(lambda _, i: tests.util.seeding_code.seed_all(i)),
    "context": _Rows(_in_context),
    "context of a function": _Rows(_in_function_context),
    "context by name": _Rows(lambda _, i: seeded(i).__enter__()),
    "decorator": _Rows(_decorated),
    "decorated": _Rows(lambda _, i: jitter(i)),
    "decorated method": _ByStatic(lambda rows, i: rows.decorated(i)),
    "object that is made": _Rows(lambda _, i: MadeFromSeed(i).draw()),
    "class of a module": _Rows(lambda _, i: seeding_code.MadeFromSeed(i).draw()),
    "inherited": _Rows(lambda _, i: Flip()(i)),
    "global object": _Rows(lambda _, i: flip(i)),
    "object of a module": _Rows(lambda _, i: seeding_code.flip(i)),
    "global dictionary": _Rows(lambda _, i: BY_NAME["flip"](i)),
    "global steps": _Rows(lambda _, i: _steps(i)),
    "global partial": _Rows(lambda _, i: seed_three()),
    "remembered": _Rows(lambda _, i: remembered(i)),
    "static method": _ByStatic(lambda rows, i: rows.before(i)),
    "class method": _ByStatic(lambda rows, i: rows.of_class(i)),
    "property": _ByStatic(lambda rows, i: rows.drawn),
    "kept property": _ByStatic(lambda rows, i: rows.kept),
    "method by its name": _ByStatic(lambda rows, i: getattr(rows, "before")(i)),  # noqa: B009
    "static method of a class": _Rows(lambda _, i: Helpers.seed_here(i)),
    "class method of a class": _Rows(lambda _, i: Helpers.seed_class(i)),
    "attribute of the class": _OfClass(lambda rows, i: rows.transform(i)),
    "function imported within": _Rows(_imports_function),
    "seed imported within": _Rows(_imports_seed),
    "module imported within": _Rows(_imports_module),
    "held function": _Rows(lambda rows, i: rows.held(i), held=random.seed),
    "held functions": _Rows(lambda rows, i: rows.held[1](i), held=[int, torch.manual_seed]),
    "default": _Rows(_seeds_by_default),
    "alias": _Rows(lambda _, i: _seed_by_alias(i)),
    "closed over": _Rows(_closing_over()),
    "state of numpy's": _Rows(_restores_numpy, rng=np.random.default_rng(0), state=None),
    "deep": _deep(),
    "behind annotations": _Rows(lambda rows, i: rows.z(i), a=_ANNOTATIONS, z=[[_Step()]]),
    "slots": _Slots(),
    "list of one's own": _OwnList([1, 2]),
    "queue": _Rows(lambda rows, i: rows.held[0](i), held=deque([_Step()])),
    "named tuple": _Rows(lambda rows, i: rows.held.step(i), held=_pair(_Step(), 1)),
}


@pytest.mark.parametrize("name", list(_SEEDING))
def test_code_that_seeds_is_found_wherever_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_steps, "_modules", {"0": _Step()})
    state = shared_state_of((_SEEDING[name], None))
    assert state is not None
    assert state.seeds


class _Reader:
    """Keeps the last one that was asked for."""

    last = 0

    def get(self, index: int) -> int:
        self.last = index
        return self.last

    @classmethod
    def keep(cls, index: int) -> None:
        cls.last = index


_reader = _Reader()


class _Typed(_Rows):
    now = 0

    def __getitem__(self, index: int) -> object:
        type(self).now = index
        return self.now


def _counting() -> Callable[[Any, int], object]:
    at = 0

    def keep(_: object, index: int) -> int:
        nonlocal at
        at = index
        return at

    return keep


def _sets_entry(_: object, index: int) -> float:
    _settings["flip"] = random.random()
    return _settings["flip"] + index


def _sets_buffer(_: object, index: int) -> Any:
    _buffer[:] = index
    return _buffer.copy()


def _sets_space(_: object, index: int) -> Any:
    _space.now = index
    return _space.now


def _sets_environment(_: object, index: int) -> str:
    os.environ["NOW"] = str(index)
    return os.environ["NOW"]


def _is_quiet(_: object, index: int) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return index


def test_an_open_file_of_a_global_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    database = sqlite3.connect(":memory:")
    for opened in (io.BytesIO(b"a"), database, database.cursor()):
        monkeypatch.setattr(sys.modules[__name__], "_opened", opened)
        state = str(shared_state_of(_Rows(lambda _, i: (_opened, i))))
        assert "uses the open file or database _opened of a global variable" in state
    database.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (_Typed(lambda *_: 0), "sets the attribute now of a class"),
        (_Rows(lambda _, i: _Reader.keep(i)), "sets the attribute last of a class"),
        (_Rows(lambda _, i: _reader.get(i)), "sets the attribute last of an object that is a"),
        (_Rows(_counting()), "sets at of the function around it"),
        (_Rows(_sets_entry), "sets an entry of the global variable _settings"),
        (_Rows(_sets_buffer), "sets an entry of the global variable _buffer"),
        (_Rows(_sets_space), "sets an attribute of the global variable _space"),
        (_Rows(_sets_environment), "sets an entry of the global variable os"),
        (_Rows(_is_quiet), "redirects the output"),
        (_Rows(lambda _, i: os.chdir(str(i))), "changes the working folder"),
        (_Rows(lambda _, i: signal.alarm(i)), "sets an alarm"),
    ],
)
def test_state_behind_global_variables_is_found(data: object, text: str) -> None:
    state = shared_state_of(data)
    assert state is not None
    assert not state.seeds
    assert text in str(state)


class _Tree:
    def seed(self, index: int) -> int:
        return index


class _AtFirst(_Rows):
    """Seeds when it is made, and between epochs."""

    names = "a", "b"
    initial_seed = 3

    def __init__(self, make: Callable[[Any, int], object], **held: object) -> None:
        super().__init__(make, **held)
        seeding_code.seed_all(0)
        self._prepare()

    def _prepare(self) -> None:
        random.seed(0)

    def set_epoch(self, epoch: int) -> None:
        random.seed(epoch)


def _sets_of_thread(_: object, index: int) -> int:
    _local.now = index
    return index


def _counts_up(_: object, index: int) -> int:
    _counts[index] = index
    _counts["all"] += 1
    return index


def _switches_environment(_: object, index: int) -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return index


@pytest.mark.parametrize(
    "data",
    [
        _AtFirst(lambda _, i: i),
        _AtFirst(lambda _, i: (_AtFirst.names[0], isinstance(i, _AtFirst))),
        _AtFirst(lambda rows, i: rows.initial_seed + i),
        _Rows(lambda rows, i: rows.tree.seed(i), tree=_Tree()),
        _Rows(lambda rows, i: [tree.seed(i) for tree in rows.trees], trees=[_Tree()]),
        _Rows(lambda _, i: seeding_code.harmless(i)),
        _Rows(_sets_of_thread),
        _Rows(_counts_up),
        _Rows(_switches_environment),
        _Rows(lambda rows, i: rows.reader.get(i), reader=_Reader()),
    ],
)
def test_code_that_threads_may_share_is_not(data: object) -> None:
    assert shared_state_of(data) is None
