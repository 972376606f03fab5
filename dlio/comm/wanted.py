"""The number of ranks that a job is asked to have: a file in the folder that its launcher owns.

`dlio join` and `dlio leave` write it; the ranks look at it a few times in a second.
"""

import os
import time
from typing import Final

from dlio.comm.standing import Wanted
from dlio.util.settings import DONE

__all__ = ["RankRequests", "read_wanted", "wanted_file"]

_EVERY_S: Final = 0.25
_NAME: Final = "wanted"


def wanted_file(folder: str) -> str:
    """Return the file of a job's folder."""
    return os.path.join(folder, _NAME)


def read_wanted(path: str) -> Wanted | None:
    """Return what a file asks for; None if it does not exist or is damaged."""
    try:
        with open(path, encoding="ascii") as file:
            request, ranks = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return Wanted(request, ranks)


class RankRequests:
    """The newest request for a number of ranks, as this rank has seen it."""

    def __init__(self) -> None:
        done = os.environ.get(DONE)
        self._path = None if done is None else wanted_file(os.path.dirname(done))
        self._newest = Wanted(-1, 0)
        self._next = 0.0

    def newest(self) -> Wanted:
        """Return the newest request; one with number -1 before the first."""
        now = time.monotonic()
        if self._path is not None and now >= self._next:
            self._next = now + _EVERY_S
            self._newest = max(self._newest, read_wanted(self._path) or self._newest)
        return self._newest
