"""The message that carries samples from one rank to another: a table, then payloads.

    table     per sample: u64 payload bytes, u64 xxh3_64 of the payload   (little-endian)
    payloads  one after another, in the order that both sides planned, each at the place that the
              sizes in the data set's index give it

A sample that the sender could not read has the size 2^64 - 1 and whatever bytes in its place: the
receiver then reads it from the source itself. So payloads are read into the message, and used out
of it: nothing is copied in between.
"""

import sys
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.schema import Buffer

ENTRY_BYTES: Final = 16
_ABSENT: Final = np.uint64(2**64 - 1)
_MOST_SPARE: Final = 64
_SLACK: Final = 4
"""Times as large as is asked for that memory may be, to be used again."""


def message_bytes(sizes: npt.NDArray[np.int64]) -> int:
    """Length of a message that carries payloads of these sizes."""
    return int(sizes.sum()) + ENTRY_BYTES * len(sizes)


def payload_slots(message: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> list[memoryview]:
    """Where each payload goes in a message of `message_bytes`."""
    ends = ENTRY_BYTES * len(sizes) + np.cumsum(sizes)
    view = message.data
    return [view[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def seal_message(message: npt.NDArray[np.uint8], slots: Sequence[memoryview | None]) -> None:
    """Write the table of a message whose payloads are in their slots; None marks one that could
    not be read."""
    table = message[: ENTRY_BYTES * len(slots)].view("<u8").reshape(-1, 2)
    for row, slot in zip(table, slots, strict=True):
        row[0] = _ABSENT if slot is None else len(slot)
        row[1] = 0 if slot is None else xxhash.xxh3_64_intdigest(slot)


def unpack_message(message: Buffer, sizes: npt.NDArray[np.int64]) -> list[memoryview | None]:
    """Views of the payloads in a message; None where one is absent or fails its checks.

    Args:
        sizes: what the receiver expects, from the reader's index; shape (samples,).
    """
    whole = np.frombuffer(message, np.uint8)
    table = whole[: ENTRY_BYTES * len(sizes)].view("<u8").reshape(-1, 2)
    return [
        slot if size == len(slot) and xxhash.xxh3_64_intdigest(slot) == digest else None
        for (size, digest), slot in zip(table.tolist(), payload_slots(whole, sizes), strict=True)
    ]


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
