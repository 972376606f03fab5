"""Carriers of tasks to workers and of their answers: processes, or threads of this process."""

import copy
import queue
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dlio.errors import DlioError, UsageError
from dlio.loader.contract import BatchData
from dlio.loader.torchdata_state.task_sampler import TaskSampler
from dlio.loader.torchdata_state.worker_server import WorkerReply, WorkerServer, WorkerTask
from dlio.loader.worker_info import clear_worker_info, set_worker_info
from dlio.util.threads import Workers

_POLL_S: Final = 0.2


def same(reply: BatchData) -> BatchData:
    """Return the argument: the collate function of workers that answer by themselves."""
    return reply


class Transport(Protocol):
    """Brings tasks to workers, each to the next worker in turn, and answers back in order."""

    def take(self) -> tuple[int, Any]:
        """Return (worker, answer): a Reply, or torch's wrapper of an exception.

        Raises StopIteration after the last one.
        """

    def again(self) -> None:
        """Begin another pass with the same workers."""

    def _shutdown_workers(self) -> None:
        """End the workers."""


class _Turns:
    """The turns of the workers that have samples left."""

    def __init__(self, workers: int, first: int, most: int | None) -> None:
        self._workers, self._next, self._most = workers, first, most
        self.ended: set[int] = set()

    def take(self, under_way: list[int]) -> int | None:
        """Return the next worker; None if all have ended.

        Args:
            under_way: tasks of each worker, which bound its part unless answers come in order.
        """
        for _ in range(self._workers):
            worker, self._next = self._next, (self._next + 1) % self._workers
            left = self._workers - len(self.ended)
            if worker not in self.ended and (
                self._most is None or under_way[worker] < self._most // left
            ):
                return worker
        return None


class ProcessTransport(_MultiProcessingDataLoaderIter):
    """torch's worker processes.

    Args:
        plain: a loader of torch with a Server as its data set and Draws as its sampler.
        first: the worker that gets the first batch.
        loads: True if the base seed is one that was saved.
    """

    def __init__(self, plain: Any, draws: TaskSampler, first: int, loads: bool) -> None:
        self._draws, self._first, self._loads = draws, first, loads
        self._plain = plain
        super().__init__(plain)

    # torch draws the base seed and starts the processes with it in one function.
    @property
    def _base_seed(self) -> int:
        return self._draws.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if not self._loads:
            self._draws.base_seed = drawn

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        most = None if loader.in_order else self._prefetch_factor * self._num_workers
        self._turns = _Turns(self._num_workers, self._first if first_iter else 0, most)
        self._draws.primes = True
        super()._reset(loader, first_iter)

    def again(self) -> None:
        self._reset(self._plain)

    def take(self) -> tuple[int, Any]:
        following: Any = self._next_data
        taken: tuple[int, Any] = following()
        return taken

    def _try_put_index(self) -> None:
        task = next(self._sampler_iter, None)
        if task is None:
            return
        worker = task.worker
        if worker is None:
            worker = self._turns.take(self._workers_num_tasks)
        if worker is None:
            return
        self._index_queues[worker].put((self._send_idx, task))
        self._task_info[self._send_idx] = (worker,)
        self._workers_num_tasks[worker] += 1
        self._tasks_outstanding += 1
        self._send_idx += 1

    def _process_data(self, data: Any, worker: int) -> tuple[int, Any]:
        self._workers_num_tasks[worker] -= 1
        if isinstance(data, WorkerReply) and data.ended:
            self._turns.ended.add(worker)
        self._try_put_index()
        return worker, data


