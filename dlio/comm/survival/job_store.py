"""The store of a job that dlio started without MPI, in the launcher: see `private_store`.

Ranks and launcher agree by it. Each key is written once, by the first that comes (`compare_set`),
so all read the same. The events of a job are such keys in a row: a death, which the launcher
writes as soon as it sees it, or the end of a generation, which a rank writes.
"""

import json
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from dlio.comm.comm_protocol import Json
from dlio.comm.private_store import PrivateStore
from dlio.errors import CommError
from dlio.util.settings import STORE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
_FOR_EVER: Final = timedelta(days=365)


def open_store() -> "JobStore":
    """Connect to the store of the launcher that started this rank. Raises CommError."""
    try:
        return JobStore(PrivateStore(os.environ[STORE]))
    except CommError as error:
        raise CommError(f"{error} ({STORE})") from error


class JobStore:
    """A connection to the launcher's store, or a store of torch. One call at a time: a call that
    waits holds up the others.

    All raise CommError when the launcher is gone.
    """

    def __init__(self, raw: "PrivateStore | Store") -> None:
        self.raw = raw

    def another(self) -> "JobStore":
        """Return another connection, for a thread that waits."""
        store: Any = self.raw  # torch does not annotate this method.
        return JobStore(self._call(lambda: store.clone()))

    def put(self, key: str, value: _T) -> _T:
        """Write a key that nobody has written yet; return its value, perhaps another's."""
        text = json.dumps(value)
        written: _T = json.loads(self._call(lambda: self.raw.compare_set(key, "", text)))
        return written

    def count(self, key: str) -> int:
        """Add 1 to a counter and return it."""
        return int(self._call(lambda: self.raw.add(key, 1)))

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys are written."""
        return bool(self._call(lambda: self.raw.check(list(keys))))

    def get(self, keys: Sequence[str]) -> list[Json]:
        """Return the values of keys that are written."""
        return [json.loads(each) for each in self._call(lambda: self.raw.multi_get(list(keys)))]

    def wait(self, key: str) -> Json:
        """Wait until a key is written, without a deadline, and return its value."""
        self._call(lambda: self.raw.wait([key], _FOR_EVER))
        return self.get([key])[0]

    def _call(self, function: Any) -> Any:
        try:
            return function()
        except RuntimeError as error:
            raise CommError(f"the launcher's store cannot be reached: {error}") from error


class EventLog:
    """The events of a job, in the same order for all that read them.

    Nobody else uses the connection to the store while `next` waits.
    """

    def __init__(self, store: JobStore) -> None:
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
