"""Drive operations of torch.distributed that are under way on MPI.

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
from collections.abc import Callable, Iterator
from typing import Final

from dlio.comm.deadlines import LONGEST_SLEEP_S, SHORTEST_SLEEP_S
from dlio.comm.mpi import one_at_a_time
from dlio.comm.process_group.mpi_work import GroupState, MpiWork, late
from dlio.errors import CommError
from dlio.util.threads import Workers

_LINGER_S: Final = 1.0
"""Idle time after which the background thread ends."""
_here = threading.local()
_abandoned: list[MpiWork] = []
"""Operations that failed inside MPI. MPI may write to their memory until the process ends."""


def _workers(name: str, run: Callable[[int], None], end: Callable[[], None]) -> Workers:
    return Workers(name, run, wake=end, serves_others=True)


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
                self._thread = _workers("dlio-process-group", self._run, self._end_program)
                self._thread.start()
            self._news.notify_all()

    def call(self, run: Callable[[], None]) -> None:
        """Queue a future's callback to run after all that were attached before it."""
        if in_callback():
            run()
            return
        with self._news:
            self._calls.append(run)
            if self._caller is None:
                self._caller = _workers("dlio-callbacks", self._serve, self._end_program)
                self._caller.start()
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