class ThreadTransport:
    """Threads of this process, each with a Server of its own.

    Args:
        server: as for a process; the data set is copied for each thread if `copies`, which it must
            be if it has a state, or is an iterator.
        pin: copies a batch into page-locked memory; None to leave it.
    """

    def __init__(
        self,
        server: WorkerServer,
        draws: TaskSampler,
        first: int,
        workers: int,
        ahead: int,
        in_order: bool,
        timeout_s: float,
        generator: torch.Generator | None,
        copies: bool,
        pin: Callable[[BatchData], BatchData] | None,
        loads: bool,
    ) -> None:
        self._draws, self._ahead, self._in_order = draws, ahead, in_order
        self._timeout_s, self._pin = timeout_s, pin
        iter(draws)
        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        if not loads:
            draws.base_seed = int(drawn.item())
        self._num_workers = workers
        server.seed_pipe(server.shared_seed)
        self._servers = [_copied(server) if copies else copy.copy(server) for _ in range(workers)]
        self._queues: list[queue.SimpleQueue[tuple[int, WorkerTask] | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        self._answers: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self._group = Workers("dlio-stateful", self._run, workers, wake=self._wake)
        self._workers = self._group.threads
        self._begin(first)
        self._group.start()

    def _begin(self, first: int) -> None:
        self._turns = _Turns(self._num_workers, first, None if self._in_order else self._ahead)
        self._under_way = [0] * self._num_workers
        self._sent = self._taken = 0
        self._early: dict[int, tuple[int, Any]] = {}
        self._draws.primes = True
        self._tasks = iter(self._draws)
        for _ in range(self._ahead):
            self._put()

    def again(self) -> None:
        while self._taken < self._sent:  # Of the pass that is left unfinished.
            self._answer()
            self._taken += 1
        self._begin(0)

    def take(self) -> tuple[int, Any]:
        if self._taken == self._sent:
            raise StopIteration
        wanted = self._taken if self._in_order else None
        while wanted not in self._early:
            number, worker, answer = self._answer()
            if wanted is None:
                self._early[number] = worker, answer
                wanted = number
                break
            self._early[number] = worker, answer
        worker, answer = self._early.pop(wanted)
        self._taken += 1
        self._under_way[worker] -= 1
        if isinstance(answer, WorkerReply) and answer.ended:
            self._turns.ended.add(worker)
        self._put()
        return worker, answer

    def _put(self) -> None:
        task = next(self._tasks, None)
        if task is None:
            return
        worker = task.worker
        if worker is None:
            worker = self._turns.take(self._under_way)
        if worker is None:
            return
        self._queues[worker].put((self._sent, task))
        self._under_way[worker] += 1
        self._sent += 1

    def _answer(self) -> tuple[int, int, Any]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                if self._group.stopping.is_set():
                    raise DlioError(
                        "the loader was closed while a batch was awaited: keep it open"
                    ) from None
                if not self._group.alive() and self._answers.empty():
                    raise DlioError(
                        "the loader's threads have ended, as they do in a forked process: make a "
                        "new iterator with iter(loader)"
                    ) from None
                if self._timeout_s and time.monotonic() > deadline:
                    raise RuntimeError(
                        f"DataLoader timed out after {self._timeout_s:g} seconds"
                    ) from None

    def _run(self, number: int) -> None:
        server, seed = self._servers[number], self._draws.base_seed
        set_worker_info(number, self._num_workers, seed + number, server.dataset)
        failed: Any = None
        try:
            server.prepare(number)
        except BaseException:  # One that ended the thread would leave the loop waiting.
            failed = _wrapped(number)
        try:
            while (sent := self._queues[number].get()) is not None:
                if self._group.stopping.is_set():
                    break
                at, task = sent
                self._answers.put((at, number, failed or self._served(server, task)))
                failed = None
                del sent, task
        finally:
            clear_worker_info()

    def _served(self, server: WorkerServer, task: WorkerTask) -> Any:
        try:
            reply = server[task]
            # The data set's next step must not change a state that it has given away.
            reply.state = copy.deepcopy(reply.state)
            if self._pin is not None:
                reply.data = self._pin(reply.data)
        except BaseException:
            return _wrapped(server.worker)
        return reply

    def _wake(self) -> None:
        for each in self._queues:
            each.put(None)

    def _shutdown_workers(self) -> None:
        self._group.close()


def _wrapped(number: int) -> Any:
    make: Any = ExceptionWrapper
    return make(where=f"in DataLoader worker thread {number}")


def _copied(server: WorkerServer) -> WorkerServer:
    made = copy.copy(server)
    try:
        made.dataset = copy.deepcopy(server.dataset)
    except Exception as error:
        raise UsageError(
            f"a {type(server.dataset).__name__} has a state, and cannot be copied for each thread "
            f"({error}): choose workers='process'"
        ) from error
    return made
