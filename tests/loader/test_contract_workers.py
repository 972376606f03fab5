"""torch's contract on workers: the same cases on torch's class, on threads and on processes."""

import contextvars
import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import dlio
from dlio.loader.dataset_threads import clear_worker_info, set_worker_info
from tests.loader.datasets import Numbers, Stream, plain
from tests.loader.leftovers import nothing_is_left

threads = partial(dlio.DataLoader, workers="thread")
processes = partial(dlio.DataLoader, workers="process")
KINDS = [
    # Shows that the cases are torch's contract.
    pytest.param(DataLoader, id="torch", marks=pytest.mark.nightly),
    pytest.param(threads, id="threads"),
    pytest.param(processes, id="processes"),
]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_is_left():
        yield
    assert get_worker_info() is None


class Informed(Dataset[Any]):
    """Samples that are the answer of `get_worker_info`."""

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info is torch.utils.data.get_worker_info()
        data: Any = info.dataset
        return info.id, info.num_workers, info.seed, data.count


@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_knows_itself(kind: Any) -> None:
    torch.manual_seed(5)
    wanted = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(5)
    samples = [batch[0] for batch in kind(Informed(), 1, num_workers=2, collate_fn=list)]
    assert {number for number, *_ in samples} <= {0, 1}
    for number, workers, seed, count in samples:
        assert (workers, seed, count) == (2, wanted + number, 12)
    generator = torch.Generator().manual_seed(9)
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
    generator.manual_seed(9)
    first = next(iter(kind(Informed(), 1, num_workers=1, collate_fn=list, generator=generator)))
    assert first[0][2] == drawn


def test_a_thread_has_generators_of_its_own() -> None:
    set_worker_info(1, 2, 7, "data")
    try:
        info: Any = get_worker_info()
        assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 2, 7, "data")
        if hasattr(info, "rng"):
            assert info.rng.torch_generator.initial_seed() == 7
        assert not default_collate([torch.zeros(2)]).is_shared()  # It needs none in a thread.
    finally:
        clear_worker_info()
    assert get_worker_info() is None


class Moded(Dataset[Any]):
    """Each sample is what a user's function finds of the modes of the thread that iterates."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[object, ...]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_grad_enabled(), product.dtype, np.geterr()["divide"], VARIABLE.get()


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [False, True])
def test_workers_have_the_modes_of_who_iterates(kind: Any, inference: bool) -> None:
    loader = kind(Moded(), batch_size=None, num_workers=1)
    usual = [True, torch.float32, np.geterr()["divide"], 0]
    assert list(loader) == [usual] * 2
    set_to = VARIABLE.set(3)
    modes = torch.inference_mode() if inference else torch.no_grad()
    with modes, np.errstate(divide="raise"), torch.autocast("cpu", torch.bfloat16):
        assert list(loader) == [[False, torch.bfloat16, "raise", 3]] * 2
    VARIABLE.reset(set_to)
    assert list(loader) == [usual] * 2


def test_a_transform_has_the_modes_of_who_iterates(pictures: Path) -> None:
    seen: list[bool] = []

    def transform(image: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return image

    options: dict[str, Any] = {"image_size": 16, "tiers": "none", "transform": transform}
    with (
        torch.no_grad(),
        dlio.open(str(pictures), **options) as data,
        dlio.DataLoader(data, 4, num_workers=2) as loader,
    ):
        assert sum(len(labels) for _, labels in loader) == len(seen)
    assert seen
    assert not any(seen)


class Opened(Dataset[Any]):
    """A file that each worker opens for itself, as data sets of HDF5 do."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.files: dict[int, Any] = {}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        if info.id not in self.files:
            self.files[info.id] = Path(self.path).open("rb")  # noqa: SIM115 - kept open
        self.files[info.id].seek(index)
        return self.files[info.id].read(1)[0]

    def close(self) -> None:
        for each in self.files.values():
            each.close()


# Each worker's copy leaves its file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_that_opens_a_file_for_each_worker(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(10)))
    data = Opened(str(path))
    assert [int(n) for batch in kind(data, 3, num_workers=2) for n in batch] == list(range(10))
    data.close()


