"""Random access into LZ4 frames of independent blocks."""

import struct
from collections.abc import Callable
from typing import Final

import lz4.block
import numpy as np

from dlio.data.index import Arrays
from dlio.data.source import File
from dlio.errors import SourceError

_FRAME_MAGIC: Final = 0x184D2204
_SKIPPED_MAGIC: Final = 0x184D2A50
_FRAME_BLOCKS: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}


class Lz4Frames:
    """LZ4 frames of independent blocks, one after another. Thread-safe.

    `index` are the arrays of `frames_index`; `last_blocks` returns one by its number, and keeps the
    last ones of all files that share it.
    """

    def __init__(
        self, file: File, index: Arrays, last_blocks: Callable[["Lz4Frames", int], bytes]
    ) -> None:
        self._file = file
        self._at, self._stored = index["frame_at"], index["frame_stored"]
        self._ends = index["frame_ends"]
        self.size = int(self._ends[-1])
        self._last_blocks = last_blocks

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with decompressed bytes from `offset` on. Raises SourceError."""
        if offset + len(into) > self.size:
            raise SourceError(f"{self._file.name} ends early: it was cut off; restore it")
        number = int(np.searchsorted(self._ends, offset, side="right"))
        done = 0
        while done < len(into):
            start = offset + done - int(self._ends[number - 1] if number else 0)
            part = self._last_blocks(self, number)[start : start + len(into) - done]
            into[done : done + len(part)] = part
            done += len(part)
            number += 1

    def block(self, number: int) -> bytes:
        """Decompress a block."""
        expected = int(self._ends[number]) - int(self._ends[number - 1] if number else 0)
        data = _block_at(self._file, int(self._at[number]), int(self._stored[number]), expected)
        if len(data) != expected:
            raise SourceError(f"{self._file.name} has changed since it was indexed: run again")
        return data


def _block_at(file: File, at: int, stored: int, most: int) -> bytes:
    """Return a decompressed block of `most` bytes or less; `stored` is negative for a plain one."""
    data = file.read(at, abs(stored))
    if stored > 0:
        try:
            data = lz4.block.decompress(data, uncompressed_size=most)
        except lz4.block.LZ4BlockError as error:
            raise SourceError(f"{file.name}: LZ4 data is damaged; restore it") from error
    return data


def frames_index(file: File) -> Arrays:
    """Index the blocks of a file of LZ4 frames, for `Lz4Frames`.

    Returns `frame_at`, the offset of each block, `frame_stored`, its stored bytes (negative if it
    is not compressed), and `frame_ends`, the end of its decompressed bytes among those of all.

    Raises SourceError for damaged frames, and for frames with linked blocks.
    """
    at, total = 0, 0
    places: list[int] = []
    sizes: list[int] = []
    ends: list[int] = []
    while at < file.size:
        word = file.read(at, 8)
        magic = struct.unpack_from("<I", word)[0] if len(word) == 8 else 0
        if magic & ~0xF == _SKIPPED_MAGIC:
            at += 8 + struct.unpack_from("<I", word, 4)[0]
            continue
        own_places, own_sizes, own_bytes, at = _frame(file, at)
        places += own_places
        sizes += own_sizes
        for each in own_bytes:
            total += each
            ends.append(total)
    if not places or at > file.size:
        raise _not_lz4(file)
    return {
        "frame_at": np.array(places, np.int64),
        "frame_stored": np.array(sizes, np.int64),
        "frame_ends": np.array(ends, np.int64),
    }


def _not_lz4(file: File) -> SourceError:
    return SourceError(f"{file.name} is not an LZ4 frame, or is damaged: restore it")


def _frame(file: File, start: int) -> tuple[list[int], list[int], list[int], int]:
    """Return (offset, stored bytes, decompressed bytes of each block; the frame's end)."""
    head = file.read(start, 19)
    wrong = _not_lz4(file)
    if len(head) < 7 or struct.unpack_from("<I", head)[0] != _FRAME_MAGIC:
        raise wrong
    flags, descriptor = head[4], head[5]
    most = _FRAME_BLOCKS.get(descriptor >> 4 & 7)
    if flags >> 6 != 1 or most is None:
        raise wrong
    if not flags & 0x20:
        raise SourceError(
            f"{file.name}: its LZ4 blocks are linked, which prevents random access: compress it "
            "with `lz4 -BI`"
        )
    whole = struct.unpack_from("<Q", head, 6)[0] if flags & 8 and len(head) >= 14 else None
    at = start + 7 + (8 if flags & 8 else 0) + (4 if flags & 1 else 0)
    places, sizes = [], []
    while True:
        word = file.read(at, 4)
        if len(word) < 4:
            raise wrong
        size = struct.unpack("<I", word)[0]
        if size == 0:
            break
        plain, size = bool(size >> 31), size & 0x7FFFFFFF
        if size > most + 16 or at + 4 + size > file.size:
            raise wrong
        places.append(at + 4)
        sizes.append(-size if plain else size)
        at += 4 + size + (4 if flags & 0x10 else 0)
    at += 4 + (4 if flags & 4 else 0)
    if not places:
        return [], [], [], at
    last = len(_block_at(file, places[-1], sizes[-1], most))
    if whole == most * (len(places) - 1) + last:
        return places, sizes, [most] * (len(places) - 1) + [last], at
    # A writer that flushes makes blocks of any size, which no header tells.
    rows = zip(places, sizes, strict=True)
    return places, sizes, [len(_block_at(file, place, size, most)) for place, size in rows], at
