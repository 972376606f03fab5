"""Data sets that keep a sample's state in themselves have their own samples in threads, as in
torch's worker processes."""

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

import dlio

COUNT, ROW = 240, 64
# Files that data sets leave open, as users' do.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Met(threading.Barrier):
    """Two threads are in the middle of a sample at a time: each waits for the other."""

    def meet(self) -> None:
        try:
            self.wait(0.5)
        except threading.BrokenBarrierError:
            self.reset()  # The other one has ended.


class Rows(Dataset[tuple[int, int]]):
    """Base of data sets of rows, each of which is full of its number."""

    def __init__(self, path: str) -> None:
        self.path, self.met = path, Met(2)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.row(index), index

    def row(self, index: int) -> int:
        raise NotImplementedError


class OpenedLate(Rows):
    file: Any = None

    def row(self, index: int) -> int:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - as users do
        self.file.seek(index * ROW)
        self.met.meet()
        return int(np.frombuffer(self.file.read(ROW), np.int32)[-1])


class OpenedFirst(OpenedLate):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file = open(path, "rb")  # noqa: SIM115 - as users do


class Buffered(Rows):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.rows = np.memmap(path, np.int32, "r").reshape(COUNT, -1)
        self.buffer = np.zeros(self.rows.shape[1], np.int32)

    def row(self, index: int) -> int:
        self.buffer[:] = self.rows[index]
        self.met.meet()
        return int(self.buffer[-1])


class Current(Rows):
    def row(self, index: int) -> int:
        self.current = index
        self.met.meet()
        return self.current


class Database(Rows):
    connection: Any = None

    def row(self, index: int) -> int:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path + ".db")
        (value,) = self.connection.execute("select v from t where v = ?", (index,)).fetchone()
        return int(value)


class Step:
    """A transform that keeps its last value, as many do."""

    def __init__(self, met: Met) -> None:
        self.met = met

    def __call__(self, value: Any) -> Any:
        self.value = value
        self.met.meet()
        return self.value


class Transformed(Rows):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.steps = [Step(self.met)]

    def row(self, index: int) -> int:
        for step in self.steps:
            index = step(index)
        return index


class Together(Rows):
    def row(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        self.wanted = indices
        self.met.meet()
        return [(index, index) for index in self.wanted]


KINDS = (OpenedLate, OpenedFirst, Buffered, Current, Database, Transformed, Together)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = str(tmp_path / "rows")
    np.repeat(np.arange(COUNT, dtype=np.int32), ROW // 4).tofile(path)
    with sqlite3.connect(path + ".db") as database:
        database.execute("create table t (v integer)")
        database.executemany("insert into t values (?)", [(k,) for k in range(COUNT)])
    database.close()
    return path


def _wrapped(data: Rows) -> Dataset[Any]:
    half = COUNT // 2
    return ConcatDataset([Subset(data, range(half)), Subset(data, range(half, COUNT))])


@pytest.mark.parametrize("wrap", [lambda data: data, _wrapped], ids=["itself", "within others"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_take_each_others_samples(
    kind: type[Rows], wrap: Callable[[Rows], Any], rows: str
) -> None:
    seen: list[int] = []
    for value, index in dlio.DataLoader(wrap(kind(rows)), 6, num_workers=2, shuffle=True):
        assert torch.equal(value, index)
        seen += index.tolist()
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("kind", [OpenedLate, Buffered, Current, Transformed])
def test_samples_that_tiers_keep_are_their_own(kind: type[Rows], rows: str) -> None:
    with dlio.DataLoader(kind(rows), 6, num_workers=2, tiers="ram:8MiB", seed=0) as loader:
        for value, index in loader:
            assert torch.equal(value, index)


def test_a_transform_of_pictures_has_its_own_state(pictures: Path) -> None:
    met = Met(2)
    step = Step(met)
    options: dict[str, Any] = {"image_size": 16, "train": False, "seed": 0}
    with dlio.open(str(pictures), **options) as plain:
        wanted = [plain[k][0] for k in range(len(plain))]
    with dlio.open(str(pictures), transform=step, **options) as data:
        loader = dlio.DataLoader(data, 2, num_workers=2)
        made = torch.cat([batch[0] for batch in loader])
        loader.close()
    assert torch.equal(made, torch.stack(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_stateful_loaders_do_not_take_each_others_samples(kind: type[Rows], rows: str) -> None:
    loader = dlio.StatefulDataLoader(kind(rows), 6, num_workers=2)
    for value, index in loader:
        assert torch.equal(value, index)


class Collate:
    """Keeps the batch that it makes."""

    def __init__(self, met: Met) -> None:
        self.met = met

    def __call__(self, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.samples = samples
        self.met.meet()
        return self.samples


@pytest.mark.parametrize("kind", [dlio.DataLoader, dlio.StatefulDataLoader])
def test_threads_do_not_collate_each_others_samples(kind: Any) -> None:
    data = TensorDataset(torch.arange(COUNT), torch.arange(COUNT))
    loader = kind(data, 6, num_workers=2, collate_fn=Collate(Met(2)))
    assert [int(sample[1]) for batch in loader for sample in batch] == list(range(COUNT))


class Collecting(Current):
    def collate(self, samples: list[tuple[int, int]]) -> tuple[int, int]:
        return self.current, samples[-1][1]


@pytest.mark.parametrize("kind", [dlio.DataLoader, dlio.StatefulDataLoader])
def test_a_collate_function_of_the_data_set_is_of_the_same_copy(kind: Any, rows: str) -> None:
    data = Collecting(rows)
    for value, index in kind(data, 1, num_workers=2, collate_fn=data.collate):
        assert value == index


class Informed(Rows):
    own: int | None = None

    def row(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        assert self.own == info.id
        self.met.meet()
        return index


def test_worker_init_fn_has_the_data_set_of_its_thread(rows: str) -> None:
    def prepare(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        own: Any = info.dataset
        own.own = number

    data = Informed(rows)
    loader = dlio.DataLoader(data, 6, num_workers=2, worker_init_fn=prepare, workers="thread")
    assert sum(len(index) for _, index in loader) == COUNT
    assert data.own is None


class Counting(Rows):
    passes = 0

    def row(self, index: int) -> int:
        self.passes += 1
        return self.passes


@pytest.mark.parametrize("persistent", [False, True])
def test_what_threads_keep_lasts_as_long_as_in_processes(rows: str, persistent: bool) -> None:
    """One worker, which counts: anew in each pass, or on."""
    data = Counting(rows)
    kinds: dict[str, list[int]] = {}
    for kind in ("thread", "process"):
        options: dict[str, Any] = {"workers": kind, "persistent_workers": persistent}
        loader = dlio.DataLoader(data, COUNT, num_workers=1, **options)
        kinds[kind] = [int(value.max()) for _ in range(2) for value, _ in loader]
        loader.close()
    assert kinds["thread"] == kinds["process"] == [COUNT, 2 * COUNT if persistent else COUNT]
    assert data.passes == 0
