"""Messages that go on while nobody waits for them.

An MPI library moves most of a long message only inside of calls to it. While a rank computes there
are none, but for those that an exchange makes as gradients come: a thread makes some.
"""

import threading
import time
from typing import Final

from dlio.comm.protocol import Communicator
from dlio.util.threads import Workers

_TURN_S: Final = 0.001
"""Between two calls: a call takes some 10 µs, and a socket's buffer lasts for longer than this."""


class Progress:
    """A thread that calls a library while `go` says so; none where that is of no use.

    Owner: whoever made it, who closes it; the end of the process does so, too, before MPI's.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._useful = comm.size > 1 and comm.poke()
        self._wanted = threading.Event()
        self._closed = False
        self._thread: Workers | None = None

    def go(self) -> None:
        """Something is under way."""
        if self._useful and not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None and not self._closed:
                self._thread = Workers(
                    "dlio-progress", self._run, wake=self._end, serves_others=True
                ).start()

    def rest(self) -> None:
        """Nothing is."""
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
