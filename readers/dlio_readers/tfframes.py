"""Records in TFRecord files: a length, data, and masked checksums (CRC32C) of both.

uint64 length | uint32 masked CRC of length | data | uint32 masked CRC of data
"""

import struct
from collections.abc import Iterator
from typing import Final

import google_crc32c

from dlio.data.schema import MAX_PAYLOAD
from dlio.data.source import File
from dlio.errors import CorruptBlock, SourceError

__all__ = [
    "AROUND",
    "HEAD",
    "LazyRecord",
    "ReadParts",
    "WholeRecord",
    "check_data",
    "is_framed",
    "masked",
    "records_of",
]

HEAD: Final = struct.Struct("<QI")
FOOT: Final = struct.Struct("<I")
AROUND: Final = HEAD.size + FOOT.size
"""Bytes of a record that are not data."""
_LOCAL_BYTES: Final = 1 << 13
_REMOTE_BYTES: Final = 8 << 20
"""Bytes that are read at a time when a file is scanned: few of a local one, whose large values are
skipped, many of a remote one, whose requests take long."""
ReadParts = dict[int, bytes]
"""Parts of a file by their offsets."""
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
    """The part of a file that a scan is at."""

    def __init__(self, file: File, read: ReadParts | None = None) -> None:
        self._file, self._read = file, {} if read is None else read
        self._keeps = read is not None
        self._step = _REMOTE_BYTES if file.local_path is None else _LOCAL_BYTES
        self._at, self._data = 0, b""

    def read(self, at: int, count: int) -> bytes:
        """Return some bytes; fewer at the end of the file. Raises SourceError."""
        if not self._at <= at or at + count > self._at + len(self._data):
            data = self._read.get(at, b"")
            if len(data) < count:
                data = self._file.read(at, max(count, self._step))
                if self._keeps:
                    self._read[at] = data
            self._at, self._data = at, data
        return self._data[at - self._at : at - self._at + count]


def masked(data: bytes | memoryview) -> int:
    """Return the checksum of data as TFRecord files store it."""
    crc = int(google_crc32c.value(bytes(data)))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_framed(file: File) -> bool:
    """True if a file begins with a record's length and its checksum. Raises SourceError."""
    head = file.read(0, HEAD.size)
    return len(head) == HEAD.size and HEAD.unpack(head)[1] == masked(head[:8])


def records_of(file: File, read: ReadParts | None = None) -> Iterator[tuple[int, LazyRecord]]:
    """Yield (offset of the data, record) of a file's records, reading their lengths in order.

    Args:
        read: parts of the file by their offsets, which are not read again; more are added.

    Raises SourceError for files that are compressed or cut off, CorruptBlock for a length whose
    checksum is wrong.
    """
    window = _Window(file, read)
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