def nested(samples: list[Any]) -> Any:
    return torch.nested.nested_tensor([torch.ones(n + 1) for n in samples], layout=torch.jagged)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_nested_tensors(kind: Any, workers: int) -> None:
    loader = kind(list(range(5)), 2, num_workers=workers, collate_fn=nested)
    sizes = [[len(part) for part in batch.unbind()] for batch in loader]
    assert sizes == [[1, 2], [3, 4], [5]]


def test_a_nested_batch_counts_its_samples() -> None:
    loader: Any = threads(list(range(5)), 2, num_workers=2, collate_fn=nested, seed=1)
    assert len(list(loader)) == 3
    assert loader.stats()["samples"] == 5
    from dlio.loader.nested_batches import emptied, samples_in

    batch = {"ragged": nested([1, 2, 3])}
    assert samples_in(batch) == 3
    assert samples_in(emptied(batch)) == 0


def test_a_loader_can_be_subscripted() -> None:
    numbers: Any = [1, 2]
    assert dlio.DataLoader[int](numbers).dataset is numbers
    assert dlio.StatefulDataLoader[int](numbers).dataset is numbers


@pytest.mark.parametrize("kind", KINDS)
def test_the_iterators_workers_can_be_seen_and_ended(kind: Any) -> None:
    iterator = iter(kind(Numbers(), 2, num_workers=2))
    next(iterator)
    workers = list(iterator._workers)
    assert len(workers) == iterator._num_workers == 2
    assert all(worker.is_alive() for worker in workers)
    iterator._shutdown_workers()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    with pytest.raises(NotImplementedError):
        iterator.__getstate__()
    with pytest.raises(AttributeError):
        _ = iterator.nonsense


