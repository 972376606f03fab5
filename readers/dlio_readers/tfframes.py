"""Records in TFRecord files: a length, data, and masked checksums (CRC32C) of both.

uint64 length | uint32 masked CRC of length | data | uint32 masked CRC of data
"""

import struct
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Final

import google_crc32c

from dlio.data.schema import MAX_PAYLOAD
from dlio.data.source import File
from dlio.errors import CorruptBlock, SourceError

HEAD: Final = struct.Struct("<QI")
FOOT: Final = struct.Struct("<I")
AROUND: Final = HEAD.size + FOOT.size
"""Bytes of a record that are not data."""
_SMALL_BYTES: Final = 1 << 13
_LARGE_BYTES: Final = 4 << 20
"""Bytes that are read at a time when a file is scanned: few at first of a local one, many of a
remote one."""
_TRIAL_READS: Final = 8
"""Small reads after which their speed is known."""
_SLOW_S: Final = 2e-3
"""A read that takes longer is slow."""
_GZIP: Final = b"\x1f\x8b"


class WholeRecord:
    """A record's data in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, end: int) -> bytes:
        return bytes(self._data[start:end])


class LazyRecord:
    """A record's data in a file, of which only those parts are read that are asked for."""

    def __init__(self, window: "_Window", at: int, size: int) -> None:
        self._window, self._at, self._size = window, at, size

    def __len__(self) -> int:
        return self._size

    def part(self, start: int, end: int) -> bytes:
        return self._window.read(self._at + start, end - start)


class _Window:
    """The part of a file that a scan is at.

    What a scan needs of a record is small. Where requests are slow, reading records in between is
    faster than passing over them, unless these are large: of slow reads both are tried, and the one
    stays that got further per second.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        sizes = (_SMALL_BYTES, _LARGE_BYTES)
        self._step, self._other = sizes if file.local_path is not None else sizes[::-1]
        self._parts: deque[tuple[int, bytes]] = deque(maxlen=2)
        """(offset, bytes): a record is looked at again where it begins, after its end was."""
        self._trials: list[float] = []
        """Bytes per second that the sizes of reads got further, up to two."""
        self._begin(0)

    def read(self, at: int, count: int) -> bytes:
        """Return some bytes; fewer at the end of the file. Raises SourceError."""
        for begin, data in self._parts:
            if begin <= at and at + count <= begin + len(data):
                return data[at - begin : at - begin + count]
        if len(self._trials) < 2 and self._reads >= self._enough:
            self._judge(at)
        began = perf_counter()
        data = self._file.read(at, max(count, self._step))
        self._seconds += perf_counter() - began
        self._reads += 1
        self._parts.append((at, data))
        return data[:count]

    def _begin(self, at: int) -> None:
        self._since, self._reads, self._seconds = at, 0, 0.0
        self._enough = _TRIAL_READS if self._step == _SMALL_BYTES else 1

    def _judge(self, at: int) -> None:
        """End a trial that came as far as `at`, and begin the next one or none."""
        is_slow = self._seconds > _SLOW_S * self._reads
        self._trials.append((at - self._since) / max(self._seconds, 1e-9))
        if len(self._trials) == 1 and not is_slow:
            self._trials.append(0.0)
        elif len(self._trials) == 1 or self._trials[0] >= self._trials[1]:
            self._step, self._other = self._other, self._step
        self._begin(at)


def masked(data: bytes | memoryview) -> int:
    """Return the checksum of data as TFRecord files store it."""
    crc = int(google_crc32c.value(bytes(data)))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_framed(file: File) -> bool:
    """True if a file begins with a record's length and its checksum. Raises SourceError."""
    head = file.read(0, HEAD.size)
    return len(head) == HEAD.size and HEAD.unpack(head)[1] == masked(head[:8])


def records_of(file: File) -> Iterator[tuple[int, LazyRecord]]:
    """Yield (offset of the data, record) of a file's records, reading their lengths in order.

    Raises SourceError for files that are compressed or cut off, CorruptBlock for a length whose
    checksum is wrong.
    """
    window = _Window(file)
    if window.read(0, 2) == _GZIP:
        raise SourceError(
            f"{file.name} is compressed as a whole, so that its records cannot be read one by one: "
            "decompress it (gunzip), and compress pictures in it instead"
        )
    at, number = 0, 0
    while at < file.size:
        where = f"{file.name}, record {number},"
        head = window.read(at, HEAD.size)
        if len(head) < HEAD.size:
            raise SourceError(f"{where} is cut off: {file.size - at} bytes: restore the file")
        size, crc = HEAD.unpack(head)
        if crc != masked(head[:8]):
            what = "has a wrong checksum of its length" if number else "is not of a TFRecord file"
            raise CorruptBlock(f"{where} {what}: restore the file")
        if at + AROUND + size > file.size or size > MAX_PAYLOAD:
            raise SourceError(
                f"{where} has {size} bytes, of which the file holds "
                f"{max(0, file.size - at - AROUND)}: it is cut off; restore it"
            )
        yield at + HEAD.size, LazyRecord(window, at + HEAD.size, size)
        at += AROUND + size
        number += 1


def check_data(stored: memoryview, where: str) -> memoryview:
    """Return the data of a record that has been read with its checksums.

    Raises CorruptBlock if a checksum is wrong.
    """
    size, crc = HEAD.unpack(stored[: HEAD.size])
    data = stored[HEAD.size : -FOOT.size]
    if crc != masked(stored[:8]) or size != len(data):
        raise CorruptBlock(f"{where} has a wrong checksum of its length: restore the file")
    if FOOT.unpack(stored[-FOOT.size :])[0] != masked(data):
        raise CorruptBlock(f"{where} has a wrong checksum of its data: restore the file")
    return data
