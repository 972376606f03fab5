"""Torch's contract: the same batches, the same random numbers after them, the same errors."""

import copy
import gc
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as Theirs

import dlio
from dlio import DataLoader as Ours
from dlio.errors import UsageError
from tests.loader.datasets import Numbers, Stream, plain
from tests.loader.leftovers import nothing_is_left

Point = namedtuple("Point", "x y")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_is_left():
        yield


class Together(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Kinds(Numbers):
    """Samples of all types that default_collate has a rule for."""

    def __getitem__(self, index: int) -> Any:
        return (
            Point(index, float(index)),
            [np.float32(index), np.arange(3) + index],
            {"text": "a" * index, "bytes": b"b" * index},
            index % 2 == 0,
        )


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index in (2, 3):
            raise KeyError(f"sample {index} is bad")
        return index


def passes(loader: Any, count: int = 2) -> list[Any]:
    """Batches of several passes, exceptions in their places, and the numbers drawn after them."""
    torch.manual_seed(11)
    results: list[Any] = []
    for _ in range(count):
        iterator = iter(loader)
        while True:
            try:
                results.append(plain(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                results.append(type(error).__name__)
        results.append(torch.rand(1).item())
    return results


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 5, "shuffle": False},
    {"batch_size": None},
    {"batch_size": None, "shuffle": True},
    {"batch_size": 30},
    {"batch_size": 30, "drop_last": True},
    {"batch_size": 3, "collate_fn": list},
    {"batch_size": 3, "in_order": True},
    {"batch_size": 3, "timeout": 0},
]


@pytest.mark.parametrize("kind", [Numbers, Together, Kinds])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_batches_as_torch(kind: Any, workers: int, options: dict[str, Any]) -> None:
    theirs = passes(Theirs(kind(), **options))
    assert passes(Ours(kind(), num_workers=workers, **options)) == theirs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: {"sampler": SequentialSampler(data)},
        lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=31)},
        lambda data: {"sampler": WeightedRandomSampler([1.0] * 23, 9)},
        lambda data: {"sampler": [5, 1, 1, 7]},
        lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 4, True)},
        lambda data: {"batch_sampler": [[1, 2], [], [3]], "collate_fn": list},
        lambda data: {"sampler": DistributedSampler(data, 3, 1), "batch_size": 2},
        lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    ],
)
def test_samplers_are_followed(sampler: Callable[[Any], dict[str, Any]], workers: int) -> None:
    theirs, ours = Numbers(), Numbers()
    wanted = passes(Theirs(theirs, **sampler(theirs)))
    results = passes(Ours(ours, num_workers=workers, **sampler(ours)))
    assert results == wanted
    assert len(Ours(ours, **sampler(ours))) == len(Theirs(theirs, **sampler(theirs)))


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.arange(9), torch.arange(9.0)),
        Subset(Numbers(), [4, 2, 9]),
        ConcatDataset([Numbers(3), Numbers(4)]),
        list(range(7)),
        ["a", "b", "c"],
        {0: 1.5, 1: 2.5},
    ],
)
def test_data_sets_of_torch_and_of_python(data: Any) -> None:
    assert passes(Ours(data, 2, num_workers=2)) == passes(Theirs(data, 2))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": -1}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"prefetch_factor": 2}, ValueError),
        ({"num_workers": 1, "prefetch_factor": -1}, ValueError),
        ({"persistent_workers": True}, ValueError),
        ({"sampler": [1], "shuffle": True}, ValueError),
        ({"batch_sampler": [[1]], "batch_size": 2}, ValueError),
        ({"batch_sampler": [[1]], "shuffle": True}, ValueError),
        ({"batch_sampler": [[1]], "drop_last": True}, ValueError),
        ({"batch_size": None, "drop_last": True}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"multiprocessing_context": "fork"}, ValueError),
        ({"num_workers": 1, "multiprocessing_context": "nonsense"}, ValueError),
        ({"num_workers": 1, "multiprocessing_context": object()}, TypeError),
    ],
)
def test_what_torch_refuses_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    for kind in (Theirs, Ours):
        with pytest.raises(error):
            kind(Numbers(), **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}])
def test_iterables_refuse_orders(options: dict[str, Any]) -> None:
    for kind in (Theirs, Ours):
        with pytest.raises(ValueError):  # noqa: PT011 - torch's own words
            kind(Stream(), **options)


