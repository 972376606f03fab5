"""Torch's contract: the same batches, the same random numbers after them, the same errors."""

import copy
import gc
import pickle
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as Theirs

import dlio
from dlio import DataLoader as Ours
from dlio.errors import UsageError

Point = namedtuple("Point", "x y")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert [t.name for t in threading.enumerate() if t.name.startswith("dlio")] == []


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"index": index, "square": torch.tensor([index * index]), "name": f"n{index}"}


class Together(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Kinds(Numbers):
    """What default_collate has a rule for."""

    def __getitem__(self, index: int) -> Any:
        return (
            Point(index, float(index)),
            [np.float32(index), np.arange(3) + index],
            {"text": "a" * index, "bytes": b"b" * index},
            index % 2 == 0,
        )


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index in (2, 3):
            raise KeyError(f"sample {index} is bad")
        return index


def plain(value: Any) -> Any:
    """Tensors as lists, so that batches compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, [plain(item) for item in value]
    return value


def passes(loader: Any, count: int = 2) -> list[Any]:
    """Batches of several passes, exceptions in their places, and what is drawn after them."""
    torch.manual_seed(11)
    found: list[Any] = []
    for _ in range(count):
        iterator = iter(loader)
        while True:
            try:
                found.append(plain(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                found.append(type(error).__name__)
        found.append(torch.rand(1).item())
    return found


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
    found = passes(Ours(ours, num_workers=workers, **sampler(ours)))
    assert found == wanted
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


class Slow(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(5 if index == 0 else 0)
        return index


def test_a_timeout_is_torchs() -> None:
    loader = Ours(Slow(4), 1, num_workers=2, timeout=0.3, in_order=True)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds"):
        next(iter(loader))


def test_out_of_order_a_slow_sample_delays_no_other() -> None:
    class One(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                assert release.wait(20)
            return index

    release = threading.Event()
    iterator = iter(Ours(One(6), 1, num_workers=2, in_order=False))
    first = [int(next(iterator)) for _ in range(4)]
    release.set()
    assert sorted([*first, *(int(batch) for batch in iterator)]) == list(range(6))
    assert 0 not in first


def test_workers_processes_are_torchs_own() -> None:
    """What only means something in processes takes them: seeds, worker_init_fn, get_worker_info."""
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


def test_batches_are_pinned_only_where_there_is_an_accelerator() -> None:
    loader = Ours(Numbers(), 4, num_workers=2, pin_memory=True)
    assert not next(iter(loader))["square"].is_pinned() or torch.accelerator.is_available()


def test_batches_come_on_the_device_that_is_asked_for() -> None:
    loader = Ours(Numbers(), 4, num_workers=2, device="meta")
    assert {batch["square"].device.type for batch in loader} == {"meta"}


def test_a_path_is_no_data_set() -> None:
    with pytest.raises(UsageError, match=r"dlio\.open"):
        Ours("/data/imagenet")


def test_tiers_keep_what_a_data_set_returns() -> None:
    class Counted(Numbers):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            type(self).asked += 1
            return {"index": index, "square": torch.tensor([index * index])}

    with Ours(Counted(), 4, tiers="ram:16MiB", shuffle=True) as loader:
        seen = [int(n) for batch in loader for n in batch["index"]]
        before = Counted.asked
        again = [int(n) for batch in loader for n in batch["index"]]
        assert sorted(seen) == sorted(again) == list(range(23))
        assert seen != again
        assert Counted.asked == before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": False},
        {"shuffle": True, "generator": 7},
        {"shuffle": True, "seed": 9},
        {"sampler": "weighted"},
        {"batch_sampler": "own"},
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_a_resumed_pass_is_exactly_the_rest(
    options: dict[str, Any], workers: int, taken: int
) -> None:
    data = Numbers()

    def make(workers: int) -> Any:
        made = dict(options)
        if "generator" in made:
            made["generator"] = torch.Generator().manual_seed(made["generator"])
        if "sampler" in made:
            made["sampler"] = WeightedRandomSampler([1.0] * 23, 23)
        if "batch_sampler" in made:
            made["batch_sampler"] = BatchSampler(RandomSampler(data), 4, False)
        else:
            made["batch_size"] = 4
        return Ours(data, num_workers=workers, **made)

    torch.manual_seed(21)
    loader = make(workers)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    state = loader.state_dict()
    rest = [batch["index"].tolist() for batch in iterator]
    following = [batch["index"].tolist() for batch in loader] if "seed" in options else None
    torch.manual_seed(99)  # What is drawn elsewhere must not matter.
    other = make(2 - workers)
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert len(other) == 6
    assert [batch["index"].tolist() for batch in other] == rest
    if following is not None:
        assert [batch["index"].tolist() for batch in other] == following


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4), (2, 2)])
def test_a_distributed_samplers_pass_goes_on_with_other_ranks(before: int, after: int) -> None:
    data = Numbers(41)
    done: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(before):
        sampler: Any = DistributedSampler(data, before, rank, shuffle=True, seed=4)
        loader = Ours(data, 3, sampler=sampler, num_workers=1)
        loader.set_epoch(2)
        iterator = iter(loader)
        for _ in range(2):
            done += next(iterator)["index"].tolist()
        assert not state or state == loader.state_dict()  # The same on all ranks.
        state = loader.state_dict()
    rest: list[int] = []
    for rank in range(after):
        sampler = DistributedSampler(data, after, rank, shuffle=True, seed=4)
        loader = Ours(data, 5, sampler=sampler, num_workers=1)
        loader.load_state_dict(state)
        rest += [n for batch in loader for n in batch["index"].tolist()]
    assert len(done) == len(set(done)) == 6 * before
    assert set(rest) == set(range(41)) - set(done) | (set(rest) & set(done))
    padding = len(rest) - (41 - len(done))
    assert 0 <= padding < after


def test_a_state_of_another_kind_is_refused() -> None:
    by_formula = Ours(Numbers(), 4, seed=1)
    with pytest.raises(UsageError):
        by_formula.load_state_dict(Ours(Numbers(), 4).state_dict())
    with pytest.raises(UsageError):
        Ours(Numbers(), 4).load_state_dict(by_formula.state_dict())
    with pytest.raises(UsageError):
        Ours(Numbers(), 4).load_state_dict({"kind": "sampler", "format": 2, "epoch": -1})


def test_an_iterables_state_counts_its_batches() -> None:
    loader = Ours(Stream(10), 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = Ours(Stream(10), 2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_what_a_pass_cost_is_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = value

    writer = Writer()
    trace = tmp_path / "trace.json"
    loader = Ours(Numbers(), 4, num_workers=2, trace=str(trace), writer=writer)
    with caplog.at_level("INFO", "dlio"):
        assert len(list(loader)) == 6
    assert "bottleneck" in caplog.text or "remedy" in caplog.text
    assert writer.scalars["dlio/samples_per_s"] > 0
    import json

    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["args"].get("samples", 0) for event in events if event["ph"] == "X") == 23
    stats = loader.stats()
    assert (stats["samples"], stats["batches"], stats["threads"]) == (23, 6, 2)
    assert dlio.DataLoader is Ours


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_arrays_are_read_into_the_batch_itself(tmp_path: Any, tiers: str, compress: str) -> None:
    from dlio_staging.pack import pack

    class Volumes(Numbers):
        def __getitem__(self, index: int) -> Any:
            volume = torch.full((40, 33, 17), float(index))
            volume[0, 0, :3] = torch.tensor([1.5, 2.5, -index])
            return {"flag": index % 2 == 0, "volume": volume, "index": index, "x": index / 2}

    pack(Volumes(), str(tmp_path / "packed"), compress=compress)
    with (
        dlio.open(str(tmp_path / "packed"), tiers=tiers) as data,
        Ours(data, 4, shuffle=True, num_workers=2, seed=2) as loader,
    ):
        for _ in range(2):
            seen = []
            for batch in loader:
                samples = batch["index"].tolist()
                wanted = torch.utils.data.default_collate([Volumes()[k] for k in samples])
                assert plain(batch) == plain(wanted)
                seen += samples
            assert sorted(seen) == list(range(23))
        assert loader.stats()["thread_s"]["decode"] == 0  # Nothing was copied a second time.
