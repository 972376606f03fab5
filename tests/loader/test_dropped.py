"""Data sets with tiers that nobody closes give back all that they hold once they are dropped."""

import gc
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.util.shared_folders import SHARED_MEMORY, user_folder
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


@pytest.mark.nightly
@pytest.mark.parametrize("use", _USES)
def test_two_hundred_dropped_data_sets_hold_nothing(use: Use, source: Path, tmp_path: Path) -> None:
    _drop(use, 200, source, tmp_path / "tiers")
