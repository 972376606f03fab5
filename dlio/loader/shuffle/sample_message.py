"""The message that carries samples from one rank to another: a table, then payloads.

    table     per sample: u64 bytes in this message, u64 xxh3_64 of the payload   (little-endian)
    payloads  one after another, in the order that both sides planned

A payload travels as it is stored: as LZ4 where a tier holds it compressed. The receiver recognises
that by its size, which is less than the data set's index says. A sample that the sender could not
read has 2^64 - 1 as its size and no payload; the receiver reads it from the source itself. Payloads
are read into the message's memory, used there, and checked by whoever uses them: nothing is copied
in between and nothing is hashed twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.comm import Request
from dlio.comm.survival.membership import RankMessages
from dlio.data.schema import Buffer
from dlio.errors import CommError, CorruptBlock
from dlio.storage.block import decompress_exactly
from dlio.util.buffer_pool import BufferPool
from dlio.util.memory import new_memory

ENTRY_BYTES: Final = 16
"""Bytes of a sample's entry in the table."""
_ABSENT: Final = 2**64 - 1
_MOST_SPARE: Final = 64
_SLACK: Final = 4.0
"""Memory is used again for messages of at least 1/_SLACK of its size."""
_HEADROOM: Final = 0.25
"""Messages of one size vary by about this share."""


def message_bytes(sizes: npt.NDArray[np.int64]) -> int:
    """Return the most bytes that a message with payloads of these sizes can have."""
    return int(sizes.sum()) + ENTRY_BYTES * len(sizes)


def pack_message(
    message: npt.NDArray[np.uint8],
    sizes: npt.NDArray[np.int64],
    read: Callable[[int, memoryview], tuple[int, int] | None],
) -> npt.NDArray[np.uint8]:
    """Fill a message and return the part of it that is to be sent.

    `message` is memory of `message_bytes(sizes)`. `read` puts payload k, as it is stored, at the
    beginning of the memory that it is given, which has the payload's size. It returns (bytes put
    there, xxh3_64 of the payload), or None where it cannot be read.
    """
    table = message[: ENTRY_BYTES * len(sizes)].view("<u8").reshape(-1, 2)
    view, at = message.data, ENTRY_BYTES * len(sizes)
    for k, size in enumerate(sizes.tolist()):
        entry = read(k, view[at : at + size])
        table[k] = (_ABSENT, 0) if entry is None else entry
        at += 0 if entry is None else entry[0]
    return message[:at]


@dataclass(frozen=True, slots=True)
class UncheckedPayload:
    """A payload as it arrived, not checked yet."""

    stored: memoryview
    """Its bytes in the message, compressed if fewer than `size`."""
    size: int
    """Bytes of the payload."""
    digest: int
    """xxh3_64 of the payload."""

    def open(self) -> Buffer | None:
        """Return the payload, None if it differs from the one that was sent."""
        # Checked by whoever decodes it, in one of many threads, not by the one that receives.
        payload = self.stored
        if len(payload) != self.size:
            payload = new_memory(self.size)
            try:
                decompress_exactly(self.stored, payload)
            except CorruptBlock:
                return None
        return payload if xxhash.xxh3_64_intdigest(payload) == self.digest else None


def pack_payloads(payloads: Sequence[Buffer | None]) -> npt.NDArray[np.uint8]:
    """Return a message of payloads whose sizes the receiver does not know; None is absent."""
    sizes = np.array([0 if each is None else len(each) for each in payloads], np.int64)

    def read(k: int, into: memoryview) -> tuple[int, int] | None:
        payload = payloads[k]
        if payload is None:
            return None
        into[:] = payload
        return len(payload), xxhash.xxh3_64_intdigest(payload)

    return pack_message(np.empty(message_bytes(sizes), np.uint8), sizes, read)


def unpack_message(
    message: Buffer, sizes: npt.NDArray[np.int64] | int
) -> list[UncheckedPayload | None]:
    """Return the payloads in a message, as views of its memory.

    A payload that is absent is None, and so are all from the first on that contradicts `sizes`.

    `sizes` has the payload bytes by the reader's index; of a message of `pack_payloads`, it is the
    number of its samples.
    """
    count = sizes if isinstance(sizes, int) else len(sizes)
    whole = np.frombuffer(message, np.uint8)
    if len(whole) < ENTRY_BYTES * count:
        return [None] * count
    table = whole[: ENTRY_BYTES * count].view("<u8").reshape(-1, 2)
    if isinstance(sizes, int):
        sizes = table[:, 0].astype(np.int64)
    view, at = whole.data, ENTRY_BYTES * count
    payloads: list[UncheckedPayload | None] = []
    for (stored, digest), size in zip(table.tolist(), sizes.tolist(), strict=True):
        if stored == _ABSENT:
            payloads.append(None)
            continue
        # Nothing in a message is trusted: a peer may run another version, or have read another
        # source.
        if stored > size or at + stored > len(view):
            break
        payloads.append(UncheckedPayload(view[at : at + stored], size, digest))
        at += stored
    return payloads + [None] * (len(sizes) - len(payloads))


def message_memory() -> BufferPool:
    """Return memory of messages, lent until nobody refers to a message or a part of it.

    The payloads of a message are used in its memory, each by another decode thread, so it has as
    many holders as samples.
    """
    # New pages for each message cost as much as its copy.
    return BufferPool(_MOST_SPARE, slack=_SLACK, headroom=_HEADROOM)


# Messages of unknown size
_MOST: Final = 1 << 40


def announce(
    comm: RankMessages, message: npt.NDArray[np.uint8], dest: int, tag: int
) -> list[tuple[Request, npt.NDArray[np.uint8]]]:
    """Send a message to an `SizedReceive`; returns its parts under way, and their memory."""
    size = np.array([len(message)], "<i8").view(np.uint8)
    return [(comm.isend(part, dest, tag), part) for part in (size, message)]


class SizedReceive:
    """The receipt of a message of any size, in memory that is taken when its size is known; a
    `Request`. Used by one thread.

    Between two ranks, messages with one tag arrive in the order in which they were sent.
    """

    def __init__(self, comm: RankMessages, memory: BufferPool, source: int, tag: int) -> None:
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
        self._buffer = self._memory.lend(size)[:size]
        self._request = self._comm.irecv(self._buffer, self._source, self._tag)
        return False

    def cancel(self) -> bool:
        """Give up the message; False when it is half received. See `Request`."""
        return self._request.cancel()


def message_of(request: Request, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the message that has arrived: an announced one, or the one in `buffer`."""
    return request.message if isinstance(request, SizedReceive) else buffer
