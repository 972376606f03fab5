"""A file system for fsspec with faults: `faulty:///path` reads /path through a `ScheduledFault`."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

Fault = Callable[[str, int, bytes], bytes]
"""Called with path, offset and the true bytes; returns the bytes to be read, or raises."""


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local file system, whose reads pass through a fault."""

    protocol = "faulty"
    cachable = False
    fault: ClassVar[Fault] = staticmethod(lambda path, offset, data: data)
    listing: ClassVar[Callable[[str], None]] = staticmethod(lambda path: None)
    reads: ClassVar[list[tuple[str, int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path).removeprefix("faulty://")
        return super()._strip_protocol(text)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        plain = self._strip_protocol(path)
        data: bytes = super().cat_file(plain, start=start, end=end, **kwargs)
        FaultyFileSystem.reads.append((plain, start or 0, len(data)))
        return FaultyFileSystem.fault(plain, start or 0, data)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        FaultyFileSystem.listing(path)
        return super().ls(path, detail=detail, **kwargs)


def install() -> None:
    """Register `faulty://` with fsspec, without faults and with its counts at zero."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.fault = staticmethod(lambda path, offset, data: data)
    FaultyFileSystem.listing = staticmethod(lambda path: None)
    FaultyFileSystem.reads = []


def fails(number: int, times: int, below: int) -> Fault:
    """Let the first `times` reads that begin below a byte fail with the error `number`.

    Args:
        below: the end of a shard's blocks, where its footer begins.
    """
    left = [times]
    lock = threading.Lock()

    def fault(path: str, offset: int, data: bytes) -> bytes:
        with lock:
            if offset < below and left[0] > 0:
                left[0] -= 1
                raise OSError(number, errno.errorcode[number])
        return data

    return fault


def hangs(event: threading.Event) -> Fault:
    """Let reads wait for the event."""

    def fault(path: str, offset: int, data: bytes) -> bytes:
        event.wait(60)
        time.sleep(0)
        return data

    return fault
