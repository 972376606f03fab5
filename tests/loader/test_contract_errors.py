"""Errors of every kind: none ends a thread, none ends a pass without a word."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as Theirs
from torch.utils.data import IterableDataset

import dlio
from dlio import DataLoader as Ours
from dlio import StatefulDataLoader
from dlio.errors import DlioError, SourceError
from tests.loader.datasets import Numbers, plain
from tests.loader.leftovers import nothing_is_left
from tests.loader.test_contract import passes


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_is_left():
        yield


class Ending(Numbers):
    """A data set one of whose samples raises an exception that is not an Exception."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(24)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error("of a sample")
        return torch.tensor(index)


class EndingStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise asyncio.CancelledError("of a stream")

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing is loaded."""


def collate(samples: list[Any]) -> Any:
    if any(int(sample) == 5 for sample in samples):
        raise SystemExit("of a batch")
    return torch.stack(samples)


def refuse(_: int) -> None:
    raise SystemExit("of a worker")


def until_raised(loader: Any) -> tuple[int, str]:
    """Batches before the first exception, and its type. Fails if none is raised."""
    with loader:
        iterator, count = iter(loader), 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                pytest.fail("the pass ended without an error")
            except BaseException as error:
                return count, type(error).__name__
            assert batch is not None
            count += 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: Ours(Ending(SystemExit), 2, num_workers=2), (2, "SystemExit")),
        (
            lambda: Ours(Ending(asyncio.CancelledError), 2, num_workers=2, seed=1),
            (2, "CancelledError"),
        ),
        (lambda: Ours(Ending(KeyboardInterrupt), None, num_workers=1), (5, "KeyboardInterrupt")),
        (
            lambda: Ours(list(range(8)), 2, num_workers=2, collate_fn=_collated),
            (2, "SystemExit"),
        ),
        (
            lambda: Ours(Numbers(), num_workers=1, worker_init_fn=refuse, workers="thread"),
            (0, "SystemExit"),
        ),
        (lambda: StatefulDataLoader(Ending(SystemExit), 2, num_workers=2), (2, "SystemExit")),
        (
            lambda: StatefulDataLoader(EndingStream(), None, num_workers=1, workers="thread"),
            (5, "CancelledError"),
        ),
    ],
)
def test_whatever_a_thread_raises_comes_in_its_batchs_place(
    make: Callable[[], Any], wanted: tuple[int, str]
) -> None:
    assert until_raised(make()) == wanted


def _collated(samples: list[int]) -> Any:
    return collate([torch.tensor(sample) for sample in samples])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tiers", ["none", "ram:16MiB"])
@pytest.mark.parametrize("batch_size", [2, None])
def test_whatever_a_transform_raises_comes_in_its_batchs_place(
    pictures: Path, tiers: str, batch_size: int | None
) -> None:
    def transform(_: Any) -> Any:
        raise asyncio.CancelledError("of a transform")

    data = dlio.open(pictures, image_size=8, tiers=tiers, transform=transform)
    assert until_raised(Ours(data, batch_size, num_workers=2)) == (0, "CancelledError")


@pytest.mark.timeout(300)
def test_a_data_set_behind_tiers_that_ends_its_thread_is_a_source_that_failed() -> None:
    class Late(Ending):
        def __getitem__(self, index: int) -> Any:
            if threading.current_thread() is threading.main_thread():
                return torch.tensor(index)
            return super().__getitem__(index)

    loader = Ours(Late(SystemExit), 2, num_workers=1, tiers="ram:8MiB", seed=1)
    with loader, pytest.raises(SourceError, match="SystemExit"):
        list(loader)


class Odd(Numbers):
    """`__getitems__` that returns a whole batch, as TensorDict's does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"numbers": torch.tensor(indices), "count": len(indices)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_a_data_set_makes_is_given_to_collate_fn_as_it_is(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": _same}
    assert passes(Ours(Odd(), num_workers=workers, **options)) == passes(Theirs(Odd(), **options))


def _same(batch: Any) -> Any:
    return batch


def test_tiers_refuse_a_batch_in_place_of_samples() -> None:
    with pytest.raises(SourceError, match="__getitems__ returned a dict"):
        dlio.open(Odd(), tiers="ram:8MiB")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "batches",
    [
        lambda: [{1, 2}, {3}],
        lambda: [{1: "a", 2: "b"}],
        lambda: [torch.tensor([1, 2]), range(3)],
        lambda: [[1], 2, [3]],
        lambda: [None],
    ],
)
def test_batches_of_indices_of_any_type(batches: Callable[[], Any]) -> None:
    ours = passes(Ours(Numbers(), batch_sampler=batches(), num_workers=2))
    assert ours == passes(Theirs(Numbers(), batch_sampler=batches()))


def test_iterators_of_indices_are_used_once() -> None:
    batches: list[Any] = [iter([1, 2]), map(int, "34")]
    loader = Ours(Numbers(), batch_sampler=batches, num_workers=2)
    assert [batch["index"].tolist() for batch in loader] == [[1, 2], [3, 4]]


class Breaking:
    """A sampler that raises after a number of indices."""

    def __iter__(self) -> Iterator[int]:
        yield from range(11)
        raise LookupError("of a sampler")

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_sampler_comes_after_the_batches_that_it_chose(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "sampler": Breaking()}
    ours = passes(Ours(Numbers(), num_workers=workers, **options))
    assert ours == passes(Theirs(Numbers(), **options))
    assert ours.count("LookupError") == 2


@pytest.mark.timeout(300)
def test_a_batch_that_was_late_comes_at_the_next_call_and_is_counted_once() -> None:
    release = threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            assert index or release.wait(60)
            return index

    loader = Ours(Slow(6), 2, num_workers=1, timeout=0.1)
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
    assert loader.state_dict()["batches"] == 0
    release.set()
    loader.timeout = 0
    results: list[Any] = []
    while len(results) < 3:
        try:
            results.append(plain(next(iterator))[1])
        except RuntimeError:  # A busy machine.
            continue
    assert results == [[0, 1], [2, 3], [4, 5]]
    assert loader.state_dict()["batches"] == 3


class Interrupted(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise KeyboardInterrupt
        return index


def interrupted() -> Iterator[list[int]]:
    yield from ([number] for number in range(6))
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ours(Interrupted(8), 2),
        lambda: Ours(Numbers(8), batch_sampler=interrupted(), num_workers=2),
    ],
)
def test_a_pass_that_was_interrupted_does_not_seem_to_be_over(make: Callable[[], Any]) -> None:
    loader = make()
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    state = loader.state_dict()
    with pytest.raises(DlioError, match="ended by KeyboardInterrupt"):
        next(iterator)
    assert loader.state_dict() == state


@pytest.mark.parametrize("planned", [False, True])
def test_a_pass_that_was_closed_does_not_seem_to_be_over(pictures: Path, planned: bool) -> None:
    dataset: Any = dlio.open(pictures, image_size=8, tiers="none") if planned else Numbers()
    with Ours(dataset, 2, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.close()
        with pytest.raises(DlioError, match=r"ended by close\(\)"):
            next(iterator)
        assert loader.state_dict() == state
