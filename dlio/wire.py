"""The message that carries samples from one rank to another: a table, then payloads.

    table     per sample: u64 payload bytes, u64 xxh3_64 of the payload   (little-endian)
    payloads  one after another, in the order that both sides planned

A sample that the sender could not read has the size 2^64 - 1 and no payload: the receiver then
reads it from the source itself.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.schema import Buffer

ENTRY_BYTES = 16
_ABSENT = np.uint64(2**64 - 1)


def message_bytes(sizes: npt.NDArray[np.int64]) -> int:
    """Length of a message that carries payloads of these sizes, the most it can be."""
    return int(sizes.sum()) + ENTRY_BYTES * len(sizes)


def pack_message(payloads: Sequence[Buffer | None]) -> bytearray:
    """One message for payloads that are all at hand; None marks one that could not be read."""
    table = np.empty((len(payloads), 2), "<u8")
    for row, payload in zip(table, payloads, strict=True):
        row[0] = _ABSENT if payload is None else len(payload)
        row[1] = 0 if payload is None else xxhash.xxh3_64_intdigest(payload)
    return bytearray().join([table.tobytes(), *(p for p in payloads if p is not None)])


def unpack_message(message: Buffer, sizes: npt.NDArray[np.int64]) -> list[memoryview | None]:
    """Views of the payloads in a message; None where one is absent or fails its checks.

    Args:
        message: may be longer than what was sent.
        sizes: what the receiver expects, from the reader's index; shape (samples,).
    """
    view = memoryview(message)
    at = ENTRY_BYTES * len(sizes)
    table = np.frombuffer(view[:at], "<u8").reshape(-1, 2)
    payloads: list[memoryview | None] = []
    for (size, digest), expected in zip(table, sizes, strict=True):
        if size == _ABSENT:
            payloads.append(None)
            continue
        payload = view[at : at + int(expected)]
        at += int(expected)
        sound = size == expected and xxhash.xxh3_64_intdigest(payload) == digest
        payloads.append(payload if sound else None)
    return payloads
