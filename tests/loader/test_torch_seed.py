"""Without a seed, orders and crops follow torch's: `torch.manual_seed`, or a generator."""

import json
import pickle
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dlio
from dlio.errors import UsageError
from tests.loader import torch_seed_checks
from tests.loader.test_adapt import image_folder

__all__ = ["image_folder"]
_TORCH = torch.utils.data.DataLoader
KINDS = ["folder", "opened", "tensors", "custom"]


class Numbered(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def sets(image_folder: Any, pictures: Path) -> Iterator[dict[str, Any]]:
    """The same number of samples of each kind."""
    opened = dlio.open(str(pictures), image_size=8, tiers="none")
    count = len(opened)
    yield {
        "folder": image_folder(str(pictures), lambda picture: torch.zeros(1)),
        "opened": opened,
        "tensors": TensorDataset(torch.arange(count)),
        "custom": Numbered(count),
    }
    opened.close()


def _order(make: Callable[[Any], Any], kind: str, epochs: int = 2) -> list[list[int]]:
    """Samples of each batch, by a loader that `make` makes with torch's seed at 7."""
    torch.manual_seed(7)
    loader = make(None)
    order = []
    for _ in range(epochs):
        for batch in loader:
            if kind in ("folder", "opened"):
                order.append(loader.last_samples.tolist())
            else:
                order.append((batch[0] if kind == "tensors" else batch).tolist())
    return order


def _generator(seeded: bool) -> torch.Generator | None:
    return torch.Generator().manual_seed(9) if seeded else None


@pytest.mark.parametrize(
    ("size", "drop_last", "seeded"), list(product([1, 5], [False, True], [0, 1]))
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shuffled_order_is_that_of_torch(
    sets: dict[str, Any], kind: str, size: int, drop_last: bool, seeded: bool
) -> None:
    data = Numbered(len(sets[kind]))
    given: dict[str, Any] = {"shuffle": True, "drop_last": drop_last}
    theirs, ours = _generator(seeded), _generator(seeded)
    wanted = _order(lambda _: _TORCH(data, size, generator=theirs, **given), "custom")
    after = torch.get_rng_state()
    for more in ({}, {"num_workers": 2}):
        ours = _generator(seeded)
        options = {**given, **more, "generator": ours}
        made = _order(lambda _: dlio.DataLoader(sets[kind], size, **options), kind)  # noqa: B023
        assert made == wanted
        # Numbers that are drawn behind the passes are the same, too.
        assert torch.equal(torch.get_rng_state(), after)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("seeded", [False, True])
def test_persistent_workers_draw_as_those_of_torch(sets: dict[str, Any], seeded: bool) -> None:
    given: dict[str, Any] = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    theirs, ours = _generator(seeded), _generator(seeded)
    data, opened = Numbered(len(sets["opened"])), sets["opened"]
    wanted = _order(lambda _: _TORCH(data, 4, generator=theirs, **given), "custom", 3)
    made = _order(lambda _: dlio.DataLoader(opened, 4, generator=ours, **given), "opened", 3)
    assert made == wanted


_SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=40)},
    "more": lambda data: {"sampler": RandomSampler(data, num_samples=2 * len(data) + 3)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0] * len(data), 20)},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 4, True)},
}


@pytest.mark.parametrize("name", _SAMPLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_orders_of_samplers_are_those_of_torch(sets: dict[str, Any], kind: str, name: str) -> None:
    data = Numbered(len(sets[kind]))
    size: dict[str, Any] = {} if name == "batches" else {"batch_size": 4}
    wanted = _order(lambda _: _TORCH(data, **size, **_SAMPLERS[name](data)), "custom")
    after = torch.get_rng_state()
    made = _order(lambda _: dlio.DataLoader(sets[kind], **size, **_SAMPLERS[name](data)), kind)
    assert made == wanted
    assert torch.equal(torch.get_rng_state(), after)


def _crops(folder: Path, seed: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with (
        dlio.open(str(folder), image_size=16, tiers="none") as data,
        dlio.DataLoader(data, 8, **options) as loader,
    ):
        return [images.clone() for _ in range(2) for images, _ in loader]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"sampler": range(10)}])
