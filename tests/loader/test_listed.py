"""Samplers whose order is known in advance: torch's order and random numbers, read as planned."""

import random
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
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import dlio
from dlio.plan.order import Order
from dlio.storage.source_requests import SourceRequests

_N = 12


class _Own(Sampler[int]):
    """A sampler of the user's, which draws from several random number generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            numpys = int(np.random.randint(_N))  # noqa: NPY002
            yield (random.randrange(_N) + numpys + int(torch.randint(_N, ()))) % _N

    def __len__(self) -> int:
        return 10


class _Endless(_Own):
    """Says that it has ten samples, and has more."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class _Failing(_Own):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise RuntimeError("no more")


class _Opened:
    """A data set of dlio, and a torch data set of the same samples."""

    def __init__(self, data: dlio.Dataset) -> None:
        self.data = data
        self.plain = [(k, data.targets[k]) for k in range(len(data))]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Opened]:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("listed") / "pictures"
    draw_once(root, images=_N, validation=2, classes=3)
    with dlio.open(str(root / "train"), tiers="ram:64MiB", image_size=16, train=False) as data:
        yield _Opened(data)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


_SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda data: {"sampler": SequentialSampler(data)},
    "random": lambda data: {"sampler": RandomSampler(data)},
    "replacement": lambda data: {"sampler": RandomSampler(data, True, 40)},
    "generator": lambda data: {"sampler": RandomSampler(data, generator=_generator())},
    "subset": lambda data: {"sampler": SubsetRandomSampler([7, 2, 5, -1])},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0, 5.0] * 6, 30)},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 3, 1)},
    "own": lambda data: {"sampler": _Own()},
    "list": lambda data: {"sampler": [5, np.int64(4), torch.tensor(3), -2]},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, True)},
    "lists": lambda data: {"batch_sampler": [[1, 2], [3], [2, 2, 2]]},
    "endless": lambda data: {"sampler": _Endless()},
    "failing": lambda data: {"sampler": _Failing()},
}


def _epochs(make: Callable[..., Any], data: Any, name: str, count: int, **options: Any) -> Any:
    """(labels of each batch of some epochs, random numbers drawn after each)."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    given = _SAMPLERS[name](data)
    if "sampler" in given:
        given["batch_size"] = 4
    loader = make(data, **given, **options)
    result: list[Any] = []
    for _ in range(count):
        rows = []
        try:
            for number, batch in enumerate(loader):
                rows.append(batch[1].tolist())
                if number == 20:
                    break
        except RuntimeError as error:
            rows.append(str(error).splitlines()[-1].split(": ")[-1])
        numpys = float(np.random.rand())  # noqa: NPY002
        after = [random.random(), float(torch.rand(())), numpys]
        if name == "endless":  # Is asked ahead, as by torch's workers.
            after = []
        result.append((rows, after))
    if isinstance(loader, dlio.DataLoader):
        result.append(loader.stats()["engine"])
    return result


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"drop_last": True}])
@pytest.mark.parametrize("name", list(_SAMPLERS))
def test_order_and_random_numbers_are_torchs(
    opened: _Opened, name: str, options: dict[str, Any]
) -> None:
    if "drop_last" in options and name in ("batches", "lists"):
        options = {}
    torchs = {key: value for key, value in options.items() if key != "num_workers"}
    count = 1 if name == "endless" else 3
    wanted = _epochs(torch.utils.data.DataLoader, opened.plain, name, count, **torchs)
    *given, engine = _epochs(dlio.DataLoader, opened.data, name, count, **options)
    assert given == wanted
    assert engine == ("threads" if name == "endless" else "planned")


@pytest.mark.parametrize("name", ["random", "weighted", "own", "replacement", "lists"])
def test_each_block_is_read_once_and_in_the_first_pass_alone(
    tmp_path: Path, opened: _Opened, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = opened.data.path
    with (
        dlio.open(path, tiers=f"{tmp_path}:64MiB", image_size=16) as data,
        dlio.DataLoader(data, **_SAMPLERS[name](data)) as loader,
    ):
        read: list[int] = []
        inner = data.reader.read

        def counted(samples: Any) -> Any:
            read.extend(np.asarray(samples).tolist())
            return inner(samples)

        def counted_blocks(*given: Any) -> memoryview | None:
            block, (_, _, samples, known) = in_one_piece(*given), given
            if block is not None:
                read.extend(set(samples.tolist()).difference(known))
            return block

        in_one_piece = SourceRequests._in_one_piece
        monkeypatch.setattr(SourceRequests, "_in_one_piece", counted_blocks)
        monkeypatch.setattr(data.reader, "read", counted)
        for _ in loader:
            pass
        assert data.mounted is not None
        filler = data.mounted.fill(Order(len(data), 0, 0, False))
        assert filler is None or filler.join(60)
        assert sorted(read) == sorted(set(read)) == list(range(_N))
        for _ in loader:
            pass
        stats = loader.stats()
        assert sorted(read) == list(range(_N))
        assert stats["engine"] == "planned"
        assert (stats["bytes"]["source"], stats["bytes"]["disk"] > 0) == (0, True)


def test_several_data_sets_in_one_are_read_as_planned(opened: _Opened) -> None:
    path = opened.data.path
    options: dict[str, Any] = {"tiers": "ram:64MiB", "image_size": 16, "train": False}
    with dlio.open(path, **options) as first, dlio.open(path, **options) as second:
        both: Any = ConcatDataset([first, second])
        with dlio.DataLoader(both, 5, sampler=SequentialSampler(both)) as loader:
            batches: list[Any] = list(loader)
            assert loader.stats()["engine"] == "planned"
        images = torch.cat([images for images, _ in batches])
        assert torch.equal(images, torch.stack([both[k][0] for k in range(2 * _N)]))
        with dlio.DataLoader(both, 5, shuffle=True) as loader:
            assert "engine='planned'" in repr(loader)
    with dlio.open(path, **options) as first, dlio.open(path, image_size=24) as other:
        both = ConcatDataset([first, other])
        with dlio.DataLoader(both, 1) as loader:
            assert "engine='torch'" in repr(loader)
            assert [len(images[0][0]) for images, _ in loader] == [16] * _N + [24] * _N


def test_a_pass_that_is_left_early_goes_on_where_it_was(opened: _Opened) -> None:
    torch.manual_seed(5)
    with dlio.DataLoader(opened.data, 2, sampler=RandomSampler(opened.data)) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        rest = [loader.last_samples.tolist() for _ in iterator]
    with dlio.DataLoader(opened.data, 2, sampler=RandomSampler(opened.data)) as loader:
        loader.load_state_dict(state)
        assert len(rest) == 3
        assert [loader.last_samples.tolist() for _ in loader] == rest
        assert loader.stats()["engine"] == "planned"
