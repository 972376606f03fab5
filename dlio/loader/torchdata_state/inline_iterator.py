"""The iterator of a pass without workers."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from dlio.loader.contract import State, StatefulObject
from dlio.loader.torch_private import BaseDataLoaderIter, pin_memory
from dlio.loader.torchdata_state import state_format as keys
from dlio.loader.torchdata_state.state_format import MismatchedState, restore, state_of
from dlio.loader.torchdata_state.stateful_samplers import resumed
from dlio.loader.torchdata_state.worker_server import FetchOptions


class InlineIterator(BaseDataLoaderIter):
    """torch's iterator without workers, with a state to continue from.

    The sampler takes the place of the plain loader's, unless it is None. Its `numbers` are those
    that it shares with the base seed, which is drawn after its pass; None if it does not.

    Raises MismatchedState for the state of a loader with workers.
    """

    def __init__(
        self,
        plain: Any,
        sampler: Any,
        state: State | None,
        numbers: torch.Generator | None,
    ) -> None:
        if state is not None and keys.NUM_YIELDED not in state:
            raise MismatchedState(
                "the state of a loader with workers, and this one has none: set num_workers to the "
                "number that it was saved with"
            )
        self.finished = False
        self._drawn = 0
        super().__init__(plain)
        # torch's iterator would make the iterator of an iterable's constant sampler, which is not
        # the user's.
        if sampler is not None:
            self._index_sampler = sampler
            self._sampler_iter = iter(sampler)
        # torch's own iterator asserts the same, without a remedy.
        if self._timeout:
            raise AssertionError("timeout is for loaders with workers: set num_workers")
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            apply_sharding(self._dataset, self._world_size, self._rank)
        if state is None:
            self._fetcher = self._recipe.fetcher(self._dataset)
        else:
            self._load(state)
            # A new pass draws the base seed before its sampler draws; a resumed one must leave the
            # generator where that pass left it.
            if numbers is not None:
                torch.empty((), dtype=torch.int64).random_(generator=numbers)

    def _next_data(self) -> Any:
        data = self._fetcher.fetch(self._next_index())
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)
        return data

    def _next_index(self) -> Any:
        index: Any = next(self._sampler_iter)
        self._drawn += 1
        return index

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.finished = True
            raise

    def state_dict(self) -> State:
        """Return the state after the batches so far."""
        # Data sets give their own dictionaries away, and change them with the next batch.
        return copy.deepcopy(
            {
                keys.INDEX_SAMPLER_STATE: state_of(self._index_sampler),
                keys.SAMPLER_ITER_STATE: state_of(self._sampler_iter),
                keys.SAMPLER_YIELDED: self._drawn,
                keys.NUM_YIELDED: self._num_yielded,
                keys.LEN_CALLED: self._IterableDataset_len_called,
                keys.SHARED_SEED: self._shared_seed,
                **self._recipe.states(self._fetcher, self._dataset),
                keys.FINISHED: self.finished,
            }
        )

    @property
    def yielded(self) -> int:
        """Batches of this pass so far."""
        return int(self._num_yielded)

    @property
    def _recipe(self) -> FetchOptions:
        return FetchOptions(
            self._dataset_kind, self._auto_collation, self._collate_fn, self._drop_last
        )

    def _load(self, state: State) -> None:
        self._drawn = state[keys.SAMPLER_YIELDED]
        self._sampler_iter: Iterator[Any] = resumed(
            self._index_sampler,
            state[keys.INDEX_SAMPLER_STATE],
            state[keys.SAMPLER_ITER_STATE],
            self._drawn,
        )
        self._IterableDataset_len_called = state[keys.LEN_CALLED]
        self._shared_seed = state[keys.SHARED_SEED]
        # The data set first: `iter(dataset)`, which the fetcher calls, may begin from its state.
        restore(self._dataset, state[keys.DATASET_STATE])
        self._fetcher = self._recipe.fetcher(self._dataset)
        yielded = state[keys.NUM_YIELDED]
        if self._recipe.iterable:
            iterator, fetched = self._fetcher.dataset_iter, state[keys.FETCHER_STATE]
            if isinstance(self._dataset, StatefulObject) or isinstance(iterator, StatefulObject):
                if fetched is not None:
                    restore(iterator, fetched[keys.DATASET_ITER_STATE])
                    self._fetcher.ended = fetched[keys.FETCHER_ENDED]
            # Nothing here has a state, so the batches are read again and dropped, as torchdata
            # does.
            elif yielded:
                keys.warn_of_reading_again(yielded)
                for _ in range(yielded):
                    next(self)
        self._num_yielded = yielded
        self.finished = state[keys.FINISHED]
