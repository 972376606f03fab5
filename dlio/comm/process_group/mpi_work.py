"""Pending operations of torch.distributed on MPI: the `Work` objects that callers wait for.

An operation has one or two steps, each a non-blocking MPI call on a lane. A lane is a communicator
that starts steps in the order in which the program called their operations, so that all ranks call
MPI in one order. Second steps have a lane of their own: one starts when the first step is done and
the second steps of all earlier operations have started.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Work

from dlio.comm.deadlines import LONGEST_SLEEP_S, SHORTEST_SLEEP_S
from dlio.comm.process_group.buffers import OperationMemory
from dlio.errors import CommError, CommTimeout


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


class ProgressDriver(Protocol):
    """Drives operations forward; see `progress`."""

    def advance(self) -> bool:
        """Poll all operations once, without waiting; return True if one of them progressed."""

    def wake(self) -> None:
        """Have a background thread drive operations while no thread waits for them."""

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Let the background thread sleep longer while the calling thread drives operations."""

    def call(self, run: Callable[[], None]) -> None:
        """Queue a future's callback to run after all that were attached before it."""


class MpiWork(Work):
    """One pending operation.

    Args:
        what: description for messages; for a collective, the same on all ranks that agree.
        steps: steps to take one after the other.
        staging: host memory that MPI reads and writes.
        value: value of the operation's future.
        timeout_s: deadline in seconds, counted from now for a collective and from `wait` for a
            message.
        finish: called with the last step's status, to copy results into the caller's tensors.
    """

    def __init__(
        self,
        progress: ProgressDriver,
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

        Args:
            timeout: limit of this wait; zero for the operation's own deadline.

        Raises CommTimeout after the deadline, CommError if the operation failed.
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

    def __init__(self, progress: ProgressDriver, device: torch.device) -> None:
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
