"""Walk through the headers of a tar: names, offsets and sizes of its files, without extracting."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from dlio.errors import SourceError

_SCAN_BYTES: Final = 1 << 20
_BLOCK: Final = 512
_MAX_NAME: Final = 1 << 16
_MAX_MEMBERS: Final = 1 << 28
_OCTAL: Final = re.compile(rb"[0-7]+")
_SIZE: Final = re.compile(r"[0-9]{1,18}")


class TarMembers:
    """Iterate over the files of a tar; reads it in large chunks and caches one of them.

    Args:
        size: bytes of the tar.
        read: return a number of bytes from an offset.
        name: name of the tar, for error messages.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes], name: str) -> None:
        self._size = size
        self._read = read
        self._name = name
        self._stretch = b""
        self._start = 0

    def bytes_at(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`. Raises SourceError if the tar is too short."""
        if at + count > self._size:
            raise self.damaged(at, "it ends within a member: it was cut off")
        if not self._start <= at or at + count > self._start + len(self._stretch):
            self._start = at
            self._stretch = self._read(at, max(count, min(_SCAN_BYTES, self._size - at)))
        data = self._stretch[at - self._start : at - self._start + count]
        if len(data) != count:
            raise self.damaged(at, "it ends within a member: it was cut off")
        return data

    def damaged(self, at: int, why: str) -> SourceError:
        """Make the error for damage at an offset."""
        return SourceError(f"{self._name} at byte {at}: {why}; restore it")

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, offset, size) of each regular file. Raises SourceError if damaged."""
        at, longer, pax_size = 0, "", -1
        members = 0
        while at + _BLOCK <= self._size:
            head = self.bytes_at(at, _BLOCK)
            if not any(head):
                return
            _check_sum(head, self, at)
            size = _octal(head[124:136], self, at)
            kind = head[156:157]
            if pax_size >= 0 and kind not in b"xgLK":
                size = pax_size
            body = at + _BLOCK
            if body + size > self._size:
                raise self.damaged(at, "a member is longer than the file: it was cut off")
            if kind in (b"L", b"x"):
                if size > _MAX_NAME:
                    raise self.damaged(at, f"a header of {size} bytes")
                data = self.bytes_at(body, size)
                if kind == b"L":
                    longer = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
                else:
                    pax = _pax(data, self, at)
                    longer = pax.get("path", longer)
                    if "GNU.sparse.major" in pax or "GNU.sparse.size" in pax:
                        raise self.damaged(at, "a sparse member, which dlio does not read")
                    pax_size = -1
                    if "size" in pax:
                        if _SIZE.fullmatch(pax["size"]) is None:
                            raise self.damaged(at, "an invalid size")
                        pax_size = int(pax["size"])
            else:
                if kind in (b"0", b"\0", b"7"):
                    yield longer or _name(head), body, size
                members += 1
                if members > _MAX_MEMBERS:
                    raise self.damaged(at, "too many members")
                longer, pax_size = "", -1
            at = body + -(-size // _BLOCK) * _BLOCK
        if at > self._size:
            raise self.damaged(self._size, "it ends within a member: it was cut off")


def _check_sum(head: bytes, members: TarMembers, at: int) -> None:
    stored = _octal(head[148:156], members, at)
    if stored != sum(head[:148]) + 8 * 32 + sum(head[156:]):
        raise members.damaged(at, "is not a tar header: the file is damaged, or not a tar")


def _octal(field: bytes, members: TarMembers, at: int) -> int:
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if value >= 2**62:
            raise members.damaged(at, "an invalid size")
        return value
    text = field.rstrip(b"\0 ").lstrip(b" ") or b"0"
    if _OCTAL.fullmatch(text) is None:  # int() takes signs, too.
        raise members.damaged(at, "is not a tar header: the file is damaged")
    return int(text, 8)


def _name(head: bytes) -> str:
    name = head[:100].split(b"\0", 1)[0]
    if head[257:262] == b"ustar" and head[345]:
        name = head[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _pax(data: bytes, members: TarMembers, at: int) -> dict[str, str]:
    """Parse the records of a pax extended header."""
    records = {}
    place = 0
    while place < len(data):
        length, space, _ = data[place : place + 20].partition(b" ")
        if not space or not length.isdigit() or not 0 < int(length) <= len(data) - place:
            raise members.damaged(at, "an invalid extended header")
        record = data[place + len(length) + 1 : place + int(length) - 1]
        key, _, value = record.partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        place += int(length)
    return records
