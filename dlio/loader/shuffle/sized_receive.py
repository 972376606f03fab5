"""Messages whose size the receiver cannot know: their number of bytes is sent first."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.comm import Request
from dlio.comm.survival.membership import RankMessages
from dlio.errors import CommError
from dlio.loader.shuffle.sample_message import MessageMemory

_MOST: Final = 1 << 40


def announce(
    comm: RankMessages, message: npt.NDArray[np.uint8], dest: int, tag: int
) -> list[tuple[Request, npt.NDArray[np.uint8]]]:
    """Send a message to an `SizedReceive`; returns its parts under way, and their memory."""
    size = np.array([len(message)], "<i8").view(np.uint8)
    return [(comm.isend(part, dest, tag), part) for part in (size, message)]


class SizedReceive:
    """The receipt of a message of any size; a `Request`. Used by one thread.

    Between two ranks, messages with one tag arrive in the order in which they were sent.

    Args:
        memory: the message's memory is taken from it when its size is known.
    """

    def __init__(self, comm: RankMessages, memory: MessageMemory, source: int, tag: int) -> None:
        self._comm, self._memory = comm, memory
        self._source, self._tag = source, tag
        self._size = np.zeros(8, np.uint8)
        self._request = comm.irecv(self._size, source, tag)
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._is_done = False

    @property
    def message(self) -> npt.NDArray[np.uint8]:
        """The message, once `done` has returned True."""
        assert self._buffer is not None
        return self._buffer

    def done(self) -> bool:
        """True if the message has arrived. Raises CommError for an impossible size."""
        if self._is_done or not self._request.done():
            return self._is_done
        if self._buffer is not None:
            self._is_done = True
            return True
        size = int(self._size.view("<i8")[0])
        if not 0 <= size <= _MOST:
            raise CommError(
                f"rank {self._source} announced a message of {size} bytes: check that all ranks "
                "run the same version of dlio"
            )
        self._buffer = self._memory.take(size)[:size]
        self._request = self._comm.irecv(self._buffer, self._source, self._tag)
        return False

    def cancel(self) -> bool:
        """Give up the message; False when it is half received. See `Request`."""
        return self._request.cancel()


def message_of(request: Request, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the message that has arrived: an announced one, or the one in `buffer`."""
    return request.message if isinstance(request, SizedReceive) else buffer
