"""torch's own samplers with a state: what they have yielded, and their random numbers before it.

A state has the keys of torchdata's samplers, and the same order follows from the same generator.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, RandomSampler

from dlio.loader.contract import IndexBatches, Indices, State, StatefulObject
from dlio.loader.torch_private import InfiniteConstantSampler
from dlio.loader.torchdata_state.state_format import restore, state_of

_CHUNK: Final = 32
"""Draws at a time with replacement."""


def with_state(
    sampler: Indices,
    batch_sampler: IndexBatches | None,
    random: "StatefulRandom | None",
) -> Any:
    """Return the sampler of a loader's items, with a state where torch's own has none; `random`
    takes the place of torch's default sampler of `shuffle=True`."""
    indices = random or sampler
    if batch_sampler is None:
        return indices
    if type(batch_sampler) is not BatchSampler:
        return batch_sampler
    return StatefulBatches(indices, batch_sampler.batch_size, batch_sampler.drop_last)


def resumed(index_sampler: Any, sampler_state: Any, iter_state: Any, yielded: int) -> Any:
    """Return the iterator of a pass that is resumed; the `yielded` items are skipped where nothing
    else is known."""
    restore(index_sampler, sampler_state)
    iterator: Any = iter(index_sampler)
    # It yields None for ever: there is nothing to skip.
    if isinstance(index_sampler, InfiniteConstantSampler):
        return iterator
    if isinstance(iterator, StatefulObject) or sampler_state is not None:
        restore(iterator, iter_state)
        return iterator
    return islice(iterator, yielded, None)


class StatefulRandom(RandomSampler):
    """torch's RandomSampler, which draws all its numbers from a generator of its own; for None from
    a new one, whose seed is drawn from torch's global one."""

    def __init__(self, source: RandomSampler, generator: torch.Generator | None) -> None:
        # As torch does in `RandomSampler.__iter__`, but once: later passes draw from the same
        # generator, whose state can be saved.
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        self.numbers: torch.Generator = generator
        super().__init__(
            source.data_source, source.replacement, source._num_samples, generator=generator
        )

    def __iter__(self) -> Iterator[int]:
        return _RandomPass(self)


class _RandomPass(Iterator[int]):
    def __init__(self, sampler: StatefulRandom) -> None:
        self._sampler = sampler
        # A state says where the generator was before the pass and how far the pass is: to resume,
        # the permutation is drawn again and skipped, which is cheaper than saving it.
        self._before = sampler.numbers.get_state()
        self._yielded = 0
        self._drawn: Iterator[int] = iter(self._draw())

    def __next__(self) -> int:
        if self._yielded >= self._sampler.num_samples:
            raise StopIteration
        following = next(self._drawn, None)
        if following is None:
            self._drawn = iter(self._draw())
            following = next(self._drawn)
        self._yielded += 1
        return following

    def _draw(self) -> list[int]:
        count, numbers = len(self._sampler.data_source), self._sampler.numbers
        if self._sampler.replacement:
            # In the chunks in which torch's sampler draws, or the numbers would differ.
            drawn = torch.randint(count, (_CHUNK,), dtype=torch.int64, generator=numbers)
        else:
            drawn = torch.randperm(count, generator=numbers)
        indices: list[int] = drawn.tolist()
        return indices

    def state_dict(self) -> State:
        return {"yielded": self._yielded, "generator": self._before}

    def load_state_dict(self, state: State) -> None:
        self._before = state["generator"]
        self._sampler.numbers.set_state(self._before)
        self._drawn, self._yielded = iter(self._draw()), 0
        for _ in range(state["yielded"]):
            next(self)


class StatefulBatches(BatchSampler):
    """torch's BatchSampler, whose iterator has the state of the sampler below it."""

    def __iter__(self) -> Iterator[list[int]]:
        return _BatchSamplerPass(self)


class _BatchSamplerPass(Iterator[list[int]]):
    def __init__(self, batches: StatefulBatches) -> None:
        self._batches = batches
        self._indices: Iterator[Any] = iter(batches.sampler)
        self._yielded = 0

    def __next__(self) -> list[int]:
        batch = list(islice(self._indices, self._batches.batch_size))
        self._yielded += len(batch)
        if not batch or (self._batches.drop_last and len(batch) < self._batches.batch_size):
            raise StopIteration
        return batch

    def state_dict(self) -> State:
        state: State = {"samples_yielded": self._yielded}
        if isinstance(self._batches.sampler, StatefulObject):
            state["sampler_state"] = state_of(self._batches.sampler)
        if isinstance(self._indices, StatefulObject):
            state["sampler_iter_state"] = state_of(self._indices)
        return state

    def load_state_dict(self, state: State) -> None:
        self._yielded = state["samples_yielded"]
        own, passed = state.get("sampler_state"), state.get("sampler_iter_state")
        self._indices = resumed(self._batches.sampler, own, passed, self._yielded)
