"""Data sets, iterators and samplers with a state, for tests against torchdata's loader."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def share(sizes: list[int]) -> range:
    """This worker's part of the numbers; all of them without workers."""
    info = get_worker_info()
    if info is None:
        return range(sum(sizes))
    start = sum(sizes[: info.id])
    return range(start, start + sizes[info.id])


class Counting:
    """An iterator with a state; `random` draws from torch's numbers, which are part of it then."""

    def __init__(self, numbers: range, random: bool) -> None:
        self.numbers, self.random = numbers, random
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        if self.random:
            return self.numbers[int(torch.randint(len(self.numbers), (1,)))]
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"nest": {"at": self.at}}
        if self.random:
            state["nest"]["numbers"] = torch.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["nest"]["at"]
        if self.random:
            torch.set_rng_state(state["nest"]["numbers"])


class ByIterator(IterableDataset[int]):
    """Its iterator has the state."""

    def __init__(self, sizes: list[int], random: bool = False) -> None:
        self.sizes, self.random = sizes, random

    def __iter__(self) -> Iterator[int]:
        return Counting(share(self.sizes), self.random)


class ByGenerator(IterableDataset[Any]):
    """It has the state itself, and counts its epochs."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.at, self.epoch = 0, 0
        self.goes_on: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.at, self.goes_on = self.goes_on or 0, None
        for number in share(self.sizes)[self.at :]:
            self.at += 1
            yield number, self.epoch
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.goes_on, self.epoch = state["at"], state["epoch"]


class Itself(Counting, IterableDataset[int]):
    """A data set that is its own iterator."""

    def __init__(self, sizes: list[int]) -> None:
        Counting.__init__(self, range(sum(sizes)), random=False)


class Stateless(IterableDataset[int]):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        yield from share(self.sizes)


class Growing(IterableDataset[int]):
    """Its state has other keys after each sample."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        parts = {str(k): {"t": torch.tensor(k), "l": list(range(k))} for k in range(self.at)}
        return {"at": self.at, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Samples(Dataset[Any]):
    """Map-style, without a state."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "text": f"s{index}"}


class Random(Samples):
    """Map-style: torch's random numbers, of the worker, are its state."""

    def __getitem__(self, index: int) -> Any:
        return index, int(torch.randint(1000, (1,)))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["numbers"])


class Asked(Samples):
    """Map-style: counts how often it was asked, in each copy."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return index, self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class BySampler(Sampler[int]):
    """Its iterator has the state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return Counting(range(self.count), random=False)

    def __len__(self) -> int:
        return self.count


class SamplerOfEpochs(Sampler[int]):
    """It has the state itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at, self.epoch = 0, 0
        self.goes_on: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.at, self.goes_on = self.goes_on or 0, None
        for index in range(self.at, self.count):
            self.at += 1
            yield (index + self.epoch) % self.count
        self.at = 0
        self.epoch += 1

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.goes_on, self.epoch = state["at"], state["epoch"]
