"""The iterator of a pass with workers, whose states are collected every few batches."""

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Self

from dlio.loader.contract import BatchData, State
from dlio.loader.torch_private import ExceptionWrapper
from dlio.loader.torchdata_state.state_format import (
    DATASET_ITER_STATE,
    DATASET_STATE,
    FETCHER_STATE,
    FINISHED,
    LAST_WORKER,
    MAIN_SNAPSHOT,
    NUM_WORKERS,
    SNAPSHOT,
    SNAPSHOT_STEP,
    STEPS_SINCE,
    WORKER_SNAPSHOTS,
    MismatchedState,
    worker_key,
)
from dlio.loader.torchdata_state.task_sampler import TaskSampler
from dlio.loader.torchdata_state.transports import Transport
from dlio.loader.torchdata_state.worker_server import WorkerReply


class ResumeState:
    """A state to continue from, taken apart.

    Raises MismatchedState for the state of a loader with another number of workers.
    """

    def __init__(self, state: State, workers: int, iterable: bool) -> None:
        if SNAPSHOT not in state:
            raise MismatchedState(
                f"the state of a loader without workers, and this one has {workers}: set "
                "num_workers=0"
            )
        self.state = state
        self.snapshot: State = state[SNAPSHOT]
        self.main: State = self.snapshot[MAIN_SNAPSHOT]
        if self.main[NUM_WORKERS] != workers:
            raise MismatchedState(
                f"the state of a loader with {self.main[NUM_WORKERS]} workers, and this one has "
                f"{workers}: set num_workers to the number that it was saved with"
            )
        states = self.snapshot.get(WORKER_SNAPSHOTS, {})
        self.workers: dict[int, State] = {
            number: states[worker_key(number)]
            for number in range(workers)
            if states.get(worker_key(number)) is not None
        }
        self.step: int = self.snapshot[SNAPSHOT_STEP]
        self.last: int = self.snapshot[LAST_WORKER]
        self.steps_since: int = state[STEPS_SINCE]
        self.rereads = iterable and any(
            each[DATASET_STATE] is None and each[FETCHER_STATE][DATASET_ITER_STATE] is None
            for each in self.workers.values()
        )
        """True if workers start from the beginning, since nothing in them has a state."""

    def first(self, workers: int) -> int:
        """Return the worker whose turn it is."""
        return 0 if self.rereads else (self.last + 1) % workers


