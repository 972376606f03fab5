"""Files of a zip archive that are stored without compression, read where they lie.

fsspec reads a file in an archive from its beginning up to the range that is asked for, or, of a
remote archive, megabytes around each small file. The bytes of a file that is not compressed are a
range of the archive, behind a header of the file's own. (APPNOTE.TXT, section 4.3.)
"""

import io
import os
import struct
import zlib
from dataclasses import dataclass
from threading import Lock
from typing import Any, BinaryIO, Final, cast
from zipfile import ZIP_STORED, BadZipFile, ZipInfo

_HEADER: Final = struct.Struct("<4s2xH18xHH")
"""Of a local header: signature, flags, lengths of the name and of the extra field."""
_SIGNATURE: Final = b"PK\x03\x04"
_UTF8: Final = 0x800
_ENCRYPTED_OR_PATCHED: Final = 0x1 | 0x20 | 0x40
_SLACK: Final = 256
"""Bytes of an extra field for which a first request has room."""
_WITH_HEADER: Final = 1 << 20
"""Bytes that a first request reads with the header, at most."""


@dataclass(frozen=True, slots=True)
class StoredMember:
    """The place of a file in an archive."""

    name: str
    begin: int
    """Offset of its first byte."""
    size: int
    crc: int

    def read(self, files: object, offset: int, end: int | None) -> bytes:
        """Return a range of the file, clipped to it. Raises EOFError if the archive has become
        shorter, BadZipFile if all of the file is read, and its checksum differs."""
        offset = min(offset, self.size)
        end = self.size if end is None else max(offset, min(end, self.size))
        data = _archive_range(files, self.begin + offset, end - offset) if end > offset else b""
        if len(data) < end - offset:
            raise EOFError(f"the archive ends before its file {self.name}")
        return self.checked(data, offset)

    def checked(self, data: bytes, offset: int = 0) -> bytes:
        """Return `data`. Raises BadZipFile if it is the whole file, and its checksum differs."""
        if offset == 0 and len(data) == self.size and zlib.crc32(data) != self.crc:
            raise BadZipFile(f"Bad CRC-32 for file {self.name!r}")
        return data

    def open(self, files: object) -> BinaryIO:
        """Open a seekable stream of the file. Its ranges are not checked."""
        descriptor = _descriptor(files)
        archive = _outer(files) if descriptor is None else _LocalArchive(os.dup(descriptor))
        return cast("BinaryIO", _MemberStream(archive, self.begin, self.size))


def read_stored(files: object, path: str, offset: int, end: int | None) -> bytes | None:
    """Return a range of a file of fsspec's file system `files`; None unless that is a zip archive
    in which it is stored: fsspec reads all others. Thread-safe."""
    info = _stored(files, path)
    if info is None:
        return None
    members = _members(files)
    member = members.get(path)
    if member is not None:
        return member.read(files, offset, end)
    whole = offset == 0 and (end is None or end >= info.file_size)
    member, data = _located(files, info, _WITH_HEADER if whole else 0)
    if member is None:
        return None
    members[path] = member
    if whole and len(data) == member.size:
        return member.checked(data)
    return member.read(files, offset, end)


def open_stored(files: object, path: str) -> BinaryIO | None:
    """Open a seekable stream of a file; None as of `read_stored`."""
    info = _stored(files, path)
    member = None if info is None else _located(files, info, 0)[0]
    return None if member is None else member.open(files)


class _LocalArchive:
    """An archive that is open, without a place of its own in it: as a stream, which closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0

    def seek(self, offset: int) -> None:
        self._at = offset

    def readinto(self, into: memoryview) -> int:
        done = os.preadv(self._descriptor, [into], self._at)
        self._at += done
        return done

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _MemberStream(io.RawIOBase):
    """A range of an archive as a file. Owns the archive's stream."""

    def __init__(self, archive: Any, begin: int, size: int) -> None:
        self._archive, self._begin, self._size, self._at = archive, begin, size, 0
        self._lock = Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"negative seek position {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        done = 0
        with self._lock:
            self._archive.seek(self._begin + self._at)
            while done < len(into) and (count := self._archive.readinto(into[done:])):
                done += count
            self._at += done
        return done

    def close(self) -> None:
        self._archive.close()
        super().close()


def _members(files: Any) -> dict[str, StoredMember]:
    """Return the places of files that have been found: with the archive's directory that they were
    found by, which is read anew after a fork and in other processes."""
    members: dict[str, StoredMember] = vars(files).setdefault("_dlio_stored", {})
    return members


def _stored(files: Any, path: str) -> ZipInfo | None:
    """Return the entry of a stored file in the archive's directory; None if it is compressed
    or encrypted, or `files` are not those of an archive that fsspec reads as it is."""
    if getattr(getattr(files, "of", None), "compression", "") is not None:
        return None
    info = getattr(getattr(files, "zip", None), "NameToInfo", {}).get(path.lstrip("/"))
    if not isinstance(info, ZipInfo) or info.compress_type != ZIP_STORED:
        return None
    is_plain = info.file_size == info.compress_size and not info.flag_bits & _ENCRYPTED_OR_PATCHED
    return info if is_plain else None


def _located(files: Any, info: ZipInfo, most: int) -> tuple[StoredMember | None, bytes]:
    """Find a file's first byte by its local header. Returns the file's bytes, too, if it has no
    more than `most`; b"" otherwise.

    None if the header is not the one of the directory, or the file ends where another has begun,
    for zipfile to refuse with its own reason.
    """
    named = _HEADER.size + 2 * len(info.orig_filename.encode("utf-8", "replace"))
    count = named + (_SLACK + info.file_size if info.file_size <= most else 0)
    data = _archive_range(files, info.header_offset, count)
    if len(data) < _HEADER.size:
        return None, b""
    signature, flags, name_length, extra_length = _HEADER.unpack_from(data)
    name = data[_HEADER.size : _HEADER.size + name_length]
    text = name.decode("utf-8" if flags & _UTF8 else "cp437", "replace")
    if signature != _SIGNATURE or text != info.orig_filename:
        return None, b""
    begin = _HEADER.size + name_length + extra_length
    ends = info.header_offset + begin + info.file_size
    limit = getattr(info, "_end_offset", None) or files.zip.start_dir
    if ends > limit:
        return None, b""
    member = StoredMember(info.filename, info.header_offset + begin, info.file_size, info.CRC)
    return member, data[begin : begin + info.file_size] if info.file_size <= most else b""


def _descriptor(files: Any) -> int | None:
    """Return the descriptor of an archive that is open as a local file; None of others."""
    try:
        number: int = files.fo.fileno()
    except (AttributeError, OSError):
        return None
    return number


def _outer(files: Any) -> Any:
    """Open an archive that is not local as a stream."""
    return files.of.fs.open(files.of.path, "rb")


def _archive_range(files: Any, offset: int, count: int) -> bytes:
    """Return a range of the archive itself, fewer bytes at its end."""
    descriptor = _descriptor(files)
    if descriptor is None:
        fetched: bytes = files.of.fs.cat_file(files.of.path, start=offset, end=offset + count)
        if len(fetched) > count:
            raise OSError(
                f"the server sent {len(fetched)} bytes for a request of {count}: it does not serve "
                "parts of files; use one that does, or copy the files"
            )
        return fetched
    parts = []
    while count and (part := os.pread(descriptor, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
