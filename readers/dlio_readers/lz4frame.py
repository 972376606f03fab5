"""Random access into LZ4 frames of independent blocks."""

import struct
from collections import OrderedDict
from typing import Final

import lz4.block
import numpy as np

from dlio.data.index import Arrays
from dlio.data.source import File
from dlio.errors import SourceError
from dlio.util.forks import new_lock

_FRAME_MAGIC: Final = 0x184D2204
_FRAME_BLOCKS: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
_KEPT_BLOCKS: Final = 16


class Lz4Frame:
    """An LZ4 frame of independent blocks; caches the last decompressed ones. Thread-safe.

    Args:
        file: the compressed file.
        index: arrays made by `frame_index`.
    """

    def __init__(self, file: File, index: Arrays) -> None:
        self._file = file
        self._at, self._stored = index["frame_at"], index["frame_stored"]
        self._raw_bytes = int(index["frame_raw"][0])
        self.size = int(index["frame_raw"][1])
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = new_lock()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with decompressed bytes from `offset` on. Raises SourceError."""
        done = 0
        while done < len(into):
            number, start = divmod(offset + done, self._raw_bytes)
            if number >= len(self._at):
                raise SourceError(f"{self._file.name} ends early: it was cut off; restore it")
            part = self._block(number)[start : start + len(into) - done]
            if not part:
                raise SourceError(f"{self._file.name} ends early: it was cut off; restore it")
            into[done : done + len(part)] = part
            done += len(part)

    def _block(self, number: int) -> bytes:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        stored = int(self._stored[number])
        data = self._file.read(int(self._at[number]), abs(stored))
        if stored > 0:
            try:
                data = lz4.block.decompress(data, uncompressed_size=self._raw_bytes)
            except lz4.block.LZ4BlockError as error:
                raise SourceError(f"{self._file.name}: LZ4 data is damaged; restore it") from error
        with self._lock:
            self._kept[number] = data
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return data


def frame_index(file: File) -> Arrays:
    """Index the blocks of an LZ4 frame, for `Lz4Frame`.

    Returns `frame_at`, the offset of each block, `frame_stored`, its stored bytes (negative if it
    is not compressed), and `frame_raw`, (decompressed bytes per block, total).

    Raises SourceError for damaged frames, and for frames with linked blocks.
    """
    head = file.read(0, 19)
    wrong = SourceError(f"{file.name} is not an LZ4 frame, or is damaged: restore it")
    if len(head) < 7 or struct.unpack_from("<I", head)[0] != _FRAME_MAGIC:
        raise wrong
    flags, descriptor = head[4], head[5]
    raw_bytes = _FRAME_BLOCKS.get(descriptor >> 4 & 7)
    if flags >> 6 != 1 or raw_bytes is None:
        raise wrong
    if not flags & 0x20:
        raise SourceError(
            f"{file.name}: its LZ4 blocks are linked, which prevents random access: compress it "
            "with `lz4 -BI`"
        )
    at = 7 + (8 if flags & 8 else 0) + (4 if flags & 1 else 0)
    places, sizes = [], []
    while True:
        word = file.read(at, 4)
        if len(word) < 4:
            raise wrong
        size = struct.unpack("<I", word)[0]
        if size == 0:
            break
        plain, size = bool(size >> 31), size & 0x7FFFFFFF
        if size > raw_bytes + 16 or at + 4 + size > file.size:
            raise wrong
        places.append(at + 4)
        sizes.append(-size if plain else size)
        at += 4 + size + (4 if flags & 0x10 else 0)
    if not places:
        raise wrong
    index = {
        "frame_at": np.array(places, np.int64),
        "frame_stored": np.array(sizes, np.int64),
        "frame_raw": np.array([raw_bytes, raw_bytes * len(places)], np.int64),
    }
    last = Lz4Frame(file, index)._block(len(places) - 1)
    index["frame_raw"][1] = raw_bytes * (len(places) - 1) + len(last)
    return index