class ParallelIterator:
    """Batches of one pass after another, with a state.

    Args:
        make: makes the transport, for a worker to begin with, with the workers' states.
        interval: batches from one snapshot to the next; 0 for none after the first.
        loaded: state to continue from; None to start from the beginning.
        warn_beyond: warns if there are more batches than the loader has said; None if it was not
            asked.
        forward: says that batches are read again, for a data set without a state.
    """

    def __init__(
        self,
        make: Callable[[int], Transport],
        draws: TaskSampler,
        workers: int,
        interval: int,
        loaded: ResumeState | None,
        warn_beyond: Callable[[int], None] | None,
        forward: Callable[[int], None],
    ) -> None:
        self._draws, self._interval = draws, interval
        self._num_workers = workers
        self._warn_beyond = warn_beyond
        self.finished = False
        self._yielded = 0
        self._states: dict[int, State] = {} if loaded is None else dict(loaded.workers)
        self._last = workers - 1
        # Answers that came while the workers began, where order does not matter.
        self._waiting: list[tuple[int, WorkerReply | ExceptionWrapper]] = []
        self.transport = make(0 if loaded is None else loaded.first(workers))
        # Threads keep their transport alive, so its end follows from that of this object.
        weakref.finalize(self, self.transport._shutdown_workers).atexit = False
        try:
            self._begin()
            if loaded is not None:
                self._resume(loaded, forward)
        except BaseException:
            self.transport._shutdown_workers()
            raise

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        # People who look into torch's iterator, such as Lightning, find its attributes here.
        transport = self.__dict__.get("transport")
        if transport is None or not name.startswith("_") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(transport, name)

    def __next__(self) -> BatchData:
        while True:
            try:
                worker, answer = self._waiting.pop(0) if self._waiting else self.transport.take()
            except StopIteration:
                self.finished = True
                raise
            if isinstance(answer, ExceptionWrapper):
                reraise: Any = answer.reraise
                reraise()
            assert isinstance(answer, WorkerReply)
            if answer.state is not None:
                self._states[worker] = answer.state
            if not answer.ended:
                return self._handed(worker, answer)

    def reseed(self, shared_seed: int) -> None:
        """Choose the seed of the next pass, for data pipes that shuffle."""
        self._draws.shared_seed = shared_seed

    def again(self) -> None:
        """Begin another pass with the same workers."""
        self._states = {}
        self.finished = False
        self._yielded = self._draws.yielded = 0
        self._waiting = []
        self._last = self._num_workers - 1
        self.transport.again()
        self._begin()

    def state_dict(self) -> State:
        """Return the state after the batches so far."""
        state: State = {
            SNAPSHOT: self._snapshot,
            STEPS_SINCE: self._yielded - self._snapshot[SNAPSHOT_STEP],
            FINISHED: self.finished,
        }
        # The states below are those of the last snapshot, which the next one replaces in place.
        return copy.deepcopy(state)

    def close(self) -> None:
        """End the workers."""
        self.transport._shutdown_workers()

    def _handed(self, worker: int, answer: WorkerReply) -> BatchData:
        self._yielded += 1
        self._draws.yielded = self._yielded
        self._last = worker
        if self._interval and self._yielded % self._interval == 0:
            # The sampler is ahead of the batches handed out. Its state of the right moment was kept
            # when the batch was drawn.
            due, main = self._draws.snapshots, None
            while due and due[0][0] <= answer.number:
                main = due.popleft()[1]
            if main is not None:
                self._take_snapshot(main)
        if self._warn_beyond is not None:
            self._warn_beyond(self._yielded)
        data, answer.data = answer.data, None
        return data

    def _begin(self) -> None:
        """Wait until each worker has begun, and keep the first state."""
        main = self._draws.state_at_beginning
        begun = 0
        while begun < self._num_workers:
            worker, answer = self.transport.take()
            if isinstance(answer, ExceptionWrapper):
                reraise: Any = answer.reraise
                reraise()
            if answer.number >= 0:  # Out of order.
                self._waiting.append((worker, answer))
                continue
            begun += 1
            # A data set that has just been restored may not say so before its first batch.
            self._states.setdefault(worker, answer.state)
        self._take_snapshot(main)

    def _take_snapshot(self, main: State) -> None:
        self._snapshot: State = {
            SNAPSHOT_STEP: self._yielded,
            LAST_WORKER: self._last,
            MAIN_SNAPSHOT: main,
            WORKER_SNAPSHOTS: {
                worker_key(worker): self._states[worker] for worker in sorted(self._states)
            },
        }

    def _resume(self, loaded: ResumeState, forward: Callable[[int], None]) -> None:
        """Skip the batches that have been handed out since the snapshot."""
        if loaded.rereads:
            if loaded.step:
                forward(loaded.step)
            # No worker has a state: all batches up to the snapshot are read again.
            for _ in range(loaded.step):
                next(self)
        else:
            self._yielded = self._draws.yielded = loaded.step
            self._last = loaded.last
            self._take_snapshot(loaded.main)
        for _ in range(loaded.steps_since):
            next(self)
        if loaded.state[FINISHED]:
            next(self, None)  # Data sets may count the ends of their epochs.
        self.finished = loaded.state[FINISHED]


def warn_beyond(dataset: object, length: int, yielded: int) -> None:
    """Warn, as torch's loader does, of an iterable data set that yields more than it has said."""
    if yielded > length:
        warnings.warn(
            f"Length of IterableDataset {dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {yielded} samples have been fetched. For "
            "multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
            "examples.",
            stacklevel=2,
        )
