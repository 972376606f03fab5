"""Calls that one thread alone may make, as MPI_THREAD_FUNNELED has it: others hand theirs to it.

The thread that owns the funnel makes them when it comes by: in `pump`, before calls of its own, and
while it waits in `waiting`. So what runs in the background goes on only while that thread is
inside of dlio; nothing else is lost.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from dlio.util.threads import join_with

T = TypeVar("T")
_TURN_S: Final = 0.001
_LOOK_S: Final = 1.0


class Funnel:
    """Made by the thread that is to make all calls."""

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._calls: SimpleQueue[_Call] = SimpleQueue()

    def is_owner(self) -> bool:
        """Whether this thread makes its calls itself."""
        return threading.current_thread() is self._owner

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, called by the owner.

        Raises RuntimeError when the owner has ended.
        """
        if self.is_owner():
            self.pump()
            return function()
        call = _Call(function)
        self._calls.put(call)
        while not call.done.wait(_LOOK_S):
            if not self._owner.is_alive():
                raise RuntimeError("the thread that may call MPI has ended")
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]

    def pump(self) -> None:
        """Make the calls that wait, where this is the owner."""
        if not self.is_owner():
            return
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            try:
                call.result = call.function()
            except BaseException as error:
                call.error = error
            call.done.set()


class _Call:
    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()


_funnel: Funnel | None = None


def use_funnel() -> Funnel:
    """The process's funnel, which this thread owns; made at the first call."""
    global _funnel
    if _funnel is None:
        _funnel = Funnel()
        join_with(waiting)  # A thread may not end before its last call has been made.
    return _funnel


def funnel_in_use() -> bool:
    """Whether one thread of this process makes all calls."""
    return _funnel is not None


def elsewhere() -> bool:
    """Whether this thread's calls are another one's to make."""
    return _funnel is not None and not _funnel.is_owner()


def waiting(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """`wait(timeout_s)`; where this thread owns a funnel, in turns with the calls of others.

    Args:
        wait: for so many seconds at most; whether what it waits for has come.
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
