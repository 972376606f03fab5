"""A queue of calls for the one thread that may make them (MPI_THREAD_FUNNELED).

Other threads hand their calls to the funnel's owner. The owner makes them in `pump`, before its own
calls, and while it waits in `wait_serving`. Background work therefore progresses only while the
owner is inside dlio.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

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
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            # KeyboardInterrupt, too: the caller waits for an outcome, whatever it is.
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        # A deadline would be wrong here, as the owner may compute for minutes; only its death ends
        # this.
        while not wait([future], _LOOK_S).done:
            if not self._owner.is_alive():
                raise RuntimeError("the thread that may call MPI has ended")
        return future.result()

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
