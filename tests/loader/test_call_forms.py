"""Forms in which scripts call torch's DataLoader: batches of the same values and types."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import data as torch_data

import dlio
from tests.loader.datasets import Numbers


class Point(NamedTuple):
    """A sample, or a batch, of two parts."""

    x: Any
    y: Any


@dataclass
class Box:
    """A batch as an object."""

    x: torch.Tensor
    count: int


class Points(Numbers):
    """Samples that are named tuples."""

    def __getitem__(self, index: int) -> Point:
        return Point(torch.tensor(index), {"name": f"n{index}", "pair": (index, index / 2)})


class Counted(torch_data.IterableDataset[int]):
    """A stream that knows its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))

    def __len__(self) -> int:
        return 11


def points(batch: list[Any]) -> Point:
    return Point(torch.stack([each["square"] for each in batch]), len(batch))


def box(batch: list[Any]) -> Box:
    return Box(torch.stack([each["square"] for each in batch]), len(batch))


def generator(seed: int = 3) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


class Unsized:
    """Batches of indices, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2], [5, 4, 3])


def sampled(drop_last: bool) -> torch_data.BatchSampler:
    sampler = torch_data.RandomSampler(range(23), generator=generator())
    return torch_data.BatchSampler(sampler, 4, drop_last)


NUMBERS = Numbers(23)
ARRAYS = torch_data.TensorDataset(torch.arange(20.0), torch.arange(20))
BOTH: torch_data.ConcatDataset[Any] = torch_data.ConcatDataset([Numbers(7), Numbers(9)])
FORMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "a collate_fn of named tuples": lambda: (NUMBERS, {"batch_size": 5, "collate_fn": points}),
    "a collate_fn of dataclasses": lambda: (NUMBERS, {"batch_size": 5, "collate_fn": box}),
    "samples of named tuples": lambda: (Points(9), {"batch_size": 4, "shuffle": True}),
    "single named tuples": lambda: (Points(5), {"batch_size": None}),
    "a Subset of a ConcatDataset": lambda: (
        torch_data.Subset(BOTH, [0, 15, 8, 7, 3, -1]),
        {"batch_size": 4},
    ),
    "random_split by counts": lambda: (
        torch_data.random_split(NUMBERS, [15, 8], generator=generator())[1],
        {"batch_size": 3, "shuffle": True},
    ),
    "random_split by shares": lambda: (
        torch_data.random_split(ARRAYS, [0.5, 0.3, 0.2], generator=generator())[0],
        {"batch_size": 3},
    ),
    "a TensorDataset": lambda: (ARRAYS, {"batch_size": 6, "shuffle": True, "drop_last": True}),
    "a StackDataset of a tuple": lambda: (
        torch_data.StackDataset(NUMBERS, Points(23)),
        {"batch_size": 4},
    ),
    "a StackDataset of a mapping": lambda: (
        torch_data.StackDataset(a=NUMBERS, b=Points(23)),
        {"batch_size": 4, "shuffle": True},
    ),
    "a BatchSampler that drops": lambda: (NUMBERS, {"batch_sampler": sampled(True)}),
    "a BatchSampler that keeps": lambda: (NUMBERS, {"batch_sampler": sampled(False)}),
    "a batch_sampler without a length": lambda: (NUMBERS, {"batch_sampler": Unsized()}),
    "a list of indices": lambda: (NUMBERS, {"batch_size": None, "sampler": [3, 1, 2]}),
    "a stream with a length": lambda: (Counted(), {"batch_size": 3, "num_workers": 0}),
    "a generator": lambda: (NUMBERS, {"batch_size": 4, "shuffle": True, "generator": generator()}),
    "in_order=False": lambda: (NUMBERS, {"batch_size": 4, "num_workers": 0, "in_order": False}),
    "prefetch_factor=None": lambda: (NUMBERS, {"batch_size": 4, "prefetch_factor": None}),
    "a shuffle of None": lambda: (NUMBERS, {"batch_size": 4, "shuffle": None}),
    "rows of a tensor": lambda: (torch.arange(12).reshape(6, 2), {"batch_size": 4}),
    "replacement": lambda: (
        NUMBERS,
        {"sampler": torch_data.RandomSampler(NUMBERS, True, 9, generator=generator())},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_batches_have_the_values_and_types_of_torch(name: str) -> None:
    seen = []
    for kind, workers in ((torch_data.DataLoader, 0), (dlio.DataLoader, 2)):
        torch.manual_seed(7)
        dataset, options = FORMS[name]()
        with_threads = {"num_workers": workers, **options}
        loader = kind(dataset, **with_threads)
        passes = [plain(list(loader)) for _ in range(2)]
        try:
            length: object = len(loader)
        except TypeError:
            length = None
        seen.append((passes, length))
        getattr(loader, "close", lambda: None)()
    assert seen[0] == seen[1]


def plain(value: Any) -> Any:
    """Return a value as its type and parts, which can be compared."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.tolist()
    if isinstance(value, dict):
        return kind, {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return kind, [plain(each) for each in value]
    if is_dataclass(value):
        return kind, [plain(getattr(value, each.name)) for each in fields(value)]
    return kind, value


def test_no_prefetched_batches_with_workers_are_refused() -> None:
    # torch's own words, with which its iterator fails.
    with pytest.raises(dlio.UsageError, match="prefetch_factor must be greater than 0"):
        dlio.DataLoader(NUMBERS, num_workers=1, prefetch_factor=0)
