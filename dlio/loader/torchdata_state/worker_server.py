"""A worker's side: it asks the data set, and answers with batches and states."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from dlio.loader.torchdata_state.state_format import (
    DATASET_ITER_STATE,
    DATASET_STATE,
    FETCHER_ENDED,
    FETCHER_STATE,
    WORKER_ID,
    restore,
    state_of,
)

START: Final = "start"
RESUME: Final = "resume"
FETCH: Final = "fetch"


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """An errand for a worker."""

    verb: str
    """`start` and `resume` make an iterator and answer with the state; `fetch` asks for a batch."""
    number: int = -1
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

    verb: str
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


def fetcher_of(recipe: FetchOptions, dataset: UserDataset) -> Any:
    """Return torch's fetcher; for an iterable data set this begins its iterator."""
    make: Any = DatasetKind.create_fetcher
    return make(recipe.kind, dataset, recipe.batched, recipe.collate, recipe.drop_last)


@dataclass(eq=False)
class WorkerServer(torch.utils.data.Dataset[Any]):
    """A worker's copy of the data set, with the fetcher that asks it.

    In a worker process it stands in the place of the data set of a plain loader of torch.
    """

    dataset: UserDataset
    recipe: FetchOptions
    init: Callable[[int], object] | None
    states: dict[int, State]
    """State of each worker to continue from; empty to start from the beginning."""
    shared_seed: int | None
    ranks: tuple[int, int] = (1, 0)
    """Number of ranks and this one's, among which data pipes are sharded."""
    worker: int = 0
    fetcher: Any = None
    ended: bool = False
    _numbers: torch.Generator = field(default_factory=torch.Generator)

    def __getstate__(self) -> dict[str, Any]:
        # Generators of torch cannot be pickled, and iterators of users' data sets often cannot.
        return {**self.__dict__, "_numbers": None, "fetcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._numbers = torch.Generator()

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
            self._numbers.manual_seed(seed)
            self.dataset = apply_random_seed(self.dataset, self._numbers)

    def __getitem__(self, task: WorkerTask) -> WorkerReply:
        if task.verb == START:
            self._begin(self.states.get(self.worker))
            return WorkerReply(START, -1, state=self.state())
        if task.verb == RESUME:
            self.seed_pipe(task.shared_seed)
            self._begin(None)
            return WorkerReply(RESUME, -1, state=self.state())
        if self.ended:
            return WorkerReply(FETCH, task.number, ended=True)
        try:
            data = self.fetcher.fetch(task.index)
        except StopIteration as error:
            # A StopIteration of a map-style data set would end the pass without an error.
            if not self.recipe.iterable:
                raise RuntimeError("a data set raised StopIteration") from error
            self.ended = True
            return WorkerReply(FETCH, task.number, ended=True, state=self.state())
        return WorkerReply(
            FETCH, task.number, data, state=self.state() if task.wants_state else None
        )

    def state(self) -> State:
        """Return the state of this worker's data set and of its iterator."""
        dataset, fetched = self.dataset, None
        if self.recipe.iterable:
            fetched = {
                DATASET_ITER_STATE: state_of(self.fetcher.dataset_iter),
                FETCHER_ENDED: self.fetcher.ended or self.ended,
            }
            if self.fetcher.dataset_iter is dataset:
                dataset = None  # Its state is there already.
        return {
            WORKER_ID: self.worker,
            DATASET_STATE: state_of(dataset),
            FETCHER_STATE: fetched,
        }

    def _begin(self, state: State | None) -> None:
        """Make the fetcher: the data set's state first, then its iterator, then that one's."""
        # In this order: an iterator may begin from the state of its data set, and then has one of
        # its own.
        self.ended = False
        if state is not None:
            restore(self.dataset, state[DATASET_STATE])
        self.fetcher = fetcher_of(self.recipe, self.dataset)
        if state is not None and state[FETCHER_STATE] is not None and self.recipe.iterable:
            restore(self.fetcher.dataset_iter, state[FETCHER_STATE][DATASET_ITER_STATE])
            # One that has ended may be at the beginning of its next epoch by now.
            self.ended = state[FETCHER_STATE][FETCHER_ENDED]


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
