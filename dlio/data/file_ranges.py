"""Files by ranges: one opening for many reads at a time, and files whose bytes are in memory."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from dlio.data.requests import fill, request
from dlio.data.source import File, failed
from dlio.errors import SourceError
from dlio.util.limits import open_unchecked

ReadRange = Callable[[int, memoryview], None]
"""Fills memory from an offset on."""


@contextmanager
def open_ranges(file: File) -> Iterator[ReadRange]:
    """Open a file once, for reads by several threads. Raises SourceError, as the reads do."""
    if file.local_path is None:
        yield file.read_into
        return
    try:
        descriptor = open_unchecked(file.local_path)
    except OSError as error:
        raise failed(file.url, error) from error

    def read(offset: int, into: memoryview) -> None:
        try:
            with request():
                done = fill(descriptor, offset, into)
        except OSError as error:
            raise failed(file.url, error) from error
        file.check_whole(into, done)

    try:
        yield read
    finally:
        os.close(descriptor)


class InMemoryFile(File):
    """A file whose bytes have been read: it is not asked again.

    Args:
        file: names it in errors.
        data: all of its bytes.
    """

    def __init__(self, file: File, data: memoryview) -> None:
        self.url, self.name, self.local_path = file.url, file.name, file.local_path
        self.size, self.times = len(data), file.times
        self._data = data

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        end = len(self._data) if count is None else offset + count
        return bytes(self._data[offset:end])

    def read_into(self, offset: int, into: memoryview) -> None:
        part = self._data[offset : offset + len(into)]
        if len(part) < len(into):
            raise SourceError(f"{self.name} is cut off: restore it")
        into[:] = part

    def open(self) -> BinaryIO:
        return io.BytesIO(self._data)
