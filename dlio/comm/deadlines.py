"""Wait for requests without spinning, up to a deadline.

A rank shares its cores with its own decode threads, so a wait alternates between testing and
sleeping, from 20 µs up to 1 ms at a time.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dlio.comm.board import blocked
from dlio.comm.comm_protocol import Request
from dlio.errors import CommError, CommTimeout, PeerLost
from dlio.util.settings import settings

SHORTEST_SLEEP_S: Final = 20e-6
LONGEST_SLEEP_S: Final = 1e-3
_LOOK_S: Final = 1.0
_look: Callable[[float], None] | None = None
_position: Callable[[], str] | None = None
_in_vain: Callable[[], str] | None = None
_END_TIMEOUT_S: Final = 5.0
"""Deadline of requests that a loss has interrupted."""


def default_timeout_s() -> float:
    """Deadline of a wait in seconds: DLIO_TIMEOUT, 300 when unset."""
    return settings().timeout_s


def wait_all(requests: Sequence[Request], what: str, limit_s: float, who: str) -> None:
    """Wait until all requests are done.

    Raises CommTimeout after `limit_s` seconds; the message says that `who` waited for `what`.
    """
    left = [request for request in requests if not request.done()]
    if left:
        with blocked():
            _wait(left, what, limit_s, who)


@contextmanager
def looking_on(look: Callable[[float], None]) -> Iterator[None]:
    """Within a `with` statement, call `look` once a second while the main thread waits, with the
    seconds of that wait. An error of it ends the wait; it waits for nothing itself."""
    global _look
    _look = look
    try:
        yield
    finally:
        _look = None


def tell_position(
    position: Callable[[], str] | None, in_vain: Callable[[], str] | None = None
) -> None:
    """Have the errors of deadlines end with how far this rank has come; None for no more.

    `in_vain` is asked once a second while a rank waits: a text ends the wait, which cannot end
    otherwise.
    """
    global _position, _in_vain
    _position, _in_vain = position, in_vain


def _wait(left: Sequence[Request], what: str, limit_s: float, who: str) -> None:
    look = _look if threading.current_thread() is threading.main_thread() else None
    began = time.monotonic()
    next_look = began + _LOOK_S

    def are_done() -> bool:
        nonlocal left, next_look
        left = [request for request in left if not request.done()]
        if left and (now := time.monotonic()) > next_look:
            next_look = now + _LOOK_S
            if look is not None:
                look(now - began)
            if _in_vain is not None and (why := _in_vain()):
                raise CommError(f"{who} waits for {what} in vain: {why}")
        return not left

    if not poll(are_done, limit_s):
        raise CommTimeout(
            f"{who} waited {limit_s:.0f} s for {what}: another rank is stopped, far behind, or "
            "left the run (DLIO_TIMEOUT sets the deadline)"
            + (f". {_position()}" if _position is not None else "")
        )


def poll(
    ready: Callable[[], bool], limit_s: float, longest_sleep_s: float = LONGEST_SLEEP_S
) -> bool:
    """Return True once `ready()` does, False after a deadline; sleeps longer and longer between."""
    deadline = time.monotonic() + limit_s
    sleep_s = SHORTEST_SLEEP_S
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(sleep_s)
        sleep_s = min(1.5 * sleep_s, longest_sleep_s)
    return True


def await_end(requests: Iterable[Request]) -> None:
    """Wait until requests that a loss has interrupted are over: their memory may be used again.

    Raises CommError if one of them does not end.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    for request in requests:
        try:
            if not poll(request.done, deadline - time.monotonic()):
                raise CommError("a message that a loss has interrupted does not end")
        # Also its end: MPI has given the memory back.
        except PeerLost:
            continue


def leave(*objects: object) -> None:
    """Keep the memory of an unfinished message alive until the process ends.

    A peer neither took the message nor let it be cancelled before a deadline. MPI may access the
    memory even in MPI_Finalize, after Python has released everything else.
    """
    for each in objects:
        # A list of this module would be emptied at the interpreter's end, before MPI_Finalize.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
