"""The tasks of a pass, drawn from its sampler, and the sampler's state at each snapshot."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from dlio.loader.contract import State
from dlio.loader.torchdata_state.state_format import (
    BASE_SEED,
    INDEX_SAMPLER_STATE,
    LEN_CALLED,
    NUM_WORKERS,
    SAMPLER_ITER_STATE,
    SAMPLER_YIELDED,
    SHARED_SEED,
    state_of,
)
from dlio.loader.torchdata_state.stateful_samplers import resumed
from dlio.loader.torchdata_state.worker_server import FETCH, RESUME, START, WorkerTask


class TaskSampler(torch.utils.data.Sampler[WorkerTask]):
    """The sampler of a plain loader whose workers run a Server.

    Args:
        index_sampler: of the user's loader.
        ahead: batches under way at a time.
        interval: batches from one snapshot to the next; 0 for none after the first.
        loaded: the state to continue from, of the part that does not belong to workers.
    """

    def __init__(
        self,
        index_sampler: Any,
        workers: int,
        ahead: int,
        interval: int,
        iterable: bool,
        loaded: State | None,
    ) -> None:
        self._index_sampler = index_sampler
        self._workers, self._ahead, self._interval = workers, ahead, interval
        self._iterable = iterable
        self._loaded = loaded
        self._verb = START
        self._indices: Iterator[Any] = iter(())
        self._drawn = 0
        self._number = 0
        self.primes = False
        """True if the next iterator is the one that is used: torch makes one before it."""
        self.yielded = 0
        """Batches handed out."""
        self.len_called: int | None = None if loaded is None else loaded[LEN_CALLED]
        self.shared_seed: int | None = None if loaded is None else loaded[SHARED_SEED]
        self.base_seed = 0 if loaded is None else loaded[BASE_SEED]
        self.state_at_beginning: State = {}
        """State of this part before the first draw of the pass."""
        self.snapshots: deque[tuple[int, State]] = deque()
        """State of this part after the draw for a batch, with the batch's number."""

    def __iter__(self) -> Iterator[WorkerTask]:
        self._indices = iter(self._index_sampler)
        self._drawn = self._number = 0
        # torch asks for an iterator in its constructor, before `_reset` asks for the one that it
        # uses. The sampler below has to draw for both, as it would in torch's own loader, or its
        # random numbers differ.
        if not self.primes:
            return iter(())
        self.snapshots.clear()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._drawn = loaded[SAMPLER_YIELDED]
            self._indices = resumed(
                self._index_sampler,
                loaded[INDEX_SAMPLER_STATE],
                loaded[SAMPLER_ITER_STATE],
                self._drawn,
            )
        # Before any draw: a state that is asked for before the first batch begins the pass again.
        self.state_at_beginning = self.state()
        verb, self._verb = self._verb, RESUME
        return self._tasks(verb)

    def state(self) -> State:
        """Return the state as it is now."""
        return {
            NUM_WORKERS: self._workers,
            SAMPLER_ITER_STATE: state_of(self._indices),
            INDEX_SAMPLER_STATE: state_of(self._index_sampler),
            SAMPLER_YIELDED: self._drawn,
            LEN_CALLED: self.len_called,
            SHARED_SEED: self.shared_seed,
            BASE_SEED: self.base_seed,
        }

    def _tasks(self, verb: str) -> Iterator[WorkerTask]:
        for worker in range(self._workers):
            yield WorkerTask(verb, worker=worker, shared_seed=self.shared_seed)
        for index in self._indices:
            self._drawn += 1
            main, worker = self._due()
            # A copy for each batch would cost as much as the sampler's state is large: a
            # permutation, perhaps.
            if main:
                self.snapshots.append((self._number, self.state()))
            self._number += 1
            yield WorkerTask(FETCH, self._number - 1, index, worker)

    def _due(self) -> tuple[bool, bool]:
        """Return (True if the batch may be the last one before a snapshot, True if the worker's
        state after it may be part of one)."""
        every, workers = self._interval, self._workers
        if not every:
            return False, False
        if self._iterable:  # Which worker ends first, and so which batch comes when, is unknown.
            reach = self.yielded % every + 1 + self._ahead
            return reach >= every, reach + workers >= every
        # Batches come from workers in turn, so the last batch of each worker before the snapshot is
        # known.
        return self._drawn % every == 0, (self._drawn - 1) % every + workers >= every
