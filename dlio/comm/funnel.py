"""A queue of calls for the one thread that may make them (MPI_THREAD_FUNNELED).

Other threads hand their calls to the funnel's owner. The owner makes them in `pump`, before its own
calls, and while it waits in `wait_serving`. Background work therefore progresses only while the
owner is inside dlio.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from dlio.util.threads import join_with

_T = TypeVar("_T")
_TURN_S: Final = 0.001
_LOOK_S: Final = 1.0


class Funnel:
    """Calls on behalf of other threads. The thread that creates it owns it."""

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def is_owner(self) -> bool:
        """True if this thread owns the funnel."""
        return threading.current_thread() is self._owner

    def call(self, function: Callable[[], _T]) -> _T:
        """Have the owner call `function`; return its result or raise its error.

        Raises RuntimeError when the owner has ended.
        """
        if self.is_owner():
            self.pump()
            return function()
        call = _FunnelCall(function)
        self._calls.put(call.run)
        # A deadline would be wrong here, as the owner may compute for minutes; only its death ends
        # this.
        while not call.done.wait(_LOOK_S):
            if not self._owner.is_alive():
                raise RuntimeError("the thread that may call MPI has ended")
        return call.result()

    def pump(self) -> None:
        """Make all queued calls, if this thread owns the funnel."""
        if not self.is_owner():
            return
        while True:
            try:
                run = self._calls.get_nowait()
            except Empty:
                return
            run()


class _FunnelCall(Generic[_T]):
    """One queued call and its outcome."""

    __slots__ = ("_error", "_function", "_results", "done")

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._results.append(self._function())
        # KeyboardInterrupt, too: the caller waits for an outcome, whatever it is.
        except BaseException as error:
            self._error = error
        self.done.set()

    def result(self) -> _T:
        """Return the function's result or raise its error, once done."""
        if self._error is not None:
            raise self._error
        return self._results[0]


_funnel: Funnel | None = None


def use_funnel() -> Funnel:
    """Return the process's funnel; the first caller's thread owns it."""
    global _funnel
    if _funnel is None:
        _funnel = Funnel()
        join_with(wait_serving)  # A thread may not end before its last call has been made.
    return _funnel


def funnel_in_use() -> bool:
    """True if one thread of this process makes all calls."""
    return _funnel is not None


def is_foreign_thread() -> bool:
    """True if another thread makes this thread's calls."""
    return _funnel is not None and not _funnel.is_owner()


def wait_serving(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Return `wait(timeout_s)`; if this thread owns a funnel, serve other threads meanwhile.

    `wait` waits at most the given seconds, and returns True once its event has occurred.
    """
    if _funnel is None:
        return wait(timeout_s)
    left_s = timeout_s
    while True:
        _funnel.pump()
        if wait(min(_TURN_S, max(0.0, left_s))):
            return True
        left_s -= _TURN_S
        if left_s <= 0:
            return False