def test_crops_follow_the_seed(pictures: Path, options: dict[str, Any]) -> None:
    first, again, other = (_crops(pictures, seed, **options) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_loaders_over_one_data_set_have_each_their_own_epochs(pictures: Path) -> None:
    torch.manual_seed(1)
    with dlio.open(str(pictures), image_size=16, tiers="none") as data:

        def epochs() -> list[torch.Tensor]:
            loader = dlio.DataLoader(data, 8, sampler=range(8))
            return [images.clone() for _ in range(2) for images, _ in loader]

        first, again = epochs(), epochs()
        assert not torch.equal(*first)
        assert all(map(torch.equal, first, again))
        data.set_epoch(5)  # The user's choice holds for all of them.
        assert torch.equal(*epochs())


def test_random_transforms_of_a_folder_follow_the_seed(image_folder: Any, pictures: Path) -> None:
    def noise(picture: Any) -> torch.Tensor:
        return torch.rand(2)

    def made(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with dlio.DataLoader(image_folder(str(pictures), noise), 8) as loader:
            return torch.cat([batch for batch, _ in loader])

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_a_sample_has_the_crop_of_the_batches(pictures: Path) -> None:
    with dlio.open(str(pictures), image_size=16, tiers="none") as data:
        seen = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            seen.append(data[3][0])
            with dlio.DataLoader(data, 8) as loader:
                assert torch.equal(next(iter(loader))[0][3], data[3][0])
        assert not torch.equal(*seen)


def test_a_seed_that_is_given_draws_nothing(sets: dict[str, Any], pictures: Path) -> None:
    before = torch.get_rng_state()
    with dlio.open(str(pictures), image_size=8, tiers="none", seed=1) as data:
        for loader in (dlio.DataLoader(data, 4, True), dlio.DataLoader(sets["folder"], 4, seed=2)):
            assert len(list(loader)) == len(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_resumed_loader_goes_on_as_the_first_one(
    pictures: Path, shuffle: bool, seeded: bool, steps: int
) -> None:
    with dlio.open(str(pictures), image_size=8, tiers="none") as data:

        def made() -> dlio.DataLoader:
            return dlio.DataLoader(data, 4, shuffle=shuffle, generator=_generator(seeded))

        def rest(loader: dlio.DataLoader, first: Any = None) -> list[Any]:
            batches = [images.tolist() for images, _ in first or ()]
            return batches + [images.tolist() for _ in range(2) for images, _ in loader]

        torch.manual_seed(1)
        loader = made()
        list(loader)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator, None)
        if steps == len(loader):
            next(iterator, None)
        state = json.loads(json.dumps(loader.state_dict()))
        before = rest(loader, iterator)
        torch.manual_seed(2)  # As another process would.
        loaded = made()
        loaded.load_state_dict(state)
        copied = pickle.loads(pickle.dumps(loaded)) if not seeded else None
        after = rest(loaded, loaded if steps < len(loader) else None)
        assert after == before
        if copied is not None:
            copied._data = None
            assert rest(copied, copied if steps < len(loader) else None) == before
        # Seeding torch anew chooses other orders, as it would have in the first run.
        torch.manual_seed(3)
        if shuffle and not seeded:
            other = _order(lambda _: _TORCH(Numbered(len(data)), 4, shuffle=True), "custom", 1)
            torch.manual_seed(7)
            assert [loaded.last_samples.tolist() for _ in loaded] == other


def test_damaged_random_numbers_in_a_state_are_named(pictures: Path) -> None:
    with dlio.open(str(pictures), image_size=8, tiers="none") as data:
        loader = dlio.DataLoader(data, 4, shuffle=True)
        next(iter(loader))
        state = loader.state_dict()
        for wrong in ({"rng": "%"}, {"rng": "AAAA"}, {"shuffle": "x"}):
            fresh = dlio.DataLoader(data, 4, shuffle=True)
            with pytest.raises(UsageError, match=r"random numbers|shuffle"):
                fresh.load_state_dict({**state, **wrong})


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_follow_the_seed_of_the_first_one(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], pictures: Path, ranks: int
) -> None:
    done = mpirun(ranks, "-W", "error", str(Path(torch_seed_checks.__file__)), str(pictures))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reports.sort(key=lambda each: each["rank"])
    alone = torch_seed_checks.main(str(pictures))
    for epoch in range(3):
        shares = [each["steps"][epoch] for each in reports]
        joined = [sample for step in zip(*shares, strict=True) for part in step for sample in part]
        assert joined == [sample for step in alone["steps"][epoch] for sample in step]
    crops: dict[str, str] = {}
    for each in reports:
        crops |= each["crops"]
    assert {key: made for key, made in crops.items() if key in alone["crops"]} == {
        key: made for key, made in alone["crops"].items() if key in crops
    }
    epochs = [
        sample for each in zip(*(r["numbers"] for r in reports), strict=True) for sample in each
    ]
    flat = [sample for part in epochs for sample in part]
    assert sorted(flat[:23]) == sorted(flat[23:]) == list(range(23))
    assert flat == [sample for batch in alone["numbers"] for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_init_fn_does_not_seed_the_process_of_the_user(
    sets: dict[str, Any], workers: int
) -> None:
    called: list[int] = []

    def seeded(number: int) -> None:
        called.append(number)
        torch.manual_seed(number)  # As Lightning's, after seed_everything(workers=True).

    torch.manual_seed(4)
    state = torch.get_rng_state()
    options: dict[str, Any] = {
        "batch_sampler": [[0, 1], [2]],
        "num_workers": workers,
        "generator": torch.Generator(),
        "worker_init_fn": seeded,
    }
    loader = dlio.DataLoader(sets["opened"], **options)
    assert len(list(loader)) == 2
    assert loader.stats()["engine"] == "threads"
    assert not called
    assert torch.equal(torch.get_rng_state(), state)
    list(dlio.DataLoader(sets["opened"], workers="thread", **options))
    assert sorted(called) == list(range(workers))  # Whoever asks for threads has it called there.
