"""Memory that a thread reuses for payloads, and decompression into given memory."""

import struct
import threading
from collections.abc import Sequence
from typing import Final

from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock


class PayloadScratch:
    """Memory that one thread reads one payload after another into; it grows to the largest."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = bytearray(1 << 16)

    def view(self, count: int) -> memoryview:
        """Return `count` bytes, which overwrite the contents of earlier views."""
        if len(self._memory) < count:
            # Not resized in place: earlier views keep the smaller memory alive.
            self._memory = bytearray(count + count // 4)
        return memoryview(self._memory)[:count]


class _ThreadScratch(threading.local):
    """Memory of one thread: touching fresh memory costs ten times as much as decompressing."""

    def __init__(self) -> None:
        self.packed = PayloadScratch()
        self.raw = PayloadScratch()


own_scratch: Final = _ThreadScratch()
"""Memory of the calling thread: `packed` for compressed payloads, `raw` for decompressed ones."""
LZ4_HEAD: Final = struct.Struct("<i")
"""Head of LZ4 data as numcodecs expects it: the decompressed size."""


def decompress_exactly(stored: memoryview, raw: memoryview) -> None:
    """Decompress LZ4 data into `raw`, which it has to fill exactly. Raises CorruptBlock."""
    decompress_packed(with_head(stored), raw)


def with_head(stored: memoryview) -> memoryview:
    """Return LZ4 data with room for a head before it, in memory that this thread reuses."""
    packed = own_scratch.packed.view(LZ4_HEAD.size + len(stored))
    packed[LZ4_HEAD.size :] = stored
    return packed


def decompress_packed(packed: memoryview, raw: memoryview) -> None:
    """Decompress LZ4 data into `raw`, which it has to fill exactly. Raises CorruptBlock.

    Args:
        packed: room for a head, followed by the data; the head is filled in.
        raw: writable memory of the decompressed size.
    """
    # Loaded at first use. The lz4 package cannot decompress into given memory.
    from numcodecs.lz4 import decompress

    LZ4_HEAD.pack_into(packed, 0, len(raw))
    try:
        decompress(packed, raw)
    except (RuntimeError, ValueError) as error:
        raise CorruptBlock("LZ4 data is damaged") from error


def scatter(payload: Buffer, pieces: Sequence[memoryview]) -> None:
    """Copy a payload into pieces of memory, which are together as long."""
    view, at = memoryview(payload), 0
    for piece in pieces:
        piece[:] = view[at : at + len(piece)]
        at += len(piece)
