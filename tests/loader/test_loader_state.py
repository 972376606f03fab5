"""Loaders of every order keep the contract of states."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

import dlio
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
