"""The contract between ranks: a communicator and its requests."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytearray | memoryview | npt.NDArray[np.uint8]
"""Memory that messages are read from and written to."""
Array: TypeAlias = npt.NDArray[np.generic]
"""A contiguous array of any dtype."""
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value that `json.dumps` takes and `json.loads` returns."""
Op: TypeAlias = Literal["sum", "max", "min"]
"""An element-wise reduction over all ranks."""
_T = TypeVar("_T")


class Request(Protocol):
    """A message or reduction under way. Do not touch its buffers before it is done."""

    def done(self) -> bool:
        """True if the operation has completed. Each call also drives it forward."""

    def cancel(self) -> bool:
        """Give up a receive that no rank will answer.

        Returns False when the message is half received and its sender has stopped: the buffer must
        then stay alive (see `dlio.comm.deadlines.leave`).
        """


class Communicator(Protocol):
    """A group of ranks that exchange messages.

    Thread-safe if each thread uses its own communicator (`dup`). All ranks must call the
    collectives (`allgather`, `tell`, `barrier`, `bcast`, `iallreduce`, `dup`, `split`) in the same
    order. Collectives serve set-up and gradients; samples travel by `isend` and `irecv`. The
    caller that creates a duplicate or a part closes it. `dlio.testing.CommunicatorTests` checks
    these promises.
    """

    rank: int
    size: int

    def allgather(self, value: _T) -> list[_T]:
        """Return every rank's value, indexed by rank. Collective.

        JSON must be able to carry it; tuples arrive as lists.
        """

    def tell(self, value: _T, root: int = 0) -> _T:
        """Return `root`'s value on all ranks; those of others are ignored. Collective.

        JSON must be able to carry it; tuples arrive as lists.
        """

    def barrier(self) -> None:
        """Return once all ranks have called it. Collective."""

    def bcast(self, array: Array, root: int = 0) -> None:
        """Overwrite an array with `root`'s. Collective.

        Raises CommError for an array that is not contiguous (C order), or read-only.
        """

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        """Start sending `data` to rank `dest`."""

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Start receiving at most `len(into)` bytes from rank `source`."""

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        """Start an element-wise reduction over all ranks, in place. Collective.

        Each result is NaN if that of any rank is. Raises CommError for an array that is not
        float32, float64 or int64, not contiguous (C order), or read-only.
        """

    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        """Wait for all requests.

        Raises CommTimeout, which names the awaited data `what`, after a deadline in seconds;
        DLIO_TIMEOUT, or 300 when unset, for None.
        """

    def poke(self) -> bool:
        """Let the library progress all pending messages, those of other communicators included.

        Returns False if the library progresses on its own, or if this thread may not call it.
        """

    def dup(self) -> "Communicator":
        """Return a communicator of the same ranks whose messages never mix with this one's.
        Collective."""

    def split(self, group: int) -> "Communicator":
        """Return a communicator of the ranks that pass the same number, in rank order. Collective
        over all ranks; the caller closes the result."""

    def close(self) -> None:
        """Release a duplicate or a part. Collective over its ranks; the world stays open."""
