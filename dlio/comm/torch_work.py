"""Operations of torch.distributed that are under way on MPI: who moves them on, and who waits.

An operation is one or two steps, each a non-blocking call of MPI on a lane: a communicator on which
steps start in the order in which their operations were called, so that all ranks call MPI in one
order. An operation's second step has a lane of its own; it starts when the first is done and all
second steps of earlier operations have started.

Whoever waits in `MpiWork.wait` moves everything on; one thread, which sleeps between its looks,
does so for operations that nobody waits for. It ends when it has had nothing to do for a second.

A callback that is attached in Python (`future.then`) may start collectives of its own, as
PowerSGD's does. When it runs differs from rank to rank, so its collectives could meet others.
Therefore such callbacks run one at a time on one thread, in the order in which they were attached,
and what they start takes other lanes.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Work

from dlio.comm.mpi import one_at_a_time
from dlio.comm.torch_buffers import Staging
from dlio.comm.waiting import LONGEST_SLEEP_S, SHORTEST_SLEEP_S
from dlio.errors import CommError, CommTimeout

_LINGER_S: Final = 1.0
"""How long the thread stays when there is nothing to move."""
_here = threading.local()


class Lane:
    """A communicator, and the operations that will start a step on it, in the order of calls."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.queue: deque[MpiWork] = deque()


@dataclass(frozen=True, slots=True)
class Step:
    lane: Lane
    start: Callable[[MPI.Intracomm], MPI.Request]


@dataclass(eq=False)
class Members:
    """What the operations of one process group have in common."""

    who: str
    """This rank and its group, for messages."""
    timeout_s: float
    broken: CommError | None = None
    """Why no collective can work any more: the ranks no longer agree on what comes next."""
    pending: set["MpiWork"] = field(default_factory=set)


class MpiWork(Work):
    """One operation.

    Args:
        what: the operation's name, for messages.
        steps: to be taken one after the other.
        staging: the host memory in which MPI reads and writes.
        value: what the future gives.
        timeout_s: for a collective, from now on; for a message, from `wait` on.
        finish: called with the last step's status when it is done, to bring results home.
    """

    def __init__(
        self,
        progress: "Progress",
        members: Members,
        what: str,
        steps: Sequence[Step],
        staging: Staging,
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
        """Steps done."""
        self.request: MPI.Request | None = None
        self.status = MPI.Status()
        self.error: CommError | None = None
        self._progress = progress
        self._value = value
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._future: Promise | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done; on an accelerator, make the current stream wait for its results.

        Args:
            timeout: for this wait; zero means up to the operation's own deadline.

        Raises CommTimeout after the deadline, CommError when the operation failed.
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
                        self.deadline = 0.0  # Given up by the next look.
                    raise late(self, limit_s)
                self._over.wait(sleep_s)
                sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        if self.error is not None:
            raise self.error
        self.staging.synchronize()
        return True

    def is_completed(self) -> bool:
        """Whether it is over, done or failed; also moves it on."""
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
        """Where a received message came from. Raises CommError before it has come."""
        if not self.is_success():
            raise CommError(f"{self.members.who}: {self.what}: nothing has been received yet")
        return int(self.status.Get_source())

    _source_rank = source_rank

    def get_future(self) -> "Promise":
        """Its future, done when the operation is over; its value is the output that was given."""
        with self._lock:
            if self._future is None:
                self._future = Promise(self._progress, self.staging.device)
                if self._over.is_set():
                    self._resolve(self._future)
                else:
                    self._progress.wake()
            return self._future

    def settle(self) -> None:
        """Tell everyone who waits that it is over."""
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
    return CommTimeout(
        f"{work.members.who} waited {limit_s:.0f} s for {work.what}: another rank is stopped, far "
        "behind, left the run, or called something else (DLIO_TIMEOUT sets the deadline)"
    )


class JointWork(Work):
    """Several operations as one."""

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

    def __init__(self, progress: "Progress", device: torch.device) -> None:
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
                except Exception as error:  # Whatever it is, it is for whoever waits.
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
    """What the future of a failed operation holds.

    torch's own code (DDP's reducer) looks for tensors in a future's value by pickling it, and
    would take a plain exception for a value: this one raises.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error


def in_callback() -> bool:
    """Whether this thread runs a future's callback."""
    return getattr(_here, "in_callback", False)


class Progress:
    """Moves the operations of all process groups of this process.

    Invariant: only the holder of `_turn` touches lanes, pending works and their requests. Nobody
    waits for the turn: who does not get it leaves what is to be done to its holder or a later look.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._arrived: deque[MpiWork] = deque()
        self._pending: list[MpiWork] = []
        self._over: deque[MpiWork] = deque()
        self._abandoned: list[MpiWork] = []
        """Failed within MPI, which may still write to their memory."""
        self._news = threading.Condition()
        self._watchers = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._callbacks: ThreadPoolExecutor | None = None

    def submit(self, work: MpiWork, watched: bool) -> None:
        """Start an operation.

        Args:
            watched: the caller is about to wait for it, so that the thread is not needed.
        """
        work.members.pending.add(work)
        self._arrived.append(work)
        self.advance()
        if not watched and not work.is_completed():
            self.wake()

    def advance(self) -> bool:
        """Look at all operations once; whether one of them moved. Waits for nothing."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            moved = self._move()
        finally:
            self._turn.release()
        # Without the turn: what is told here may start and await other operations.
        while True:
            try:
                work = self._over.popleft()
            except IndexError:
                return moved
            work.settle()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody waits and moves things on, the thread takes longer naps."""
        with self._news:
            self._watchers += 1
        try:
            yield
        finally:
            with self._news:
                self._watchers -= 1

    def wake(self) -> None:
        """Have the thread look after what is pending."""
        with self._news:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="dlio-process-group")
                self._thread.start()
            self._news.notify_all()

    def call(self, run: Callable[[], None]) -> None:
        """Run a future's callback after all that were attached before it."""
        if in_callback():
            run()
            return
        with self._news:
            if self._callbacks is None:
                self._callbacks = ThreadPoolExecutor(1, "dlio-callbacks", _enter_callbacks)
            self._callbacks.submit(run)

    def give_up(self, members: Members, error: CommError) -> None:
        """Fail what is pending in a group, and what will be called."""
        members.broken = error
        for work in list(members.pending):
            work.error = work.error or error
        while not self.advance() and members.pending:
            time.sleep(SHORTEST_SLEEP_S)

    def close(self) -> None:
        """End both threads. Collectives must be over."""
        with self._news:
            self._closing = True
            self._news.notify_all()
            thread, callbacks = self._thread, self._callbacks
        if callbacks is not None:
            callbacks.shutdown()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        # A program that ends with operations under way is not held up by them.
        while threading.main_thread().is_alive():
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
        """Take the steps of an operation that can be taken now."""
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
        except Exception as error:  # Whatever it is, it is for whoever waits.
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
                self._abandoned.append(work)
        work.members.pending.discard(work)
        self._over.append(work)


def _enter_callbacks() -> None:
    _here.in_callback = True
