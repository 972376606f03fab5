"""Data sets with tiers that nobody closes give back all that they hold once they are dropped."""

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.util.shared_folders import SHARED_MEMORY, user_folder
from dlio.util.threads import Workers
from tests.conftest import in_time

_SAMPLES = 48


def _open(source: Path, tiers: Path) -> dlio.Dataset:
    return dlio.open(source, tiers=f"ram:4MiB,{tiers}:8MiB")


def _only_open(source: Path, tiers: Path) -> None:
    _open(source, tiers)


def _read_one(source: Path, tiers: Path) -> None:
    _open(source, tiers)[0]


def _loader(source: Path, tiers: Path) -> None:
    dlio.DataLoader(_open(source, tiers), batch_size=4, num_workers=2)


def _iterated_partly(source: Path, tiers: Path) -> None:
    loader = dlio.DataLoader(_open(source, tiers), batch_size=4, num_workers=2)
    next(iter(loader))


def _iterated(source: Path, tiers: Path) -> None:
    loader = dlio.DataLoader(_open(source, tiers), batch_size=4, num_workers=2)
    assert len(list(loader)) == _SAMPLES // 4


def _stateful(source: Path, tiers: Path) -> None:
    loader = dlio.StatefulDataLoader(_open(source, tiers), batch_size=4, num_workers=2)
    next(iter(loader))
    loader.state_dict()


def _in_a_traceback(source: Path, tiers: Path) -> None:
    loader = dlio.DataLoader(_open(source, tiers), batch_size=4, num_workers=2)
    try:
        for _ in loader:
            raise ValueError("of the training's own")
    except ValueError as error:
        traceback.format_exception(error)


Use = Callable[[Path, Path], None]
_USES: tuple[Use, ...] = (
    _only_open, _read_one, _loader, _iterated_partly, _iterated, _stateful, _in_a_traceback,
)  # fmt: skip


def _held() -> tuple[int, set[str], set[str]]:
    """Return the descriptors of this process, its threads of dlio, and its shared folders."""
    gc.collect()
    # A thread that publishes figures of the whole process, and one for each RAM tier that waits for
    # the start of the process that removes it.
    once = ("dlio-live", "dlio-reaper-start")
    threads = {each.name for each in threading.enumerate() if each.name.startswith("dlio")}
    folders = os.path.join(SHARED_MEMORY, user_folder())
    with_tiers = set(os.listdir(folders)) if os.path.isdir(folders) else set()
    return len(os.listdir("/proc/self/fd")), threads - set(once), with_tiers - {"sweep"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    # A data set of its own: other processes may use tiers of other ones.
    values = np.random.default_rng().random((_SAMPLES, 500), np.float32)
    np.save(tmp_path / "values.npy", values)
    return tmp_path / "values.npy"


def _drop(use: Use, times: int, source: Path, tiers: Path) -> None:
    tiers.mkdir()
    use(source, tiers)  # The first use starts threads that last as long as the process.
    assert in_time(lambda: not _held()[1])
    descriptors, _, folders = _held()
    for _ in range(times):
        use(source, tiers)
    # Threads end after their last request, a folder is removed by a process of its own.
    assert in_time(lambda: not _held()[1]), _held()
    assert _held()[0] <= descriptors
    assert in_time(lambda: not _held()[2] - folders), _held()


@pytest.mark.parametrize("use", [_iterated_partly, _in_a_traceback])
def test_a_dropped_data_set_holds_nothing(use: Use, source: Path, tmp_path: Path) -> None:
    _drop(use, 4, source, tmp_path / "tiers")


class _Ordinary(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class _WithState(_Ordinary):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def _rows(folder: Path) -> object:
    with h5py.File(folder / "rows.h5", "w") as file:
        file["values"] = np.zeros((_SAMPLES, 8), np.float32)
    return dlio.open(f"{folder}/rows.h5::values")


def _pictures(folder: Path, tiers: str | None = None) -> object:
    rng = np.random.default_rng(0)
    for number in range(8):
        (folder / "pictures" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
        picture.save(folder / f"pictures/{number % 2}/{number}.jpg")
    return dlio.open(folder / "pictures", image_size=16, tiers=tiers)


_KINDS: dict[str, Callable[[Path], object]] = {
    "rows": _rows,
    "rows in a tier": lambda folder: _open(_made(folder), folder / "tiers"),
    "pictures": _pictures,
    "pictures in a tier": lambda folder: _pictures(folder, "ram:4MiB"),
    "torch": lambda _: _Ordinary(),
    "torch, each thread its copy": lambda _: _WithState(),
}


def _made(folder: Path) -> Path:
    (folder / "tiers").mkdir(exist_ok=True)
    np.save(folder / "values.npy", np.random.default_rng().random((_SAMPLES, 500), np.float32))
    return folder / "values.npy"


@pytest.mark.parametrize("loaders", [dlio.DataLoader, dlio.StatefulDataLoader])
@pytest.mark.parametrize("kind", _KINDS)
def test_all_that_is_dropped_in_a_pass_goes_before_python_looks_for_cycles(
    kind: str, loaders: Callable[..., Any], tmp_path: Path
) -> None:
    def use() -> weakref.ref[object]:
        data = _KINDS[kind](tmp_path)
        loader = loaders(data, batch_size=2, num_workers=2)
        batches = iter(loader)
        next(batches)
        for _ in loader:
            break
        return weakref.ref(data)

    def groups() -> int:
        return sum(isinstance(each, Workers) and bool(each.alive()) for each in gc.get_objects())

    use()  # The first use starts threads that last as long as the process.
    gc.collect()
    assert in_time(lambda: not _held()[1])
    lasting, descriptors = groups(), _held()[0]
    gc.disable()
    try:
        dropped = [use() for _ in range(3)]
        assert in_time(lambda: not any(each() is not None for each in dropped))
        assert in_time(lambda: groups() <= lasting), [t.name for t in threading.enumerate()]
        assert in_time(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    finally:
        gc.enable()


@pytest.mark.nightly
@pytest.mark.parametrize("use", _USES)
def test_two_hundred_dropped_data_sets_hold_nothing(use: Use, source: Path, tmp_path: Path) -> None:
    _drop(use, 200, source, tmp_path / "tiers")
