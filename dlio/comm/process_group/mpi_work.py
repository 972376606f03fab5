"""Operations of torch.distributed under way on MPI: `Work` objects that callers wait for, and the
threads that drive them.

An operation has one or two steps, each a non-blocking MPI call on a lane. A lane is a communicator
that starts steps in the order in which the program called their operations, so that all ranks call
MPI in one order. Second steps have a lane of their own: one starts when the first step is done and
the second steps of all earlier operations have started.

A thread that waits in `MpiWork.wait` drives all operations. While no thread waits, a background
thread polls them, sleeping in between; it ends after one idle second.

A callback attached in Python (`future.then`) may start collectives, as PowerSGD's hook does. Ranks
run it at different times, so its collectives could be matched with the wrong ones elsewhere.
Therefore callbacks run one at a time on one thread, in the order in which they were attached, and
the operations that they start use separate lanes.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Work

from dlio.comm.deadlines import LONGEST_SLEEP_S, SHORTEST_SLEEP_S
from dlio.comm.mpi import one_at_a_time
from dlio.comm.process_group.buffers import OperationMemory
from dlio.errors import CommError, CommTimeout
from dlio.util.threads import Workers

_LINGER_S: Final = 1.0
"""Idle time after which the background thread ends."""
_here = threading.local()
_abandoned: list["MpiWork"] = []
"""Operations that failed inside MPI. MPI may write to their memory until the process ends."""


class CallQueue:
    """A communicator and a queue of the operations that will start a step on it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.queue: deque[MpiWork] = deque()


@dataclass(frozen=True, slots=True)
class MpiCall:
    """A non-blocking call of MPI, and the lane on which it starts."""

    lane: CallQueue
    start: Callable[[MPI.Intracomm], MPI.Request]


@dataclass(eq=False)
class GroupState:
    """State shared by the operations of one process group."""

    who: str
    """Name of this rank and its group in messages."""
    timeout_s: float
    broken: CommError | None = None
    """Failure after which collectives are refused: the ranks no longer agree on the next one."""
    pending: set["MpiWork"] = field(default_factory=set)


class MpiWork(Work):
    """One pending operation, called `what` in messages, by all ranks of a collective that agree.

    MPI reads and writes the host memory `staging`; `value` is that of the operation's future. The
    deadline counts from now for a collective and from `wait` for a message. `finish` is called with
    the last step's status, to copy results into the caller's tensors.
    """

    def __init__(
        self,
        progress: "OperationProgress",
        members: GroupState,
        what: str,
        steps: Sequence[MpiCall],
        staging: OperationMemory,
        value: Any,
        timeout_s: float,
        finish: Callable[[MPI.Status], None],
        collective: bool = True,
    ) -> None:
        super().__init__()
        self.members, self.what, self.steps, self.staging = members, what, steps, staging
        self.collective = collective
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s if collective else float("inf")
        self.finish = finish
        self.at = 0
        """Number of completed steps."""
        self.request: MPI.Request | None = None
        self.status = MPI.Status()
        self.error: CommError | None = None
        self._progress = progress
        self._value = value
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._future: Promise | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for completion; on an accelerator, make the current stream wait for the results.

        Raises CommTimeout after `timeout`, or the operation's own deadline if it is zero, CommError
        if the operation failed.
        """
        limit_s = timeout.total_seconds()
        if limit_s <= 0:
            limit_s = float("inf") if self.collective else self.timeout_s
        deadline = time.monotonic() + limit_s
        sleep_s = SHORTEST_SLEEP_S
        with self._progress.watched():
            while not self.is_completed():
                if time.monotonic() > deadline:
                    if not self.collective:
                        self.deadline = 0.0  # The next poll gives the operation up.
                    raise late(self, limit_s)
                self._over.wait(sleep_s)
                sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        if self.error is not None:
            raise self.error
        self.staging.synchronize()
        return True

    def is_completed(self) -> bool:
        """True if the operation has succeeded or failed. Each call also drives it forward."""
        if not self._over.is_set():
            self._progress.advance()
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self.error is None

    def exception(self) -> CommError | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Return the rank that sent a received message. Raises CommError before its arrival."""
        if not self.is_success():
            raise CommError(f"{self.members.who}: {self.what}: nothing has been received yet")
        return int(self.status.Get_source())

    _source_rank = source_rank

    def get_future(self) -> "Promise":
        """Return a future that completes with the operation; its value is the output tensors."""
        with self._lock:
            if self._future is None:
                self._future = Promise(self._progress, self.staging.device)
                if self._over.is_set():
                    self._resolve(self._future)
                else:
                    self._progress.wake()
            return self._future

    def settle(self) -> None:
        """Notify waiting threads and complete the futures: the operation is over."""
        with self._lock:
            self._over.set()
            future = self._future
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: "Promise") -> None:
        if self.error is not None:
            future.fail(self.error)
        else:
            with self.staging.on_stream():
                future.set_result(self._value)


