"""Each loader gives each sample of a format once, with the bytes that were generated."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.comm.single import SingleCommunicator
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio_bench.storage_cases.generate import GeneratedData, generate
from dlio_bench.storage_cases.generate.content import payload
from dlio_bench.storage_cases.rank_loaders import (
    FactoryLoader,
    LoaderShare,
    RankLoader,
    StorageDlioLoader,
    TorchLoader,
    digest,
)
from dlio_bench.storage_cases.storage_job import Digests, Runner, StorageRankEpoch
from dlio_bench.storage_cases.utilisation import Accelerator
from dlio_bench.storage_cases.workload import FORMATS, Format, Workload

_VARYING: tuple[Format, ...] = ("folder", "npz", "tar", "parquet", "tfrecord", "native")


def _data(folder: Path, format_: Format, per_file: int = 1, stdev: float = 0.0) -> GeneratedData:
    workload = Workload("t", format_, 12 // per_file, per_file, 3000.0, stdev, 3, 0.0, workers=2)
    return generate(workload, str(folder / "data"))


def _digests(data: GeneratedData) -> Digests:
    workload = data.workload
    sizes = data.sizes.tolist()
    made = [digest(workload, payload(workload, k, size)) for k, size in enumerate(sizes)]
    return np.array(made, np.int64)


def _epochs(
    data: GeneratedData, make: Callable[[LoaderShare], RankLoader], count: int = 2
) -> list[StorageRankEpoch]:
    place = LoaderShare(data, 0, 1, "ram:4MiB")
    runner = Runner(SingleCommunicator(), place, _digests(data), True, "keep", data.files)
    loader = make(place)
    try:
        return [runner.epoch(loader, Accelerator(0.0, 0.0, 0), k, "it") for k in range(count)]
    finally:
        loader.close()


@pytest.mark.parametrize("make", [TorchLoader, StorageDlioLoader])
@pytest.mark.parametrize("format_", FORMATS)
def test_each_sample_comes_once_with_its_bytes(
    tmp_path: Path, format_: Format, make: Callable[[LoaderShare], RankLoader]
) -> None:
    per_file = 1 if format_ == "folder" else 3
    epochs = _epochs(_data(tmp_path, format_, per_file), make)
    assert [len(each.steps.load_s) for each in epochs] == [4, 4]
    assert len(epochs[0].requests) > 0 or format_ in ("hdf5", "parquet")


@pytest.mark.parametrize("make", [TorchLoader, StorageDlioLoader])
@pytest.mark.parametrize("format_", _VARYING)
def test_samples_of_any_size_come_too(
    tmp_path: Path, format_: Format, make: Callable[[LoaderShare], RankLoader]
) -> None:
    epochs = _epochs(_data(tmp_path, format_, stdev=900.0), make, 1)
    assert epochs[0].wanted_bytes > 0


def test_bytes_from_a_tier_are_not_wanted_from_the_storage(tmp_path: Path) -> None:
    first, second = _epochs(_data(tmp_path, "npz"), StorageDlioLoader)
    assert first.wanted_bytes >= 12 * 3000
    assert second.wanted_bytes == 0
    assert len(second.requests) == 0


def test_a_damaged_sample_ends_the_run(tmp_path: Path) -> None:
    data = _data(tmp_path, "folder")
    with open(data.files[5], "r+b") as file:
        file.seek(1500)
        file.write(b"damage")
    with pytest.raises(CorruptBlock, match="sample 5 is not the one that was generated"):
        _epochs(data, TorchLoader)


class _Own(RankLoader):
    """A loader of a user's, with a fault if asked for."""

    def __init__(self, data: GeneratedData, fault: str) -> None:
        self._data, self._fault = data, fault

    steps = 4

    def batches(self, epoch: int) -> Iterator[Any]:
        order = np.arange(12)
        if self._fault == "twice":
            order[3] = 4
        for start in range(0, 9 if self._fault == "short" else 12, 3):
            yield order[start : start + 3]

    def received(self, batch: Any) -> tuple[list[int], list[Any]]:
        numbers = batch.tolist()
        shown = numbers[::-1] if self._fault == "mixed" else numbers
        return numbers, [Path(self._data.files[k]).read_bytes() for k in shown]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("twice", "12 samples, 1 of them more than once"),
        ("short", "gave 3 of the 4 batches"),
        ("mixed", "sample 0 is not the one that was generated"),
    ],
)
def test_a_loader_that_errs_is_found_out(tmp_path: Path, fault: str, says: str) -> None:
    data = _data(tmp_path, "folder")
    with pytest.raises((SourceError, CorruptBlock), match=says):
        _epochs(data, lambda _: _Own(data, fault))


def test_too_few_files_for_the_ranks_are_refused(tmp_path: Path) -> None:
    data = _data(tmp_path, "tar", per_file=12)
    with pytest.raises(UsageError, match="2 ranks need at least as many files, and there are 1"):
        TorchLoader(LoaderShare(data, 0, 2))


def _mine(*, files: list[str], batch_size: int, **_: Any) -> Callable[[int], Iterable[Any]]:
    def batches(epoch: int) -> Iterator[Any]:
        for start in range(0, len(files), batch_size):
            numbers = range(start, start + batch_size)
            yield numbers, [Path(files[k]).read_bytes() for k in numbers]

    return batches


def test_a_loader_of_a_users_own_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_loader_of_a_test.py"
    module.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.setattr(
        importlib.import_module("my_loader_of_a_test"), "make", _mine, raising=False
    )
    name = "my_loader_of_a_test:make"
    epochs = _epochs(_data(tmp_path, "folder"), lambda place: FactoryLoader(name, place))
    assert len(epochs) == 2
    with pytest.raises(UsageError, match="name a function as module:function"):
        FactoryLoader("my_loader_of_a_test:absent", LoaderShare(_data(tmp_path, "folder"), 0, 1))
