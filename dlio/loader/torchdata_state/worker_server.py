"""Tasks for workers, drawn from a sampler, and the worker's side, which answers with batches and
states."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed

from dlio.loader.contract import BatchData, CollateFn, State, UserDataset
from dlio.loader.torch_private import (
    DatasetKind,
    pin_memory,
    sharding_worker_init,
    worker_module,
)
from dlio.loader.torchdata_state import state_format as keys
from dlio.loader.torchdata_state.state_format import restore, state_of
from dlio.loader.torchdata_state.stateful_samplers import resumed

_BEGINNING: Final = -1
"""Number of the task that begins a pass."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """An errand for a worker: a batch, or to make an iterator and to answer with the state."""

    number: int = _BEGINNING
    """Of the batch, counted from the beginning of the pass."""
    index: Any = None
    """The batch's indices, or the one index."""
    wants_state: bool = False
    worker: int | None = None
    """The worker that does it; None for the next one in turn."""
    shared_seed: int | None = None
    """For data pipes that shuffle."""


@dataclass(slots=True)
class WorkerReply:
    """A worker's answer to a task."""

    number: int
    data: BatchData = None
    ended: bool = False
    """True if the worker's data set has no more samples."""
    state: State | None = None

    def pin_memory(self, device: Any = None) -> "WorkerReply":
        """Pin the batch; called by torch's thread for it."""
        self.data = pin_memory(self.data, device)
        return self


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How a batch is made."""

    kind: int
    """torch's number of the kind of data set."""
    batched: bool
    collate: CollateFn
    drop_last: bool

    @property
    def iterable(self) -> bool:
        return self.kind == DatasetKind.Iterable

    def fetcher(self, dataset: UserDataset) -> Any:
        """Return torch's fetcher; for an iterable data set this begins its iterator."""
        make: Any = DatasetKind.create_fetcher
        return make(self.kind, dataset, self.batched, self.collate, self.drop_last)

    def states(self, fetcher: Any, dataset: UserDataset, ended: bool = False) -> State:
        """Return the states of a data set and of its iterator, which a fetcher holds."""
        fetched = None
        if self.iterable:
            fetched = {
                keys.DATASET_ITER_STATE: state_of(fetcher.dataset_iter),
                keys.FETCHER_ENDED: fetcher.ended or ended,
            }
            # A data set that is its own iterator would be saved, and restored, twice.
            if fetcher.dataset_iter is dataset:
                dataset = None
        return {keys.DATASET_STATE: state_of(dataset), keys.FETCHER_STATE: fetched}


@dataclass(eq=False)
class WorkerServer(torch.utils.data.Dataset[Any]):
    """A worker's copy of the data set, with the fetcher that asks it.

    In a worker process it stands in the place of the data set of a plain loader of torch.
    """

    dataset: UserDataset
    recipe: FetchOptions
    init: Callable[[int], object] | None
    states: dict[int, State]
    """State of each worker for its first pass to continue from; empty to start from the beginning.
    """
    shared_seed: int | None
    ranks: tuple[int, int] = (1, 0)
    """Number of ranks and this one's, among which data pipes are sharded."""
    worker: int = 0
    fetcher: Any = None
    ended: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Iterators of users' data sets often cannot be pickled.
        return {**self.__dict__, "fetcher": None}

    def prepare(self, worker: int) -> None:
        """Call the user's function for a new worker."""
        self.worker = worker
        init: Any = self.init
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            # As torch does around a user's function, which then finds the pipe sharded.
            init = functools.partial(sharding_worker_init, init, *self.ranks)
        if init is not None:
            init(worker)

    def seed_pipe(self, seed: int | None) -> None:
        """Seed the data pipes that shuffle, all workers alike."""
        if isinstance(self.dataset, IterDataPipe) and seed is not None:
            self.dataset = apply_random_seed(self.dataset, torch.Generator().manual_seed(seed))

    def __getitem__(self, task: WorkerTask) -> WorkerReply:
        if task.number == _BEGINNING:
            self.seed_pipe(task.shared_seed)
            self._begin(self.states.pop(self.worker, None))
            return WorkerReply(_BEGINNING, state=self.state())
        if self.ended:
            return WorkerReply(task.number, ended=True)
        try:
            data = self.fetcher.fetch(task.index)
        except StopIteration as error:
            # A StopIteration of a map-style data set would end the pass without an error.
            if not self.recipe.iterable:
                raise RuntimeError("a data set raised StopIteration") from error
            self.ended = True
            return WorkerReply(task.number, ended=True, state=self.state())
        return WorkerReply(task.number, data, state=self.state() if task.wants_state else None)

    def state(self) -> State:
        """Return the state of this worker's data set and of its iterator."""
        states = self.recipe.states(self.fetcher, self.dataset, self.ended)
        return {keys.WORKER_ID: self.worker, **states}

    def _begin(self, state: State | None) -> None:
        """Make the fetcher: the data set's state first, then its iterator, then that one's."""
        # In this order: an iterator may begin from the state of its data set, and then has one of
        # its own.
        self.ended = False
        if state is not None:
            restore(self.dataset, state[keys.DATASET_STATE])
        self.fetcher = self.recipe.fetcher(self.dataset)
        if state is not None and state[keys.FETCHER_STATE] is not None and self.recipe.iterable:
            restore(self.fetcher.dataset_iter, state[keys.FETCHER_STATE][keys.DATASET_ITER_STATE])
            # One that has ended may be at the beginning of its next epoch by now.
            self.ended = state[keys.FETCHER_STATE][keys.FETCHER_ENDED]


