"""Carriers of tasks to workers and of their answers: processes, or threads of this process."""

import copy
import queue
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataset_threads import DatasetThreads, timed_out, worker_error
from dlio.loader.loader_options import LoaderOptions, pinning
from dlio.loader.torch_private import MultiProcessingDataLoaderIter
from dlio.loader.torchdata_state.worker_server import (
    TaskSampler,
    WorkerReply,
    WorkerServer,
    WorkerTask,
)
from dlio.util.thread_copies import own_copy


def same(reply: BatchData) -> BatchData:
    """Return the argument: the collate function of workers that answer by themselves."""
    return reply


class _Turns:
    """The turns of the workers that have samples left."""

    def __init__(self, workers: int, first: int, most: int | None) -> None:
        self._workers, self._next, self._most = workers, first, most
        self.ended: set[int] = set()

    def take(
        self, tasks: Iterator[WorkerTask], under_way: list[int]
    ) -> tuple[int, WorkerTask] | None:
        """Return (worker, its next task); None if there is none, or all workers have ended.
        Their tasks under way bound their parts unless answers come in order."""
        task = next(tasks, None)
        if task is None:
            return None
        if task.worker is not None:
            return task.worker, task
        for _ in range(self._workers):
            worker, self._next = self._next, (self._next + 1) % self._workers
            # As torch shares out the batches under way among the workers that are left.
            left = self._workers - len(self.ended)
            if worker not in self.ended and (
                self._most is None or under_way[worker] < self._most // left
            ):
                return worker, task
        return None


class ProcessTransport(MultiProcessingDataLoaderIter):
    """torch's worker processes. A transport brings tasks to workers, each to the next worker in
    turn, and answers back in order.

    A WorkerServer is the data set of the `plain` loader, and a TaskSampler its sampler. The `first`
    worker gets the first batch; with `loads`, the base seed is one that was saved.
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
        # See `TaskSampler.__iter__`: the next iterator is the one that counts.
        self._draws.primes = True
        super()._reset(loader, first_iter)

    def again(self) -> None:
        """Begin another pass with the same workers."""
        self._reset(self._plain)

    def take(self) -> tuple[int, Any]:
        """Return (worker, answer): a WorkerReply, or torch's wrapper of an exception.

        Raises StopIteration after the last one.
        """
        following: Any = self._next_data
        taken: tuple[int, Any] = following()
        return taken

    def _try_put_index(self) -> None:
        turn = self._turns.take(self._sampler_iter, self._workers_num_tasks)
        if turn is None:
            return
        worker, task = turn
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
    """Threads of this process, each with a WorkerServer of its own.

    With `copies` all of the data set is copied for each thread, as it must be if it has a state, or
    is an iterator; otherwise what `own_copy` copies. `ahead` batches are under way at a time; with
    `loads`, the base seed is one that was saved.
    """

    def __init__(
        self,
        server: WorkerServer,
        draws: TaskSampler,
        options: LoaderOptions,
        first: int,
        ahead: int,
        copies: bool,
        loads: bool,
    ) -> None:
        self._draws, self._ahead, self._in_order = draws, ahead, options.in_order
        self._timeout_s, self._pin = options.timeout, pinning(options)
        workers = options.num_workers
        # In the order in which torch draws: the sampler, then the base seed.
        iter(draws)
        drawn = torch.empty((), dtype=torch.int64).random_(generator=options.generator)
        if not loads:
            draws.base_seed = int(drawn.item())
        self._num_workers = workers
        server.seed_pipe(server.shared_seed)
        self._servers = [_copied(server, copies) for _ in range(workers)]
        self._answers: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self._has_refused: set[int] = set()
        """Workers whose `prepare` has failed, and that have said so."""
        self._threads = DatasetThreads[tuple[int, WorkerTask]](
            "dlio-stateful",
            workers,
            lambda number: self._servers[number].prepare(number),
            self._serve,
            lambda number: self._servers[number].dataset,
            lambda: self._draws.base_seed,
            own_queues=True,
        )
        self._workers = self._threads.workers.threads
        self._begin(first)
        self._threads.workers.start()

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
            self._early[number] = worker, answer
            if not self._in_order:
                wanted = number
        worker, answer = self._early.pop(wanted)
        self._taken += 1
        self._under_way[worker] -= 1
        if isinstance(answer, WorkerReply) and answer.ended:
            self._turns.ended.add(worker)
        self._put()
        return worker, answer

    def _put(self) -> None:
        turn = self._turns.take(self._tasks, self._under_way)
        if turn is None:
            return
        worker, task = turn
        self._threads.put((self._sent, task), worker)
        self._under_way[worker] += 1
        self._sent += 1

    def _answer(self) -> tuple[int, int, Any]:
        answer = self._threads.wait_for(self._next_answer, self._timeout_s)
        if answer is None:
            raise timed_out(self._timeout_s)
        return answer

    def _next_answer(self, wait_s: float) -> tuple[int, int, Any] | None:
        with suppress(queue.Empty):
            return self._answers.get(block=wait_s > 0, timeout=wait_s)
        return None

    def _serve(self, number: int, sent: tuple[int, WorkerTask], refusal: Any) -> None:
        at, task = sent
        if refusal is not None and number not in self._has_refused:
            self._has_refused.add(number)
            self._answers.put((at, number, refusal))
        else:
            self._answers.put((at, number, self._served(self._servers[number], task)))

    def _served(self, server: WorkerServer, task: WorkerTask) -> Any:
        try:
            reply = server[task]
            # The data set's next step must not change a state that it has given away.
            reply.state = copy.deepcopy(reply.state)
            if self._pin is not None:
                reply.data = self._pin(reply.data)
        except BaseException:
            return worker_error(server.worker)
        return reply

    def _shutdown_workers(self) -> None:
        self._threads.workers.close()


Transport = ProcessTransport | ThreadTransport


def _copied(server: WorkerServer, deeply: bool) -> WorkerServer:
    made = copy.copy(server)
    if not deeply:
        made.dataset, collate = own_copy((server.dataset, server.recipe.collate))
        made.recipe = replace(server.recipe, collate=collate)
        return made
    try:
        made.dataset = copy.deepcopy(server.dataset)
    except Exception as error:
        raise UsageError(
            f"{type(server.dataset).__name__} has a state, and cannot be copied for each thread "
            f"({error}): choose workers='process'"
        ) from error
    return made
