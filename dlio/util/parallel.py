"""Calls that wait for a source, many at a time, in threads that nobody has to wait for.

A call on a file system that does not answer cannot be interrupted. Threads of
`concurrent.futures` are joined when the interpreter ends, and at the end of a `with` block, without
a deadline: a process with one of them in such a call never ends. Those of `Workers` are left alone.
"""

import contextvars
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from dlio.errors import SourceError
from dlio.util.closable import Closable
from dlio.util.settings import settings
from dlio.util.threads import Workers

Task = Callable[[], "Iterable[Task]"]
"""A call that returns those that follow it."""
T = TypeVar("T")
R = TypeVar("R")
_LONGER: Final = 12
"""Times DLIO_TIMEOUT that calls may take which read a whole file."""
_END_TIMEOUT_S: Final = 2.0
"""Time for calls under way to end after another one has failed."""


def each_of(
    function: Callable[[T], R],
    items: Sequence[T],
    threads: int,
    source: str,
    *,
    may_be_long: bool = False,
) -> list[R]:
    """Call `function` on each item in up to so many threads; return the results in order.

    `source` is named in errors. A call that `may_be_long` reads a whole file, and has twelve
    times as long.

    Raises the first error, and SourceError when no call has ended for the time of DLIO_TIMEOUT.
    """
    results: dict[int, R] = {}

    def task(number: int) -> Task:
        def call() -> Iterable[Task]:
            results[number] = function(items[number])
            return ()

        return call

    tasks = [task(number) for number in range(len(items))]
    follow(tasks, threads, source, may_be_long=may_be_long)
    return [results[number] for number in range(len(items))]


def follow(tasks: Sequence[Task], threads: int, source: str, *, may_be_long: bool = False) -> None:
    """Run tasks, and those that they return, in up to so many threads; see `each_of`."""
    if not tasks:
        return
    context = contextvars.copy_context()
    waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Iterable[Task] | BaseException] = queue.SimpleQueue()

    def run(_: int) -> None:
        mine = context.copy()
        while (task := waiting.get()) is not None and not workers.stopping.is_set():
            try:
                ended.put(mine.run(task))
            except BaseException as error:
                ended.put(error)

    def wake() -> None:
        for _ in range(len(workers)):
            waiting.put(None)

    workers = Workers("dlio-ask", run, threads, wake=wake, stop_timeout_s=_END_TIMEOUT_S)
    patience_s = settings().timeout_s * (_LONGER if may_be_long else 1)
    # The last ones first: those that follow may hold much, as the names of a folder.
    stack, running = list(reversed(tasks)), 0
    with workers:
        while stack or running:
            while stack and running < 2 * threads:
                waiting.put(stack.pop())
                running += 1
            outcome = _answer(ended, patience_s, source)
            if isinstance(outcome, BaseException):
                raise outcome
            running -= 1
            stack.extend(outcome)


class SourceThread(Closable):
    """A thread that makes one call after another on a source, which nobody waits for if it hangs.

    `source` is named in errors.
    """

    def __init__(self, source: str) -> None:
        self._source, self._patience_s = source, settings().timeout_s
        self.hangs = False
        """True once a call has not ended in time: no other one would."""
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._workers = Workers(
            "dlio-ask", self._run, wake=lambda: self._calls.put(None), stop_timeout_s=_END_TIMEOUT_S
        ).start()

    def call(self, function: Callable[[], R]) -> R:
        """Return the result of `function`, or raise its error. By one thread at a time.

        Raises SourceError when it has not ended for the time of DLIO_TIMEOUT.
        """
        return self.start(function)()

    def start(self, function: Callable[[], R]) -> Callable[[], R]:
        """Start a call, and return the function that waits for its end as `call` does; nothing else
        is called before."""
        result: list[R] = []
        self._calls.put(lambda: result.append(function()))

        def wait() -> R:
            try:
                outcome = _answer(self._ended, self._patience_s, self._source)
            except SourceError:
                self.hangs = True
                raise
            if isinstance(outcome, BaseException):
                raise outcome
            return result[0]

        return wait

    def close(self) -> None:
        """End the thread; one whose call hangs is left behind."""
        self._workers.close()

    def _run(self, _: int) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._ended.put(function())
            except BaseException as error:
                self._ended.put(error)


def _answer(ended: "queue.SimpleQueue[T]", patience_s: float, source: str) -> T:
    """Return the next outcome. Raises SourceError when there is none in time."""
    try:
        return ended.get(timeout=patience_s)
    except queue.Empty:
        raise SourceError(
            f"{source}: no answer for {patience_s:.0f} s: the source hangs (DLIO_TIMEOUT "
            "sets the patience)"
        ) from None
