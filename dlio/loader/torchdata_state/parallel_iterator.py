"""The iterator of a pass with workers, whose states are collected every few batches."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dlio.loader.contract import BatchData, State, UserDataset
from dlio.loader.torch_private import ExceptionWrapper
from dlio.loader.torchdata_state import state_format as keys
from dlio.loader.torchdata_state.state_format import MismatchedState, worker_key
from dlio.loader.torchdata_state.transports import Transport
from dlio.loader.torchdata_state.worker_server import TaskSampler, WorkerReply
from dlio.util.printable import warn_user
from dlio.util.units import counted


class ResumeState:
    """A state to continue from, taken apart.

    Raises MismatchedState for the state of a loader with another number of workers.
    """

    def __init__(self, state: State, workers: int, iterable: bool) -> None:
        if keys.SNAPSHOT not in state:
            raise MismatchedState(
                f"the state of a loader without workers, and this one has {workers}: set "
                "num_workers=0"
            )
        self.state = state
        self.snapshot: State = state[keys.SNAPSHOT]
        self.main: State = self.snapshot[keys.MAIN_SNAPSHOT]
        before = self.main[keys.NUM_WORKERS]
        if before != workers:
            raise MismatchedState(
                f"the state of a loader with {counted(before, 'worker')}, and this one has "
                f"{workers}: set num_workers to the number that it was saved with"
            )
        states = self.snapshot.get(keys.WORKER_SNAPSHOTS, {})
        self.workers: dict[int, State] = {
            number: states[worker_key(number)]
            for number in range(workers)
            if states.get(worker_key(number)) is not None
        }
        self.step: int = self.snapshot[keys.SNAPSHOT_STEP]
        self.last: int = self.snapshot[keys.LAST_WORKER]
        self.steps_since: int = state[keys.STEPS_SINCE]
        self.rereads = iterable and any(
            each[keys.DATASET_STATE] is None
            and each[keys.FETCHER_STATE][keys.DATASET_ITER_STATE] is None
            for each in self.workers.values()
        )
        """True if workers start from the beginning, since nothing in them has a state."""
        self.first = 0 if self.rereads else (self.last + 1) % workers
        """The worker whose turn it is."""


def _reraise(answer: Any) -> None:
    if isinstance(answer, ExceptionWrapper):
        reraise: Any = answer.reraise
        reraise()


class ParallelIterator(Iterator[BatchData]):
    """Batches of one pass after another, with a state.

    `make` makes the transport, for a worker to begin with. There are `interval` batches from one
    snapshot to the next; 0 for none after the first. `loaded` is a state to continue from.
    """

    def __init__(
        self,
        make: Callable[[int], Transport],
        draws: TaskSampler,
        workers: int,
        interval: int,
        loaded: ResumeState | None,
        dataset: UserDataset,
    ) -> None:
        self._draws, self._interval = draws, interval
        self._num_workers = workers
        self._dataset = dataset
        self.finished = False
        self.yielded = 0
        """Batches of this pass so far."""
        self._states: dict[int, State] = {} if loaded is None else dict(loaded.workers)
        self._last = workers - 1
        # Answers that came while the workers began, where order does not matter.
        self._waiting: list[tuple[int, WorkerReply | ExceptionWrapper]] = []
        self.transport = make(0 if loaded is None else loaded.first)
        # Threads keep their transport alive, so its end follows from that of this object.
        weakref.finalize(self, self.transport._shutdown_workers).atexit = False
        try:
            self._begin()
            if loaded is not None:
                self._resume(loaded)
        except BaseException:
            self.transport._shutdown_workers()
            raise

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
            _reraise(answer)
            assert isinstance(answer, WorkerReply)
            if answer.state is not None:
                self._states[worker] = answer.state
            if not answer.ended:
                return self._handed(worker, answer)

    def again(self, shared_seed: int | None) -> None:
        """Begin another pass with the same workers; data pipes that shuffle get a seed."""
        if shared_seed is not None:
            self._draws.shared_seed = shared_seed
        self._states = {}
        self.finished = False
        self.yielded = self._draws.yielded = 0
        self._waiting = []
        self._last = self._num_workers - 1
        self.transport.again()
        self._begin()

    def state_dict(self) -> State:
        """Return the state after the batches so far."""
        state: State = {
            keys.SNAPSHOT: self._snapshot,
            keys.STEPS_SINCE: self.yielded - self._snapshot[keys.SNAPSHOT_STEP],
            keys.FINISHED: self.finished,
        }
        # The states below are those of the last snapshot, which the next one replaces in place.
        return copy.deepcopy(state)

    def close(self) -> None:
        """End the workers."""
        self.transport._shutdown_workers()

    def _handed(self, worker: int, answer: WorkerReply) -> BatchData:
        self.yielded += 1
        self._draws.yielded = self.yielded
        self._last = worker
        if self._interval and self.yielded % self._interval == 0:
            # The sampler is ahead of the batches handed out. Its state of the right moment was kept
            # when the batch was drawn.
            due, main = self._draws.snapshots, None
            while due and due[0][0] <= answer.number:
                main = due.popleft()[1]
            if main is not None:
                self._take_snapshot(main)
        length = self._draws.len_called
        if self._draws.iterable and length is not None and self.yielded > length:
            # As torch's loader does for a data set that yields more than it has said.
            warn_user(
                f"Length of IterableDataset {self._dataset} was reported to be {length}"
                f"(when accessing len(dataloader)), but {self.yielded} samples have been fetched. "
                "For multiprocessing data-loading, this could be caused by not properly "
                "configuring the IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
                "examples.",
                stacklevel=2,
            )
        data, answer.data = answer.data, None
        return data

    def _begin(self) -> None:
        """Wait until each worker has begun, and keep the first state."""
        main = self._draws.state_at_beginning
        begun = 0
        while begun < self._num_workers:
            worker, answer = self.transport.take()
            _reraise(answer)
            if answer.number >= 0:  # Out of order.
                self._waiting.append((worker, answer))
                continue
            begun += 1
            # A data set that has just been restored may not say so before its first batch.
            self._states.setdefault(worker, answer.state)
        self._take_snapshot(main)

    def _take_snapshot(self, main: State) -> None:
        self._snapshot: State = {
            keys.SNAPSHOT_STEP: self.yielded,
            keys.LAST_WORKER: self._last,
            keys.MAIN_SNAPSHOT: main,
            keys.WORKER_SNAPSHOTS: {
                worker_key(worker): self._states[worker] for worker in sorted(self._states)
            },
        }

    def _resume(self, loaded: ResumeState) -> None:
        """Skip the batches that have been handed out since the snapshot."""
        if loaded.rereads:
            if loaded.step:
                keys.warn_of_reading_again(loaded.step)
            # No worker has a state: all batches up to the snapshot are read again.
            for _ in range(loaded.step):
                next(self)
        else:
            self.yielded = self._draws.yielded = loaded.step
            self._last = loaded.last
            self._take_snapshot(loaded.main)
        for _ in range(loaded.steps_since):
            next(self)
        if loaded.state[keys.FINISHED]:
            next(self, None)  # Data sets may count the ends of their epochs.
        self.finished = loaded.state[keys.FINISHED]
