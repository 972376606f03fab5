"""Waiting for requests without spinning: a rank shares its cores with its own decode threads, so
a wait tests and sleeps, from 20 µs up to 1 ms, until a deadline."""

import ctypes
import time
from collections.abc import Sequence
from typing import Final

from dlio.comm.protocol import Request
from dlio.errors import CommTimeout
from dlio.util.settings import settings

SHORTEST_SLEEP_S: Final = 20e-6
LONGEST_SLEEP_S: Final = 1e-3


def default_timeout_s() -> float:
    """Return DLIO_TIMEOUT, in seconds."""
    return settings().timeout_s


def peer_timeout_s() -> float:
    """Return DLIO_PEER_TIMEOUT, in seconds: the wait for a peer's samples, before they are read
    from the source."""
    return settings().peer_timeout_s


def wait_all(requests: Sequence[Request], what: str, limit_s: float, who: str) -> None:
    """Raises CommTimeout, naming `who` waited for `what`, when they are not all done in time."""
    deadline = time.monotonic() + limit_s
    sleep_s = SHORTEST_SLEEP_S
    left = list(requests)
    while left := [request for request in left if not request.done()]:
        if time.monotonic() > deadline:
            raise CommTimeout(
                f"{who} waited {limit_s:.0f} s for {what}: another rank is stopped, far behind, "
                "or left the run (DLIO_TIMEOUT sets the deadline)"
            )
        time.sleep(sleep_s)
        sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)


def leave(*objects: object) -> None:
    """Of a message that was neither taken nor given up by a peer before a deadline: MPI reads and
    writes its memory until the process ends, in MPI_Finalize even after Python has let go of all
    else. It is never given back."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
