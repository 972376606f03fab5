"""The store by which gloo connects the ranks of a group, with a wait that a loss ends."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from dlio.comm.deadlines import poll
from dlio.comm.private_store import PrivateStore
from dlio.errors import CommTimeout


class Rendezvous(Store):
    """A part of the launcher's store, with a prefix of all keys.

    No call of that one waits for long. `check` is called while a key is missing, and
    raises an exception to give up; `timeout_s` is the deadline of each wait.
    """

    def __init__(
        self,
        store: PrivateStore,
        prefix: str,
        check: Callable[[], object],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._store, self._prefix, self._check = store, prefix, check
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._store.get(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are written."""
        return self._store.has([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises CommTimeout, and the error of `check`."""

        def are_there() -> bool:
            there = self.check(keys)
            if not there:
                self._check()
            return there

        if not poll(are_there, self._timeout_s):
            raise CommTimeout(f"gloo waited {self._timeout_s:.0f} s for the other ranks")