class Epochs(IterableDataset[Any]):
    """Counts how often it has begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        info = get_worker_info()
        for k in range(3):
            yield self.begun, -1 if info is None else info.id, k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [True, False])
def test_an_iterable_begins_once_for_a_pass(kind: Any, persistent: bool) -> None:
    loader = kind(Epochs(), batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in (1, 2, 3):
        wanted = [(epoch if persistent else 1, worker, k) for k in range(3) for worker in (0, 1)]
        assert [tuple(sample) for sample in loader] == wanted


class Resets(Dataset[Any]):
    """Map-style: how often this copy was asked."""

    asked = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.asked


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers_keep_their_data_set(kind: Any) -> None:
    loader = kind(Resets(), num_workers=1, persistent_workers=True)
    assert [int(n) for _ in range(2) for n in loader] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_data_pipes_shuffle_and_are_dealt_to_workers(kind: Any, workers: int) -> None:
    pipe = IterableWrapper(range(20)).shuffle(buffer_size=7).sharding_filter()
    torch.manual_seed(2)
    theirs = [int(n) for n in DataLoader(pipe, shuffle=True, num_workers=workers)]
    torch.manual_seed(2)
    loader = kind(pipe, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    ours = [int(n) for n in loader]
    assert ours == theirs
    following = [int(n) for n in loader]
    assert following != ours
    assert sorted(following) == sorted(ours) == list(range(20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("default:This DataLoader will create")
def test_too_many_workers_are_warned_of(kind: Any) -> None:
    with pytest.warns(UserWarning, match="excessive worker creation"):
        kind(Numbers(), num_workers=1000)


def test_more_threads_than_cores_are_right(recwarn: pytest.WarningsRecorder) -> None:
    """They wait for storage."""
    dlio.DataLoader(Numbers(), num_workers=len(os.sched_getaffinity(0)) + 8)
    assert [each for each in recwarn if "excessive" in str(each.message)] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [Numbers(9), Stream(9)], ids=["map", "iterable"])
def test_out_of_order_no_batch_is_lost(kind: Any, data: Any) -> None:
    loader = kind(data, num_workers=2, in_order=False, collate_fn=list)
    values = [batch[0]["index"] if isinstance(batch[0], dict) else batch[0] for batch in loader]
    assert sorted(values) == list(range(9))


@pytest.mark.parametrize("kind", [*KINDS, pytest.param(dlio.DataLoader, id="default")])
def test_the_context_of_processes_can_be_set_later(kind: Any) -> None:
    loader = kind(Numbers(4), 2, num_workers=1)
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context is get_context("fork")
    assert len(list(loader)) == 2
    with pytest.raises(ValueError, match="should specify a valid start method"):
        loader.multiprocessing_context = "nonsense"
    with pytest.raises(TypeError, match="valid context"):
        loader.multiprocessing_context = object()
    with pytest.raises(ValueError, match="can only be used with"):
        kind(Numbers(4)).multiprocessing_context = "fork"
    with pytest.raises(ValueError, match="should not be set after"):
        loader.persistent_workers = True


def refuse(worker: int) -> None:
    raise ArithmeticError(f"worker {worker} will not begin")


class Dying(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 1:
            os._exit(3)
        return index


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("line one\nline two")


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_workers(kind: Any) -> None:
    with pytest.raises(ArithmeticError, match="will not begin"):
        list(kind(Numbers(2), num_workers=1, worker_init_fn=refuse))
    with pytest.raises(KeyError, match="Caught KeyError in DataLoader worker") as caught:
        list(kind(Failing(2), num_workers=1))
    assert "\n" in str(caught.value)  # A traceback in lines, which KeyError alone does not show.
    if kind is not threads:
        # Torch's own may ask the worker for the memory of its last batch, and meet its end there.
        race = (EOFError, ConnectionError) if kind is DataLoader else ()
        with pytest.raises((RuntimeError, *race)) as died:
            list(kind(Dying(4), num_workers=1))
        assert isinstance(died.value, race) or "DataLoader worker" in str(died.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"num_workers": 1, "prefetch_factor": -1},
        {"prefetch_factor": 1},
        {"persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "fork"},
    ],
    ids=str,
)
def test_errors_have_torchs_words(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+") as theirs:
        DataLoader(Numbers(), **options)
    words = str(theirs.value).partition(";")[0].partition(".")[0].partition(", but")[0]
    with pytest.raises(ValueError, match=r".+") as ours:
        dlio.DataLoader(Numbers(), **options)
    assert words in str(ours.value)


class Sized(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_length_that_is_wrong_is_warned_of(kind: Any, workers: int) -> None:
    loader = kind(Sized(10), num_workers=workers)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="was reported to be 3"):
        assert len(list(loader)) == 10
    batched = kind(Sized(10), 2, drop_last=True, num_workers=workers)
    assert len(batched) == 1


FIVE: Any = list(range(5))
DATA_SETS: list[Callable[[], Any]] = [
    lambda: ConcatDataset([Numbers(3), Numbers(4)]),
    lambda: StackDataset(Numbers(5), FIVE),
    lambda: StackDataset(a=FIVE, b=TensorDataset(torch.arange(5))),
    lambda: Subset(StackDataset(FIVE), [1, 3, 4]),
    lambda: ChainDataset([Stream(3), Stream(4)]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", DATA_SETS)
def test_data_sets_of_torch(kind: Any, make: Callable[[], Any]) -> None:
    for workers in (0, 1):
        theirs = [plain(batch) for batch in DataLoader(make(), 2)]
        assert [plain(batch) for batch in kind(make(), 2, num_workers=workers)] == theirs


class Counted(Numbers):
    def __init__(self) -> None:
        super().__init__(40)
        self.asked = get_context("fork").Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.asked.get_lock():
            self.asked.value += 1
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_than_the_prefetch_factor_is_asked_ahead(kind: Any) -> None:
    data = Counted()
    iterator = iter(kind(data, 2, num_workers=2, prefetch_factor=3))
    for taken in (1, 2, 3):
        next(iterator)
        assert data.asked.value <= 2 * (taken + 2 * 3)
    assert len(list(iterator)) == 17
    assert data.asked.value == 40


class Fixed(Numbers):
    start = 0

    def __getitem__(self, index: int) -> Any:
        return index + self.start


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers_do_not_see_later_assignments(kind: Any) -> None:
    data = Fixed(3)
    loader = kind(data, num_workers=1, persistent_workers=True)
    for start in range(3):
        assert [int(n) for n in loader] == [0, 1, 2]
        data.start = start + 1
    assert loader.dataset is data