def late(work: MpiWork, limit_s: float) -> CommTimeout:
    """Return the error for an operation that has passed its deadline."""
    return CommTimeout(
        f"{work.members.who} waited {limit_s:.0f} s for {work.what}: another rank is stopped, far "
        "behind, left the run, or called something else (DLIO_TIMEOUT sets the deadline)"
    )


class JointWork(Work):
    """Several coalesced operations as one `Work`."""

    def __init__(self, works: Sequence[MpiWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Promise(torch.futures.Future[Any]):
    """A future whose callbacks, attached in Python, may start collectives and wait for them."""

    def __init__(self, progress: "OperationProgress", device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._progress, self._device = progress, device

    def then(self, callback: Callable[[Any], Any]) -> Any:
        later = Promise(self._progress, self._device)
        arrived = threading.Event()
        self.add_done_callback(lambda _: arrived.set())

        def run() -> None:
            arrived.wait()
            with contextlib.ExitStack() as stack:
                if self._device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self._device))
                try:
                    value = callback(self)
                except Exception as error:  # Raised again in the thread that waits.
                    later.fail(error)
                else:
                    later.set_result(value)

        self._progress.call(run)
        return later

    def fail(self, error: Exception) -> None:
        def raise_it(_: object) -> NoReturn:
            raise error

        self._set_unwrap_func(raise_it)
        self.set_result(_Failure(error))


class _Failure:
    """The value of a failed operation's future.

    torch's C++ code (DDP's reducer) pickles a future's value to find tensors in it, and would
    accept a plain exception as a value. Pickling this object raises the error.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error


def in_callback() -> bool:
    """True if this thread runs a future's callback."""
    return getattr(_here, "in_callback", False)


class OperationProgress:
    """Moves the operations of all process groups of this process.

    Invariant: only the holder of the lock `_turn` touches lanes, pending works and their requests.
    No thread waits for the lock: if it is taken, the work is left to its holder or the next poll.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._arrived: deque[MpiWork] = deque()
        self._pending: list[MpiWork] = []
        self._over: deque[MpiWork] = deque()
        self._news = threading.Condition()
        self._watchers = 0
        self._closing = False
        self._program_ends = False
        self._thread: Workers | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._caller: Workers | None = None

    def submit(self, work: MpiWork, watched: bool) -> None:
        """Start an operation. If the caller is about to wait for it, it is `watched`, and needs no
        thread.
        """
        work.members.pending.add(work)
        self._arrived.append(work)
        self.advance()
        if not watched and not work.is_completed():
            self.wake()

    def advance(self) -> bool:
        """Poll all operations once, without waiting; return True if one of them progressed."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            moved = self._move()
        finally:
            self._turn.release()
        # After releasing the lock: a notified thread may start and await other operations.
        while True:
            try:
                work = self._over.popleft()
            except IndexError:
                return moved
            work.settle()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let the background thread sleep longer while the calling thread drives operations."""
        with self._news:
            self._watchers += 1
        try:
            yield
        finally:
            with self._news:
                self._watchers -= 1

    def wake(self) -> None:
        """Have the background thread drive pending operations."""
        with self._news:
            if self._thread is None and not self._closing:
                self._thread = self._started("dlio-process-group", self._run)
            self._news.notify_all()

    def call(self, run: Callable[[], None]) -> None:
        """Queue a future's callback to run after all that were attached before it."""
        if in_callback():
            run()
            return
        with self._news:
            self._calls.append(run)
            if self._caller is None:
                self._caller = self._started("dlio-callbacks", self._serve)
            self._news.notify_all()

    def give_up(self, members: GroupState, error: CommError) -> None:
        """Fail a group's pending operations and all that it starts later."""
        members.broken = error
        for work in list(members.pending):
            work.error = work.error or error
        while not self.advance() and members.pending:
            time.sleep(SHORTEST_SLEEP_S)

    def close(self) -> None:
        """End both threads. All collectives must be complete."""
        with self._news:
            self._closing = True
            self._news.notify_all()
            threads = [self._caller, self._thread]
        for thread in threads:
            if thread is not None:
                thread.wait()

    def _started(self, name: str, run: Callable[[int], None]) -> Workers:
        return Workers(name, run, wake=self._end_program, serves_others=True).start()

    def _end_program(self) -> None:
        """End the threads when the program ends, without waiting for pending operations."""
        with self._news:
            self._closing = self._program_ends = True
            self._news.notify_all()

    def _run(self, _: int) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while not self._program_ends:
            moved = self.advance()
            with self._news:
                if not self._busy():
                    if self._closing or not self._news.wait(_LINGER_S):
                        self._thread = None
                        return
                    sleep_s = SHORTEST_SLEEP_S
                    continue
                longest_s = LONGEST_SLEEP_S
                sleep_s = SHORTEST_SLEEP_S if moved else min(1.5 * sleep_s, longest_s)
                self._news.wait(longest_s if self._watchers else sleep_s)
        # The program ends: fail pending operations instead of waiting for other ranks.
        while self._busy():
            for work in list(self._pending):
                work.error = work.error or CommError(
                    f"{work.members.who}: the program ended before {work.what} was over"
                )
            self.advance()

    def _serve(self, _: int) -> None:
        _here.in_callback = True
        while True:
            with self._news:
                self._news.wait_for(lambda: self._calls or self._closing, _LINGER_S)
                if not self._calls:
                    self._caller = None
                    return
                run = self._calls.popleft()
            run()

    def _busy(self) -> bool:
        return bool(self._arrived or self._pending or self._over)

    def _move(self) -> bool:
        while self._arrived:
            work = self._arrived.popleft()
            self._pending.append(work)
            for step in work.steps:
                step.lane.queue.append(work)
        moved = False
        for work in self._pending:
            before = work.at
            self._look(work)
            if work.error is not None or work.at == len(work.steps):
                self._end(work)
                moved = True
            moved |= work.at != before
        if moved:
            self._pending = [work for work in self._pending if work in work.members.pending]
        return moved

    def _look(self, work: MpiWork) -> None:
        """Start and test the steps of an operation as far as possible without waiting."""
        try:
            while work.error is None and work.at < len(work.steps):
                step = work.steps[work.at]
                if work.request is None:
                    if step.lane.queue[0] is not work or not work.staging.ready():
                        break
                    with one_at_a_time:
                        work.request = step.start(step.lane.comm)
                    step.lane.queue.popleft()
                with one_at_a_time:
                    if not work.request.Test(work.status):
                        break
                work.request = None
                work.at += 1
                if work.at == len(work.steps):
                    work.finish(work.status)
                    return
        except Exception as error:  # Raised again in the thread that waits.
            if not isinstance(error, CommError):
                error = CommError(f"{work.members.who}: {work.what} failed: {error}")
            work.error = error
        if work.error is None and work.collective:
            work.error = work.members.broken
        if work.error is None and time.monotonic() > work.deadline:
            work.error = late(work, work.timeout_s)

    def _end(self, work: MpiWork) -> None:
        if work.error is not None:
            if work.collective and work.members.broken is None:
                work.members.broken = work.error
            for step in work.steps:
                if work in step.lane.queue:
                    step.lane.queue.remove(work)
            if work.request is not None:
                if not work.collective:
                    with one_at_a_time:
                        work.request.Cancel()
                _abandoned.append(work)
        work.members.pending.discard(work)
        self._over.append(work)
