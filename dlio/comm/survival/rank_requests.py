"""The number of ranks that a job is asked to have: a file in the folder that its launcher owns.

`dlio join` and `dlio leave` write it; the ranks look at it a few times in a second. With agents,
the launcher has it written on each node, and asks for no ranks before it starts others: all pause.
"""

import os
import time
from typing import Final

from dlio.comm.survival.active_ranks import RankRequest
from dlio.util.input_files import MOST_SETTINGS, read_text
from dlio.util.settings import DONE
from dlio.util.whole_files import write_whole

_EVERY_S: Final = 0.25
WANTED: Final = "wanted"
"""Name of the file."""


def read_wanted(folder: str) -> tuple[RankRequest, int] | None:
    """Return what is asked of a job, and the most ranks that it can have.

    Returns None if the job's folder does not say so.
    """
    try:
        text = read_text(os.path.join(folder, WANTED), MOST_SETTINGS)
        request, ranks, most = map(int, text.split())
    except (OSError, ValueError):
        return None
    return RankRequest(request, ranks), most


def write_wanted(folder: str, wanted: RankRequest, most: int) -> None:
    """Ask for a number of ranks. Raises UsageError if the folder cannot be written."""
    text = wanted_text(wanted, most).encode()
    write_whole(os.path.join(folder, WANTED), lambda file: file.write(text))


def wanted_text(wanted: RankRequest, most: int) -> str:
    """Return the contents of the file."""
    return f"{wanted.request} {wanted.ranks} {most}\n"


class RankRequests:
    """The newest request for a number of ranks, as this rank has seen it."""

    def __init__(self) -> None:
        done = os.environ.get(DONE)
        self._folder = None if done is None else os.path.dirname(done)
        self._newest = RankRequest(-1, 0)
        self._next = 0.0

    def newest(self) -> RankRequest:
        """Return the newest request; one with number -1 if there is none."""
        now = time.monotonic()
        # Each batch asks: a look at the file system each time would cost more than the answer is
        # worth.
        if self._folder is not None and now >= self._next:
            self._next = now + _EVERY_S
            read = read_wanted(self._folder)
            if read is not None:
                self._newest = max(self._newest, read[0])
        return self._newest
