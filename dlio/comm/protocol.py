"""The contract between ranks: a communicator and its requests."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Buffer = bytearray | memoryview | npt.NDArray[np.uint8]
Json = Any
"""What json.dumps takes and json.loads gives back."""


class Request(Protocol):
    """A message or reduction under way. Its buffers are not to be touched until it is done."""

    def done(self) -> bool:
        """Whether it has completed; also moves it on."""

    def cancel(self) -> bool:
        """Give up a receive that nobody will answer. False when it is half done and its sender
        has stopped: its buffer must then be kept."""


class Communicator(Protocol):
    """A group of ranks that exchange messages.

    Thread-safe when each thread uses a communicator of its own (`dup`). Collectives
    (`allgather`, `barrier`, `bcast`, `iallreduce`, `dup`, `split`) are called by all ranks in the
    same order; they are for set-up and gradients, never for feeding data.
    """

    rank: int
    size: int

    def allgather(self, value: Json) -> list[Json]:
        """Every rank's value, by rank. Values travel as JSON."""

    def barrier(self) -> None: ...

    def bcast(self, array: npt.NDArray[Any], root: int = 0) -> None:
        """Overwrite a contiguous array with `root`'s."""

    def isend(self, data: Buffer, dest: int, tag: int) -> Request: ...

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Receive at most len(into) bytes."""

    def iallreduce(self, array: npt.NDArray[Any]) -> Request:
        """Sum a contiguous float32, float64 or int64 array over all ranks, in place."""

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        """Wait for all requests. Raises CommTimeout, naming `what`, after the deadline.

        The default deadline is DLIO_TIMEOUT seconds, 300 when unset.
        """

    def poke(self) -> bool:
        """Have the library move on what is under way, of this communicator and others. False where
        it does so by itself, or where not any thread may ask it to."""

    def dup(self) -> "Communicator":
        """A communicator of the same ranks whose messages never meet this one's. Collective."""

    def split(self, group: int) -> "Communicator":
        """A communicator of the ranks that give the same number, in their order; to be closed as a
        duplicate is. Collective over all ranks."""

    def close(self) -> None:
        """Give a duplicate back. Collective; the world's communicator stays open."""
