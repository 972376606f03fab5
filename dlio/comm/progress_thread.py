"""A thread that keeps MPI messages moving while a rank computes.

An MPI library moves most of a long message only inside calls to it. A computing rank makes none,
except those of an exchange when gradients arrive, so this thread makes some.
"""

import threading
import time
from typing import Final

from dlio.comm.comm_protocol import Communicator
from dlio.util.threads import Workers

_TURN_S: Final = 0.001
"""Pause between two calls: a call takes about 10 µs, and a socket's buffer outlasts the pause."""


class ProgressThread:
    """A thread that calls the communicator's library between `go` and `rest`.

    No thread starts if the library progresses on its own. The owner closes it; the end of the
    process closes it too, before MPI is finalised.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._useful = comm.size > 1 and comm.poke()
        self._wanted = threading.Event()
        self._closed = False
        self._thread: Workers | None = None

    def go(self) -> None:
        """Messages are under way: call the library from now on."""
        if self._useful and not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None and not self._closed:
                self._thread = Workers(
                    "dlio-progress", self._run, wake=self._end, serves_others=True
                ).start()

    def rest(self) -> None:
        """No message is under way: stop calling the library."""
        self._wanted.clear()

    def close(self) -> None:
        """End the thread."""
        self._end()
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _end(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self, _: int) -> None:
        while True:
            self._wanted.wait()
            if self._closed or not self._comm.poke():
                return
            time.sleep(_TURN_S)