class TaskSampler(torch.utils.data.Sampler[WorkerTask]):
    """The sampler of a plain loader whose workers run a Server.

    `ahead` batches are under way at a time, and `interval` from one snapshot to the next; 0 for
    none after the first. `loaded` is the part of a state to continue from that does not belong to
    workers.
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
        self.iterable = iterable
        self._loaded = loaded
        self._indices: Iterator[Any] = iter(())
        self._drawn = 0
        self._number = 0
        self.primes = False
        """True if the next iterator is the one that is used: torch makes one before it."""
        self.yielded = 0
        """Batches handed out."""
        self.len_called: int | None = None if loaded is None else loaded[keys.LEN_CALLED]
        self.shared_seed: int | None = None if loaded is None else loaded[keys.SHARED_SEED]
        self.base_seed = 0 if loaded is None else loaded[keys.BASE_SEED]
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
            self._drawn = loaded[keys.SAMPLER_YIELDED]
            self._indices = resumed(
                self._index_sampler,
                loaded[keys.INDEX_SAMPLER_STATE],
                loaded[keys.SAMPLER_ITER_STATE],
                self._drawn,
            )
        # Before any draw: a state that is asked for before the first batch begins the pass again.
        self.state_at_beginning = self.state()
        return self._tasks()

    def state(self) -> State:
        """Return the state as it is now."""
        return {
            keys.NUM_WORKERS: self._workers,
            keys.SAMPLER_ITER_STATE: state_of(self._indices),
            keys.INDEX_SAMPLER_STATE: state_of(self._index_sampler),
            keys.SAMPLER_YIELDED: self._drawn,
            keys.LEN_CALLED: self.len_called,
            keys.SHARED_SEED: self.shared_seed,
            keys.BASE_SEED: self.base_seed,
        }

    def _tasks(self) -> Iterator[WorkerTask]:
        for worker in range(self._workers):
            yield WorkerTask(worker=worker, shared_seed=self.shared_seed)
        for index in self._indices:
            self._drawn += 1
            main, worker = self._due()
            # A copy for each batch would cost as much as the sampler's state is large: a
            # permutation, perhaps.
            if main:
                self.snapshots.append((self._number, self.state()))
            self._number += 1
            yield WorkerTask(self._number - 1, index, worker)

    def _due(self) -> tuple[bool, bool]:
        """Return (True if the batch may be the last one before a snapshot, True if the worker's
        state after it may be part of one)."""
        every, workers = self._interval, self._workers
        if not every:
            return False, False
        if self.iterable:  # Which worker ends first, and so which batch comes when, is unknown.
            reach = self.yielded % every + 1 + self._ahead
            return reach >= every, reach + workers >= every
        # Batches come from workers in turn, so the last batch of each worker before the snapshot is
        # known.
        return self._drawn % every == 0, (self._drawn - 1) % every + workers >= every


def start(worker: int) -> None:
    """Set up a worker process: torch calls it there as `worker_init_fn`."""
    info = get_worker_info()
    assert info is not None
    server = info.dataset
    assert isinstance(server, WorkerServer)
    server.seed_pipe(server.shared_seed)
    # Users ask for their own data set.
    try:
        own: Any = replace(info, dataset=server.dataset)
    except TypeError:  # torch before 2.13: no dataclass.
        own = worker_module.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=server.dataset
        )
    worker_module._worker_info = own
    server.prepare(worker)
