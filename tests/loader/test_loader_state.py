"""Loaders of every order keep the contract of states."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

import dlio
from dlio.errors import UsageError
from dlio.testing import LoaderStateTests

COUNT = 23


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


class TestPlanned(LoaderStateTests):
    """A data set of dlio.open, in the order of the formula."""

    @pytest.fixture(autouse=True)
    def _opened(self, pictures: Path) -> Iterator[None]:
        with dlio.open(str(pictures), image_size=8, tiers="none") as self.data:
            yield

    def make(self) -> dlio.DataLoader:
        return dlio.DataLoader(self.data, 3, shuffle=True, seed=4)

    def twin(self) -> dlio.DataLoader:
        return dlio.DataLoader(self.data, 3, shuffle=True, seed=4, num_workers=2)


class TestFormulaOfAnyDataSet(LoaderStateTests):
    def make(self) -> dlio.DataLoader:
        return dlio.DataLoader(list(range(COUNT)), 4, shuffle=True, seed=4)

    def twin(self) -> dlio.DataLoader:
        return dlio.DataLoader(list(range(COUNT)), 4, shuffle=True, seed=4, num_workers=2)


class TestInOrder(LoaderStateTests):
    def make(self) -> dlio.DataLoader:
        return dlio.DataLoader(list(range(COUNT)), 4)


class _Sampler(LoaderStateTests):
    """Samplers of torch draw from a seed that the state does not go beyond."""

    follows = False

    def loader(self, workers: int) -> dlio.DataLoader:
        raise NotImplementedError

    def make(self) -> dlio.DataLoader:
        torch.manual_seed(5)
        return self.loader(0)

    def twin(self) -> dlio.DataLoader:
        torch.manual_seed(6)  # Numbers drawn elsewhere must not matter.
        return self.loader(2)


class TestShuffled(_Sampler):
    def loader(self, workers: int) -> dlio.DataLoader:
        return dlio.DataLoader(list(range(COUNT)), 4, shuffle=True, num_workers=workers)


class TestWeightedSampler(_Sampler):
    def loader(self, workers: int) -> dlio.DataLoader:
        sampler = WeightedRandomSampler([1.0] * COUNT, COUNT)
        return dlio.DataLoader(list(range(COUNT)), 4, sampler=sampler, num_workers=workers)


class TestBatchSampler(_Sampler):
    def loader(self, workers: int) -> dlio.DataLoader:
        data = list(range(COUNT))
        sampler = BatchSampler(RandomSampler(data), 4, False)
        return dlio.DataLoader(data, batch_sampler=sampler, num_workers=workers)


class TestDistributedSampler(_Sampler):
    def loader(self, workers: int) -> dlio.DataLoader:
        data = list(range(2 * COUNT))
        sampler: DistributedSampler[int] = DistributedSampler(data, 2, 1, shuffle=True, seed=4)  # type: ignore[arg-type]
        return dlio.DataLoader(data, 4, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("mode", ["batch", "local", "ring"])
def test_what_lost_ranks_had_left_comes_at_the_end_of_the_epoch(pictures: Path, mode: str) -> None:
    with dlio.open(str(pictures), image_size=8, tiers="ram:16MiB") as data:

        def made() -> dlio.DataLoader:
            return dlio.DataLoader(data, 3, shuffle=True, seed=4, mode=mode, num_workers=1)

        first = made()
        trained: list[int] = []
        batches = iter(first)
        for _ in range(2):
            next(batches)
            trained += first.last_samples.tolist()
        state = first.state_dict()
        again = trained[1:3]
        second = made()
        second.load_state_dict({**state, "again": again})
        rest: list[int] = []
        states = []
        for _ in second:
            rest += second.last_samples.tolist()
            states.append(second.state_dict())
        assert sorted(rest) == sorted([*set(range(len(data))) - set(trained), *again])
        assert rest[-len(again) :] == again
        # From any place on, on as many ranks.
        third = made()
        third.load_state_dict(states[0])
        left: list[int] = []
        for _ in third:
            left += third.last_samples.tolist()
        assert left == rest[3:]
        assert all("again" in each for each in states[:-1])
        third.load_state_dict(states[-1])
        for _ in range(2):  # Nothing is left of it: the next epoch has all samples once.
            left = [sample for _ in third for sample in third.last_samples.tolist()]
        assert sorted(left) == list(range(len(data)))
        for loader in (first, second, third):
            loader.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_another_order_is_refused_in_the_middle_of_an_epoch(
    pictures: Path, shuffle: bool
) -> None:
    with dlio.open(str(pictures), image_size=16) as data:
        with dlio.DataLoader(data, 2, shuffle=shuffle) as loader:
            batches = iter(loader)
            next(batches)
            middle = loader.state_dict()
            list(batches)
            end = loader.state_dict()
        with dlio.DataLoader(data, 2, shuffle=not shuffle) as other:
            other.load_state_dict(middle)
            with pytest.raises(UsageError, match=f"with shuffle={shuffle}, and this loader has"):
                iter(other)
        with dlio.DataLoader(data, 2, shuffle=not shuffle) as other:
            other.load_state_dict(end)
            assert len(list(other)) == 6
        # States of before say nothing of it.
        with dlio.DataLoader(data, 2, shuffle=shuffle) as again:
            again.load_state_dict({key: middle[key] for key in middle if key != "shuffled"})
            assert len(list(again)) == 5


def _middle_and_end(loader: dlio.DataLoader) -> tuple[Any, Any]:
    batches = iter(loader)
    next(batches)
    middle = loader.state_dict()
    list(batches)
    return middle, loader.state_dict()


@pytest.mark.parametrize(
    ("shuffle", "count", "wanted"),
    [
        (False, 23, "of RandomSampler over 23 indexes does not fit this loader, in that of Sequen"),
        (True, 24, "over 23 indexes does not fit this loader, in that of RandomSampler over 24"),
    ],
)
def test_a_state_of_another_sampler_is_refused_in_the_middle_of_an_epoch(
    shuffle: bool, count: int, wanted: str
) -> None:
    middle, end = _middle_and_end(dlio.DataLoader(list(range(23)), 2, shuffle=True, num_workers=1))

    def other() -> dlio.DataLoader:
        return dlio.DataLoader(list(range(count)), 2, shuffle=shuffle, num_workers=1)

    loader = other()
    loader.load_state_dict(middle)
    with pytest.raises(UsageError, match=wanted):
        iter(loader)
    loader = other()
    loader.load_state_dict(end)
    assert len(list(loader)) == 12
    # States of before say nothing of it.
    loader = dlio.DataLoader(list(range(23)), 2, shuffle=True, num_workers=1)
    loader.load_state_dict({key: middle[key] for key in middle if key != "order"})
    assert len(list(loader)) == 11


@pytest.mark.parametrize("saved", [True, False], ids=["to torch's order", "to dlio's order"])
def test_a_state_of_dlios_order_and_one_of_torchs_are_not_taken_for_each_other(saved: bool) -> None:
    def loader(own: bool) -> dlio.DataLoader:
        more = {"shuffle": True, "seed": 0} if own else {"shuffle": False}
        return dlio.DataLoader(list(range(12)), 4, num_workers=1, **more)

    middle, _ = _middle_and_end(loader(saved))
    with pytest.raises(UsageError, match=r"^state of a loader .* does not fit this one, .*: make"):
        loader(not saved).load_state_dict(middle)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_may_have_another_length_in_the_next_epoch(shuffle: bool) -> None:
    samples = list(range(20))
    # With a seed the order is dlio's own, without one a sampler's.
    for seed in (1, None):
        given = samples[:]
        loader = dlio.DataLoader(given, 4, shuffle=shuffle, seed=seed, num_workers=1)
        for count in (20, 33, 7):
            given[:] = range(count)
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(count))
        loader.close()
