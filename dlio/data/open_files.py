"""Files that stay open between reads, or for many reads at a time, or whose bytes are in memory.

To open a file costs a request to the metadata server of a parallel file system, often a slower one
than the read. A process keeps a limited number of files open; beyond it, the one that was opened
longest ago is closed.
"""

import errno
import io
import os
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Final, TypeVar

from dlio.data.links import DataRoot
from dlio.data.requests import fill, request
from dlio.data.source import File, ReadErrors
from dlio.errors import SourceError

_Read = TypeVar("_Read")
_MOST: Final = 256
"""Files that a process keeps open, at most."""
_SHARE: Final = 4
"""At most one in so many of the descriptors that the process may have."""
_LOOKING: Final = 100.0
"""A file is looked at again after so many times as long as the last look has taken: a microsecond
on a disk, and a request to a server on some parallel file systems."""
_LONGEST_S: Final = 1.0
"""But after no longer, as a look may take the time that a process was stopped, or a server hung."""


class Descriptor:
    """An open file, closed with the last reference to it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        """Take over a descriptor that is open."""
        self.number = number

    def __del__(self, close: Any = os.close) -> None:
        if self.number >= 0:
            close(self.number)


_alive: Final[weakref.WeakSet[Descriptor]] = weakref.WeakSet()


def _most() -> int:
    """Return the number of files that the process keeps open, at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft < 0 else max(1, min(_MOST, soft // _SHARE))


def may_hold_more() -> bool:
    """True if files may be held open for batches under way, beyond those that stay open anyway."""
    return len(_alive) < 2 * _most()


class _DescriptorCache:
    """The files of a process that are open, the one that was opened last at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, weakref.ref[PersistentFile]] = OrderedDict()

    def add(self, file: "PersistentFile") -> None:
        with self._lock:
            self._files[id(file)] = weakref.ref(file)
            self._files.move_to_end(id(file))
            self._let_go(len(self._files) - _most())

    def close_all(self) -> None:
        with self._lock:
            self._let_go(len(self._files))

    def remove(self, file: "PersistentFile") -> None:
        with self._lock:
            self._files.pop(id(file), None)

    def _let_go(self, count: int) -> None:
        for _ in range(count):
            _, file = self._files.popitem(last=False)
            kept = file()
            if kept is not None:
                kept.opened = None  # Whoever is reading holds the descriptor until it has read.


_opened = _DescriptorCache()


def _forget() -> None:
    global _opened
    _opened = _DescriptorCache()  # The lock may have been held by a thread that the child lacks.


os.register_at_fork(after_in_child=_forget)


class PersistentFile(File):
    """A file that stays open between reads, if it is local. Thread-safe.

    A file that another one has replaced since is read as it was, and one that was overwritten is
    refused. Owner: its reader, which closes it; a reader that is garbage-collected closes it, too.
    """

    def __init__(self, url: str, root: DataRoot | None = None) -> None:
        super().__init__(url, root)
        self.opened: Descriptor | None = None
        self._due = 0.0
        """Time at which the file is looked at again."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": None, "_due": 0.0}

    def descriptor(self) -> Descriptor:
        """Return the open file, which must be local, and which the caller does not close.

        Raises OSError; SourceError if it has changed.
        """
        opened = self.opened
        if opened is None:
            assert self.local_path is not None
            try:
                opened = self._descriptor(self.local_path)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                _opened.close_all()
                opened = self._descriptor(self.local_path)
            self._due = 0.0  # Another file may have taken its name.
            self.opened = opened
            _opened.add(self)
        now = time.monotonic()
        if now >= self._due:
            self.check_open(opened.number)
            self._due = now + min(_LOOKING * (time.monotonic() - now), _LONGEST_S)
        return opened

    def _descriptor(self, path: str) -> Descriptor:
        opened = Descriptor(self.root.open_regular(path))
        _alive.add(opened)
        return opened

    def close(self) -> None:
        """Close the file until it is read again."""
        super().close()
        self.opened = None
        _opened.remove(self)

    def _pread(self, path: str, offset: int, count: int | None) -> bytes:
        with request():
            return self._reading(_part, offset, count)

    def _pread_into(self, path: str, offset: int, into: memoryview) -> int:
        with request():
            return self._reading(fill, offset, into)

    def _reading(self, read: Callable[..., _Read], *place: Any) -> _Read:
        """Return the result of a function that gets the number of the open file, then `place`."""
        try:
            opened = self.descriptor()  # Held until it has been read.
            return read(opened.number, *place)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.opened = None  # A server of NFS was restarted.
            opened = self.descriptor()
            return read(opened.number, *place)


def _part(descriptor: int, offset: int, count: int | None) -> bytes:
    left = max(0, os.fstat(descriptor).st_size - offset)
    memory = bytearray(left if count is None else min(count, left))
    return bytes(memory[: fill(descriptor, offset, memoryview(memory))])


def open_file(file: File) -> Descriptor | None:
    """Return a local file that stays open, to be read without it; None for others, and where no
    more may be open."""
    if not isinstance(file, PersistentFile) or file.local_path is None:
        return None
    if file.opened is None and not may_hold_more():
        return None
    with suppress(OSError):
        return file.descriptor()
    return None


ReadRange = Callable[[int, memoryview], None]
"""Fills memory from an offset on."""


@contextmanager
def open_ranges(file: File) -> Iterator[ReadRange]:
    """Open a file once, for reads by several threads. Raises SourceError, as the reads do."""
    if file.local_path is None:
        yield file.read_into
        return
    with ReadErrors(file.url):
        descriptor = file.root.open(file.local_path)

    def read(offset: int, into: memoryview) -> None:
        with ReadErrors(file.url), request():
            done = fill(descriptor, offset, into)
            file.check_open(descriptor)
        file.check_whole(into, done)

    try:
        yield read
    finally:
        os.close(descriptor)


class InMemoryFile(File):
    """A file whose bytes have been read: it is not asked again. `file` names it in errors."""

    def __init__(self, file: File, data: memoryview) -> None:
        self.url, self.name, self.local_path = file.url, file.name, file.local_path
        if file.local_path is not None:
            self.root = file.root
        self.size, self.times = len(data), file.times
        self._changed = file._changed
        self._data = data

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        end = len(self._data) if count is None else offset + count
        return bytes(self._data[offset:end])

    def read_into(self, offset: int, into: memoryview) -> None:
        part = self._data[offset : offset + len(into)]
        if len(part) < len(into):
            raise SourceError(f"{self.name} is cut off: restore it")
        into[:] = part

    def check(self) -> None:
        """Return: the file is not asked again."""

    def open(self) -> BinaryIO:
        return io.BytesIO(self._data)