def test_attributes_are_torchs_and_cannot_be_set_when_it_says_so() -> None:
    ours, theirs = Ours(Numbers(), 4, num_workers=2), Theirs(Numbers(), 4, num_workers=2)
    assert isinstance(ours, Theirs)
    for name, value in vars(theirs).items():
        if not name.startswith("_") and not hasattr(value, "data_source"):
            assert type(getattr(ours, name)) is type(value), name
    for name in ("batch_size", "sampler", "batch_sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(ours, name, None)
    ours.num_workers, ours.collate_fn, ours.timeout = 1, list, 3
    assert next(iter(ours)) == [Numbers()[k] for k in range(4)]
    grouped = Ours(Numbers(), batch_sampler=[[1]])
    assert grouped.batch_size is None
    assert isinstance(grouped.sampler, SequentialSampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterables_go_torchs_way(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_workers": workers}
    assert passes(Ours(Stream(), **options)) == passes(Theirs(Stream(), **options))
    with pytest.raises(TypeError):
        len(Ours(Stream(), **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_keeps_its_type_names_the_sample_and_ends_nothing(workers: int) -> None:
    assert passes(Ours(Failing(8), 2, num_workers=workers)) == passes(Theirs(Failing(8), 2))
    iterator = iter(Ours(Failing(8), 2, num_workers=2))
    next(iterator)
    with pytest.raises(KeyError) as caught:
        next(iterator)
    assert "for sample 2" in str(caught.value)
    assert "in __getitem__" in str(caught.value)
    assert plain(next(iterator)) == ("torch.int64", [4, 5])


def test_bad_samples_can_be_left_out_and_are_told() -> None:
    loader = Ours(Failing(8), 2, num_workers=2, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 5], [6, 7]]
    assert sorted(loader.stats()["skipped"]) == ["Failing[2]", "Failing[3]"]
    with pytest.raises(UsageError, match="num_workers=1"):
        iter(Ours(Failing(8), 2, on_error="skip"))


def test_an_exception_of_collate_fn_comes_in_its_batchs_place() -> None:
    def collate(items: list[int]) -> Any:
        if 2 in items:
            raise RuntimeError("cannot collate")
        return items

    iterator = iter(Ours(list(range(6)), 2, num_workers=2, collate_fn=collate))
    assert next(iterator) == [0, 1]
    with pytest.raises(RuntimeError, match="cannot collate"):
        next(iterator)
    assert next(iterator) == [4, 5]


def test_a_timeout_is_torchs() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            assert index or release.wait(60)
            return index

    release = threading.Event()
    loader = Ours(Slow(4), 1, num_workers=2, timeout=0.3, in_order=True)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds"):
        next(iter(loader))
    release.set()


def test_out_of_order_a_slow_sample_delays_no_other() -> None:
    class One(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                assert release.wait(60)
            return index

    release = threading.Event()
    iterator = iter(Ours(One(6), 1, num_workers=2, in_order=False))
    first = [int(next(iterator)) for _ in range(4)]
    release.set()
    assert sorted([*first, *(int(batch) for batch in iterator)]) == list(range(6))
    assert 0 not in first


def test_workers_processes_are_torchs_own() -> None:
    """Options that mean something only in processes use them: worker_init_fn and its seeds."""
    started: list[int] = []
    loader = Ours(Numbers(6), 3, num_workers=1, worker_init_fn=started.append)
    assert len(list(loader)) == 2
    assert loader.stats()["engine"] == "torch"
    assert started == []  # In the worker's process, not here.
    threads = Ours(Numbers(6), 3, num_workers=1, worker_init_fn=started.append, workers="thread")
    assert len(list(threads)) == 2
    assert started == [0]
    assert threads.stats()["engine"] == "threads"


def test_persistent_workers_draw_as_torchs() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    theirs = passes(Theirs(Numbers(), persistent_workers=True, **options), 3)
    assert passes(Ours(Numbers(), persistent_workers=True, **options), 3) == theirs
    assert theirs != passes(Theirs(Numbers(), **options), 3)


def test_iterations_nest_and_loaders_live_side_by_side() -> None:
    loader = Ours(list(range(4)), 2, num_workers=2)
    pairs = [(a.tolist(), b.tolist()) for a in loader for b in loader]
    assert pairs == [(a, b) for a in ([0, 1], [2, 3]) for b in ([0, 1], [2, 3])]
    one, two = iter(loader), iter(Ours(list(range(4, 8)), 2, num_workers=2))
    assert [next(one).tolist(), next(two).tolist()] == [[0, 1], [4, 5]]
    assert [next(one).tolist(), next(two).tolist()] == [[2, 3], [6, 7]]


def test_loaders_can_be_copied_and_pickled_and_an_early_end_stops_the_work() -> None:
    loader = Ours(Numbers(), 4, num_workers=2, seed=3, trace=None)
    for _ in loader:
        break
    for made in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert made.seed == 3
        assert len(list(made)) == 6
    del made
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    assert [t.name for t in threading.enumerate() if t.name.startswith("dlio")] == []


def test_pinning_is_told_of_pictures_too(pictures: Path) -> None:
    with (
        dlio.open(str(pictures), image_size=8, tiers="none") as data,
        Ours(data, 4, num_workers=1, pin_memory=True) as loader,
    ):
        if torch.accelerator.is_available():
            assert next(iter(loader))[0].is_pinned()
            return
        with pytest.warns(UserWarning, match="no accelerator is found"):
            next(iter(loader))


def test_batches_are_pinned_only_where_there_is_an_accelerator() -> None:
    for kind in (Theirs, Ours):
        loader = kind(Numbers(), 4, num_workers=2, pin_memory=True)
        if torch.accelerator.is_available():
            assert next(iter(loader))["square"].is_pinned()
            continue
        with pytest.warns(UserWarning, match="no accelerator is found"):
            iterator = iter(loader)
        assert not next(iterator)["square"].is_pinned()
