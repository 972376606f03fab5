"""Wait for requests without spinning, up to a deadline.

A rank shares its cores with its own decode threads, so a wait alternates between testing and
sleeping, from 20 µs up to 1 ms at a time.
"""

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Final

from dlio.comm.board import blocked
from dlio.comm.comm_protocol import Request
from dlio.errors import CommError, CommTimeout, PeerLost
from dlio.util.settings import settings

SHORTEST_SLEEP_S: Final = 20e-6
LONGEST_SLEEP_S: Final = 1e-3
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


def _wait(left: Sequence[Request], what: str, limit_s: float, who: str) -> None:
    deadline = time.monotonic() + limit_s
    sleep_s = SHORTEST_SLEEP_S
    while left := [request for request in left if not request.done()]:
        if time.monotonic() > deadline:
            raise CommTimeout(
                f"{who} waited {limit_s:.0f} s for {what}: another rank is stopped, far behind, "
                "or left the run (DLIO_TIMEOUT sets the deadline)"
            )
        time.sleep(sleep_s)
        sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)


def await_end(requests: Iterable[Request]) -> None:
    """Wait until requests that a loss has interrupted are over: their memory may be used again.

    Raises CommError if one of them does not end.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    for request in requests:
        try:
            while not request.done():
                if time.monotonic() > deadline:
                    raise CommError("a message that a loss has interrupted does not end")
                time.sleep(SHORTEST_SLEEP_S)
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
