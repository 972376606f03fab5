"""The events of a job that dlio started without MPI: keys of the launcher's store, in a row.

An event is a death, which the launcher writes as soon as it sees it, or the end of a generation,
which a rank writes.
"""

import os
import threading
from typing import cast

from dlio.comm.private_store import PrivateStore
from dlio.errors import CommError
from dlio.util.settings import STORE


def open_store() -> PrivateStore:
    """Connect to the store of the launcher that started this rank. Raises CommError."""
    try:
        return PrivateStore(os.environ[STORE])
    except CommError as error:
        raise CommError(f"{error} ({STORE})") from error


class EventLog:
    """The events of a job, in the same order for all that read them.

    Nobody else uses the connection to the store while `next` waits.
    """

    def __init__(self, store: PrivateStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read = 0

    def append(self, event: dict[str, int]) -> None:
        """Write an event after all others. Thread-safe."""
        with self._lock:
            while self._store.put(f"event/{self._read}", event) != event:
                self._read += 1
            self._read += 1

    def next(self) -> dict[str, int]:
        """Wait for the next event and return it."""
        event = cast("dict[str, int]", self._store.wait(f"event/{self._read}"))
        self._read += 1
        return event
