"""Memory of a large index while it is built: files without a name in this node's cache.

The kernel writes their pages out where memory is short, and a process that trains for a week does
not keep the memory of a minute. Small arrays are in the process's own memory, and all where a file
cannot be made, or has no space.
"""

import mmap
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar, overload

import numpy as np
import numpy.typing as npt

from dlio.data.index import let_go, open_local_cache
from dlio.data.schema import WholeNumbers
from dlio.util.whole_files import open_unnamed

_SMALL: Final = 1 << 18
"""Bytes that need no file."""
_MOST_ROOM: Final = 1 << 26
"""Bytes of the largest file of kept parts, unless one part is larger."""
_PIECE: Final = 1 << 14
"""Numbers, or bytes of names, at the end of a growing column, which are in the process's memory."""
_DECODED: Final = 1 << 10
"""Names that are decoded at a time."""
Scalar = TypeVar("Scalar", bound=np.generic)


class KeptParts:
    """Arrays that are kept until an index is made of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = np.zeros(0, np.uint8)
        self._used = self._held = 0

    def add(self, *arrays: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
        """Keep the bytes of arrays, one after another, and return them, shape (n,)."""
        data = np.frombuffer(b"".join([each.tobytes() for each in arrays]), np.uint8)
        with self._lock:
            self._held += len(data)
            if self._held <= _SMALL:
                return data
            if self._used + len(data) > len(self._room):
                size = max(len(data), _SMALL + 1, min(self._held, _MOST_ROOM))
                self._room, self._used = new_column(size, np.uint8), 0
            kept = self._room[self._used : self._used + len(data)]
            self._used += len(data)
        kept[:] = data
        let_go(kept)
        return kept


class GrowingColumn:
    """Whole numbers of an index that is being built, in as few bytes as the largest one needs.

    Equal numbers take no memory: they become an array of one. All but the last ones are in
    `KeptParts`.
    """

    def __init__(self, *, signed: bool = False) -> None:
        self._codes = "bhiq" if signed else "BHIQ"
        self._last = array(self._codes[0])
        self._parts: list[npt.NDArray[Any]] = []
        self._kept = KeptParts()
        self._are_same, self._same, self._count = True, 0, 0

    def __len__(self) -> int:
        return self._count

    def append(self, value: int) -> None:
        """Add a number of 64 bits at most. Raises OverflowError for others."""
        if self._are_same:
            if value == self._same or not self._count:
                self._same = value
                self._count += 1
                return
            self._differ()
        try:
            self._last.append(value)
        except OverflowError:
            self._widen(self._code_of(value))
            self._last.append(value)
        self._count += 1
        if len(self._last) == _PIECE:
            self._keep()

    def extend(self, values: WholeNumbers) -> None:
        """Add numbers, shape (n,)."""
        if not len(values):
            return
        low, high = int(values.min()), int(values.max())
        if self._are_same:
            if low == high and (low == self._same or not self._count):
                self._same = low
                self._count += len(values)
                return
            self._differ()
        self._widen(max(map(self._code_of, (low, high)), key=self._codes.index))
        self._last.frombytes(values.astype(self._last.typecode).tobytes())
        self._count += len(values)
        if len(self._last) >= _PIECE:
            self._keep()

    def values(self) -> WholeNumbers:
        """Return the numbers, shape (n,), or (1,) if they are equal; nothing is added after it."""
        if self._are_same:
            return np.array([self._same], self._code_of(self._same))
        if len(self._last) or len(self._parts) > 1:
            self._keep()
            self._parts = [_joined(self._parts, self._count)]
        return self._parts[0]

    def spread(self) -> WholeNumbers:
        """Return the numbers, shape (n,)."""
        values = self.values()
        return values if len(values) == self._count else np.broadcast_to(values, self._count)

    def _code_of(self, value: int) -> str:
        for code in self._codes:
            if np.iinfo(code).min <= value <= np.iinfo(code).max:
                return code
        raise OverflowError(value)

    def _differ(self) -> None:
        """Hold more than one number, which all were up to now."""
        self._are_same = False
        self._last = array(self._code_of(self._same))
        if self._count:
            same = np.array(self._same, self._last.typecode)
            self._parts.append(np.broadcast_to(same, self._count))

    def _widen(self, code: str) -> None:
        """Make room for numbers of a type, if it is wider than the one so far."""
        if self._codes.index(code) > self._codes.index(self._last.typecode):
            self._last = array(code, self._last)

    def _keep(self) -> None:
        last = np.frombuffer(self._last, self._last.typecode)
        self._parts.append(self._kept.add(last).view(last.dtype))
        self._last = array(self._last.typecode)


class Names(Sequence[str]):
    """Many strings in two arrays, decoded some at a time. `blob` has the bytes of all strings, one
    after another, and `ends` the end of each in it."""

    def __init__(self, blob: npt.NDArray[np.uint8], ends: WholeNumbers) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        """Make one of a sequence of strings."""
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> list[str]: ...

    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            begin, end, step = number.indices(len(self))
            first = int(self.ends[begin - 1]) if 0 < begin < end else 0
            ends = self.ends[begin:end].astype(np.int64) - first
            return list(Names(self.blob[first:], ends))[::step] if step > 0 else list(self)[number]
        number = range(len(self))[number]
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.blob[start : int(self.ends[number])].tobytes())

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for at in range(0, len(self.ends), _DECODED):
            ends = self.ends[at : at + _DECODED].tolist()
            data, first = self.blob[begin : ends[-1]].tobytes(), begin
            text = data.decode() if data.isascii() else ""  # At once, in a third of the time.
            for end in ends:
                part = slice(begin - first, end - first)
                yield text[part] if text else os.fsdecode(data[part])
                begin = end

    def ending(self, suffixes: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """Return a mask, shape (n,), of those with one of some suffixes, in any case."""
        mask = np.zeros(len(self), np.bool_)
        begin = 0
        for at in range(0, len(self), _PIECE):
            ends = self.ends[at : at + _PIECE].astype(np.int64)
            data = self.blob[begin : ends[-1]].tobytes()
            if data.isascii():
                letters, ends = np.frombuffer(data.lower(), np.uint8), ends - begin
                sizes = np.diff(ends, prepend=0)
                for suffix in suffixes:
                    rows = np.flatnonzero(sizes >= len(suffix))
                    for k, letter in enumerate(reversed(suffix.encode()), 1):
                        rows = rows[letters[ends[rows] - k] == letter]
                    mask[at + rows] = True
            else:  # Some letters become others of ASCII where they are made small.
                own = Names(self.blob[begin : ends[-1]], ends - begin)
                mask[at : at + len(ends)] = [name.lower().endswith(suffixes) for name in own]
            begin += len(data)
        return mask

    def chosen(self, mask: npt.NDArray[np.bool_]) -> "Names":
        """Return those of a mask of shape (n,)."""
        if mask.all():
            return self
        sizes, made, begin = GrowingColumn(), KeptParts(), 0
        parts: list[npt.NDArray[Any]] = []
        for at in range(0, len(self), _PIECE):
            ends, some = self.ends[at : at + _PIECE].astype(np.int64), mask[at : at + _PIECE]
            own = np.diff(ends, prepend=begin)
            parts.append(made.add(self.blob[begin : ends[-1]][np.repeat(some, own)]))
            sizes.extend(own[some])
            begin = int(ends[-1])
        blob = _joined(parts, sum(map(len, parts))) if parts else np.zeros(0, np.uint8)
        ends = new_column(len(sizes), np.int64)
        np.cumsum(sizes.spread(), out=ends)
        return Names(blob, ends)


class GrowingNames:
    """Strings of an index that is being built: all but the last ones are in `KeptParts`."""

    def __init__(self) -> None:
        self._last = bytearray()
        self._ends = GrowingColumn()
        self._parts: list[npt.NDArray[Any]] = []
        self._kept = KeptParts()
        self._size = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, name: str) -> None:
        """Add a string, which may have bytes of any encoding, as names of files."""
        data = os.fsencode(name)
        self._last += data
        self._size += len(data)
        self._ends.append(self._size)
        if len(self._last) >= _PIECE:
            self._keep()

    def names(self) -> Names:
        """Return the strings; nothing is added after it."""
        if len(self._last) or len(self._parts) != 1:
            self._keep()
            self._parts = [_joined(self._parts, self._size)]
        return Names(self._parts[0], self._ends.spread())

    def _keep(self) -> None:
        self._parts.append(self._kept.add(np.frombuffer(self._last, np.uint8)))
        self._last = bytearray()


def repeated(names: Names) -> tuple[int, str]:
    """Return how many of some names were there before, and the first of them; (0, "") for none."""
    hashes = new_column(len(names), np.int64)
    every = map(hash, names)
    for at in range(0, len(names), _PIECE):
        some = np.fromiter(islice(every, _PIECE), np.int64)
        hashes[at : at + len(some)] = some
        let_go(hashes)
    hashes.sort()
    again = hashes[1:][hashes[1:] == hashes[:-1]].tolist()
    several, seen = set(again), set()
    for name in names if several else ():
        own = hash(name)
        if own in seen:
            return len(again), name
        if own in several:
            seen.add(own)
    return 0, ""


def _joined(parts: list[npt.NDArray[Any]], count: int) -> npt.NDArray[Any]:
    """Return arrays of types that grow as one of the last one's type; they are let go."""
    whole = new_column(count, parts[-1].dtype.type)
    begin = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        end = begin + len(part)
        whole[begin:end] = part
        begin = end
        let_go(part)
        let_go(whole)
    return whole


def new_column(count: int, dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return an array of shape (count,) to be filled; a large one is in a file.

    Pages that `dlio.data.index.let_go` takes out of memory stay in the file.
    """
    size = count * np.dtype(dtype).itemsize
    if size > _SMALL:
        try:
            file = _unnamed_file()
            try:
                os.posix_fallocate(file, 0, size)  # A page without space would kill the process.
                return np.ndarray((count,), dtype, mmap.mmap(file, size))
            finally:
                os.close(file)
        except OSError:
            pass
    return np.empty(count, dtype)


def _unnamed_file() -> int:
    """Open a file that is gone when it is closed. Raises OSError."""
    with open_local_cache() as cache:
        return open_unnamed(cache)
