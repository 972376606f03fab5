"""Code that uses state of the whole process for each sample is found, and nothing else is."""

import functools
import mmap
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from random import seed as seeds_python
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFile
from torch import manual_seed

from dlio.util.shared_state import shared_state_of

netcdf: Any = types.ModuleType("netCDF4")
"""Not installed here: it is known by its name."""
_opened: Any = None
_CACHE: dict[int, int] = {}


def _seed_all(number: int) -> None:
    random.seed(number)


class _Joint:
    def __call__(self, value: int) -> int:
        state = random.getstate()
        random.setstate(state)
        return value


class _Rows:
    """Samples by a function of (this object, index); `held` is what else it has."""

    kept: Any = None

    def __init__(self, make: Callable[[Any, int], object], held: object = None) -> None:
        random.seed(0)  # Once, and not for each sample.
        self.make, self.held, self.seed = make, held, 3
        self.rng = random.Random(1)

    def __getitem__(self, index: int) -> object:
        return self.make(self, index)

    def shuffle(self) -> None:
        np.random.seed(0)  # noqa: NPY002


def _sets_global(_: _Rows, index: int) -> int:
    global _opened
    _opened = _opened or index
    return index


def _sets_class(rows: _Rows, index: int) -> int:
    rows.__class__.kept = index
    return index


def _sets_named_class(_: _Rows, index: int) -> int:
    _Rows.kept = index
    return index


def _sets_module(_: _Rows, index: int) -> int:
    ImageFile.LOAD_TRUNCATED_IMAGES = bool(index)
    return index


def _switches_module(_: _Rows, index: int) -> int:
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    return index


def _reads_netcdf(_: _Rows, index: int) -> Any:
    return netcdf.Dataset(f"{index}.nc")


def _imports_here(_: _Rows, index: int) -> int:
    import random as numbers

    numbers.seed(index)
    return index


def _forks(_: _Rows, index: int) -> Any:
    with torch.random.fork_rng():
        return torch.rand(index)


def _own_generator(_: _Rows, index: int) -> Any:
    generator = torch.Generator()
    generator.manual_seed(index)
    return torch.rand(1, generator=generator)


_SEEDING: dict[str, Any] = {
    "torch": _Rows(lambda _, i: torch.manual_seed(i)),
    "imported by name": _Rows(lambda _, i: manual_seed(i)),
    "by another name": _Rows(lambda _, i: seeds_python(i)),
    "numpy": _Rows(lambda _, i: np.random.seed(i)),  # noqa: NPY002
    "default generator": _Rows(lambda _, i: torch.default_generator.manual_seed(i)),
    "imported within": _Rows(_imports_here),
    "fork": _Rows(_forks),
    "own function": _Rows(lambda _, i: _seed_all(i)),
    "transform": _Rows(lambda rows, i: rows.held(i), _Joint()),
    "class that is made": _Rows(lambda _, i: _Joint()(i)),
    "partial": _Rows(lambda rows, i: rows.held(i), functools.partial(_seed_all)),
    "in a list behind others": _Rows(lambda rows, i: i, [*range(5000), {"a": (_Joint(),)}][-1:]),
    "held generator": _Rows(lambda rows, i: rows.rng.seed(i)),
}


@pytest.mark.parametrize("name", list(_SEEDING))
def test_seeds_of_shared_generators_are_found(name: str) -> None:
    state = shared_state_of((_SEEDING[name], None))
    assert state is not None
    assert state.seeds
    assert str(state).startswith("test_shared_state.py:")
    assert str(state).endswith("seeds random numbers")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_sets_global, "sets the global variable _opened"),
        (_sets_class, "sets the attribute kept of a class or module"),
        (_sets_named_class, "sets the attribute kept of a class or module"),
        (_sets_module, "sets the attribute LOAD_TRUNCATED_IMAGES of a class or module"),
        (_reads_netcdf, "uses netcdf"),
        (lambda _, i: np.random.default_rng(torch.initial_seed() + i), "asks for torch's seed"),
        (lambda _, i: os.getpid() + i, "asks for the number of its process"),
    ],
)
def test_variables_of_the_process_are_found(make: Any, text: str) -> None:
    state = shared_state_of(_Rows(make))
    assert state is not None
    assert not state.seeds
    assert text in str(state)
    assert shared_state_of(_Rows(make), only_seeds=True) is None


@pytest.mark.parametrize(
    "make",
    [
        _own_generator,
        _switches_module,
        lambda _, i: torch.rand(1, generator=torch.Generator().manual_seed(i)),
        lambda rows, i: random.Random(rows.seed + i).random(),
        lambda _, i: np.random.default_rng(i).random(),
        lambda _, i: np.random.RandomState(i).rand(),
        lambda _, i: random.random() + i,
        lambda _, i: _CACHE.setdefault(i, i),
        lambda rows, i: setattr(rows, "last", i),
    ],
)
def test_generators_of_a_samples_own_are_none(make: Any) -> None:
    assert shared_state_of(_Rows(make)) is None


def test_open_videos_that_a_data_set_holds_are_found() -> None:
    opened = type("VideoCapture", (), {"__module__": "cv2"})()
    assert str(shared_state_of(_Rows(lambda _, i: i, [opened]))) == "it holds a cv2 VideoCapture"


def test_the_place_of_a_memory_map_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with open(tmp_path / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def at_place(rows: Any, index: int) -> Any:
        rows.held.seek(index)
        return rows.held.read(1)

    assert "the place of a memory map" in str(shared_state_of(_Rows(at_place, mapped)))
    assert shared_state_of(_Rows(lambda rows, i: rows.held[i : i + 1], mapped)) is None
