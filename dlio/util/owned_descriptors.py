"""Descriptors that are closed when their owner is dropped without having closed them.

Nothing waits in there: a garbage collector runs anywhere, also where a lock is held. Closing is
enough, because locks of the kernel end with their descriptors, and the process that waits for a
folder's lock in shared memory (`reaper`) removes the folder.
"""

import os
import weakref
from collections.abc import Iterable


class OwnedDescriptors:
    """The open descriptors of one `owner`."""

    def __init__(self, owner: object) -> None:
        self._numbers: set[int] = set()
        weakref.finalize(owner, _close, self._numbers).atexit = False

    def take(self, number: int) -> int:
        """Own an open descriptor, and return it."""
        self._numbers.add(number)
        return number

    def close(self, *numbers: int) -> None:
        """Close some of the descriptors, or all of them."""
        for number in numbers or tuple(self._numbers):
            self._numbers.discard(number)
            os.close(number)


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)
