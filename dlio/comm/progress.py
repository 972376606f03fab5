"""Messages that go on while nobody waits for them.

An MPI library moves most of a long message only inside of calls to it. While a rank computes there
are none, but for those that an exchange makes as gradients come: a thread makes some.
"""

import atexit
import threading
import time
from typing import Final

from dlio.comm.protocol import Communicator

_TURN_S: Final = 0.001
"""Between two calls: a call takes some 10 µs, and a socket's buffer lasts for longer than this."""
_END_TIMEOUT_S: Final = 5.0


class Progress:
    """A thread that calls a library while `go` says so; none where that is of no use.

    Owner: whoever made it, who closes it; the end of the process does so, too, before MPI's.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._useful = comm.size > 1 and comm.poke()
        self._wanted = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def go(self) -> None:
        """Something is under way."""
        if self._useful and not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="dlio-progress", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def rest(self) -> None:
        """Nothing is."""
        self._wanted.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
            self._thread = None
            atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed or not self._comm.poke():
                return
            time.sleep(_TURN_S)
