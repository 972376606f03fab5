"""The message that carries samples from one rank to another: a table, then payloads.

    table     per sample: u64 bytes in this message, u64 xxh3_64 of the payload   (little-endian)
    payloads  one after another, in the order that both sides planned

A payload travels as it is stored: LZ4 where a tier holds it compressed, which is told by its being
shorter than the data set's index says; so nothing is compressed that was not found to be worth it.
A sample that the sender could not read has 2^64 - 1 for its bytes, and none in the message: the
receiver then reads it from the source itself. Payloads are read into the message and used out of
it, and checked by whoever uses them: nothing is copied in between, nothing hashed twice.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock
from dlio.storage.block import decompress_exactly, new_memory

ENTRY_BYTES: Final = 16
_ABSENT: Final = 2**64 - 1
_MOST_SPARE: Final = 64
_SLACK: Final = 4
"""Times as large as is asked for that memory may be, to be used again."""


def message_bytes(sizes: npt.NDArray[np.int64]) -> int:
    """Most bytes of a message that carries payloads of these sizes."""
    return int(sizes.sum()) + ENTRY_BYTES * len(sizes)


def pack_message(
    message: npt.NDArray[np.uint8],
    sizes: npt.NDArray[np.int64],
    read: Callable[[int, memoryview], tuple[int, int] | None],
) -> npt.NDArray[np.uint8]:
    """Fill a message of `message_bytes`; the part of it that is to be sent.

    Args:
        read: puts payload k, as it is stored, at the beginning of the memory it is given, which has
            its size; (bytes put there, xxh3_64 of the payload), or None where it cannot be read.
    """
    table = message[: ENTRY_BYTES * len(sizes)].view("<u8").reshape(-1, 2)
    view, at = message.data, ENTRY_BYTES * len(sizes)
    for k, size in enumerate(sizes.tolist()):
        found = read(k, view[at : at + size])
        table[k] = (_ABSENT, 0) if found is None else found
        at += 0 if found is None else found[0]
    return message[:at]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A payload as it arrived, which nobody has looked at."""

    stored: memoryview
    size: int
    """Bytes of the payload."""
    digest: int

    def open(self) -> Buffer | None:
        """The payload; None where it is not what was sent."""
        payload = self.stored
        if len(payload) != self.size:
            payload = new_memory(self.size)
            try:
                decompress_exactly(self.stored, payload)
            except CorruptBlock:
                return None
        return payload if xxhash.xxh3_64_intdigest(payload) == self.digest else None


def unpack_message(message: Buffer, sizes: npt.NDArray[np.int64]) -> list[Sealed | None]:
    """The payloads in a message, in its memory; None where one is absent, and from where the table
    and the index do not agree.

    Args:
        sizes: what the receiver expects, from the reader's index; shape (samples,).
    """
    whole = np.frombuffer(message, np.uint8)
    table = whole[: ENTRY_BYTES * len(sizes)].view("<u8").reshape(-1, 2)
    view, at = whole.data, ENTRY_BYTES * len(sizes)
    found: list[Sealed | None] = []
    for (stored, digest), size in zip(table.tolist(), sizes.tolist(), strict=True):
        if stored == _ABSENT:
            found.append(None)
            continue
        if stored > size or at + stored > len(view):
            break
        found.append(Sealed(view[at : at + stored], size, digest))
        at += stored
    return found + [None] * (len(sizes) - len(found))


class MessageMemory:
    """Memory of messages, used again as soon as nobody refers to it: fresh memory costs as much
    as what is read into it. Thread-safe."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """`count` bytes, at a multiple of eight."""
        with self._lock:
            for k in range(len(self._arrays)):
                # Two references: the list's and the call's. A view of it holds another.
                free = sys.getrefcount(self._arrays[k]) == 2
                if free and count <= len(self._arrays[k]) <= _SLACK * count:
                    return self._arrays[k][:count]
            fresh = np.empty(count + count // 4, np.uint8)
            self._arrays.append(fresh)
            if len(self._arrays) > _MOST_SPARE:
                self._arrays = [a for a in self._arrays if sys.getrefcount(a) > 3][-_MOST_SPARE:]
            return fresh[:count]
