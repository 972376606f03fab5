"""The headers of a tar: names, offsets and sizes of its files and links, without extracting."""

import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dlio.errors import SourceError

_SCAN_BYTES: Final = 1 << 20
_BLOCK: Final = 512
_ZEROS: Final = bytes(_BLOCK)
_RECORDS: Final = 1 << 16
"""Bytes after an end mark that are looked at: tars are padded to 10,240."""
_MOST_LINKS: Final = 16
_MAX_NAME: Final = 1 << 16
_MAX_MEMBERS: Final = 1 << 28
_OCTAL: Final = re.compile(rb"[0-7]+")
_SIZE: Final = re.compile(r"[0-9]{1,18}")


class TarMembers:
    """Iterate over the files of a tar; reads it in large chunks and caches one of them.

    `read` returns a number of bytes from an offset.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes], name: str) -> None:
        self._size = size
        self._read = read
        self._name = name
        self.note = ""
        """An oddity of the tar, known after all its members; empty without one."""
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

    def __iter__(self) -> Iterator["TarMember"]:
        """Yield each regular file and each link. Raises SourceError if the tar is damaged."""
        at, longer, target, pax_size = 0, "", "", -1
        members = 0
        self.note = "lacks its end mark: it may have been cut off between two members"
        while at + _BLOCK <= self._size:
            head = self.bytes_at(at, _BLOCK)
            if head == _ZEROS:
                rest = self.bytes_at(at, min(_RECORDS, self._size - at))
                self.note = (
                    "goes on after its end mark, which is not read: unpack it with tar --"
                    "ignore-zeros and pack it again"
                    if any(rest)
                    else ""
                )
                return
            if _octal(head[148:156], self, at) != _checksum(head):
                raise self.damaged(at, "is not a tar header: the file is damaged, or not a tar")
            size = _octal(head[124:136], self, at)
            kind = head[156:157]
            if pax_size >= 0 and kind not in b"xgLK":
                size = pax_size
            if kind in b"123456":
                size = 0  # Some writers note the size of a link's target.
            body = at + _BLOCK
            if body + size > self._size:
                raise self.damaged(at, "a member is longer than the file: it was cut off")
            if kind == b"S":
                raise self._sparse(longer or _name(head))
            if kind in (b"L", b"K", b"x"):
                if size > _MAX_NAME:
                    raise self.damaged(at, f"a header of {size} bytes")
                data = self.bytes_at(body, size)
                if kind == b"L":
                    longer = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
                elif kind == b"K":
                    target = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
                else:
                    pax = _pax(data, self, at)
                    longer = pax.get("path", longer)
                    target = pax.get("linkpath", target)
                    if any(key.startswith("GNU.sparse.") for key in pax):
                        raise self._sparse(pax.get("GNU.sparse.name", longer))
                    pax_size = -1
                    if "size" in pax:
                        if _SIZE.fullmatch(pax["size"]) is None:
                            raise self.damaged(at, "an invalid size")
                        pax_size = int(pax["size"])
            else:
                name = longer or _name(head)
                if kind in (b"0", b"\0", b"7"):
                    yield TarMember(name, body, size)
                elif kind in (b"1", b"2"):
                    named = target or _text(head[157:257])
                    yield TarMember(name, body, 0, _target(name, named, symbolic=kind == b"2"))
                members += 1
                if members > _MAX_MEMBERS:
                    raise self.damaged(at, "too many members")
                longer, target, pax_size = "", "", -1
            at = body + -(-size // _BLOCK) * _BLOCK
        if at > self._size:
            raise self.damaged(self._size, "it ends within a member: it was cut off")

    def _sparse(self, name: str) -> SourceError:
        return SourceError(
            f"{self._name}: {name} is stored as a sparse file, which dlio does not read: pack the "
            "tar without --sparse"
        )


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file in a tar, or a link to one."""

    name: str
    at: int
    """Offset of its bytes."""
    size: int
    target: str | None = None
    """Path in the tar that a link names; None for a file."""


class LinkTargets:
    """The members of a tar by name, to follow its links within the tar."""

    def __init__(self, members: Iterable[TarMember], file: str) -> None:
        self._file = file
        self._own: dict[str, list[TarMember]] = {}
        self._folders: set[str] = set()
        for member in members:
            path = _plain(member.name)
            self._own.setdefault(path, []).append(member)
            while (path := posixpath.dirname(path)) and path not in self._folders:
                self._folders.add(path)

    def resolve(self, link: TarMember) -> TarMember | None:
        """Return the file that a link leads to; None for a folder.

        Raises SourceError if the tar does not hold it.
        """
        at, member = link.at, link
        for _ in range(_MOST_LINKS):
            if member.target is None:
                return member
            known = self._own.get(member.target)
            if known is None:
                if member.target in self._folders:
                    return None
                break
            # Of members of one name, tar takes the last one before a link.
            member = next((each for each in reversed(known) if each.at < at), known[-1])
            at = member.at
        raise SourceError(
            f"{self._file}: {link.name} is a link to {link.target}, which the tar does not hold: "
            "pack the files themselves, with tar --dereference --hard-dereference"
        )


def _target(name: str, named: str, *, symbolic: bool) -> str:
    return _plain(posixpath.join(posixpath.dirname(name), named) if symbolic else named)


def _plain(path: str) -> str:
    return posixpath.normpath(path).lstrip("/")


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


def _checksum(head: bytes) -> int:
    """Return the sum of a header's bytes, with spaces in place of its checksum."""
    # Adler-32 has the sum of up to 257 bytes in its lower half, plus 1, and takes no time.
    halves = (zlib.adler32(half) & 0xFFFF for half in (head[:256], head[256:]))
    return sum(halves) - 2 - sum(head[148:156]) + 8 * 32


def _name(head: bytes) -> str:
    # GNU's headers, which end in two spaces, have times where others have the path's beginning.
    if head[257:263] == b"ustar\0" and head[345]:
        return f"{_text(head[345:500])}/{_text(head[:100])}"
    return _text(head[:100])


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(data: bytes, members: TarMembers, at: int) -> dict[str, str]:
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
