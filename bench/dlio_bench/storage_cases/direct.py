"""Reads that pass the page cache by (O_DIRECT), for what storage itself can give."""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from dlio.errors import UsageError

_ALIGNMENT: Final = 4096
"""Bytes that offsets, lengths and addresses are multiples of; enough for all usual devices."""


def supports_direct(path: str) -> bool:
    """True if a file's system takes O_DIRECT; those in memory and some FUSE ones do not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise _unreadable(path, error) from error
    try:
        with mmap.mmap(-1, _ALIGNMENT) as buffer:
            os.preadv(descriptor, [buffer], 0)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def read_direct(path: str, request_bytes: int = 8 << 20) -> Iterator[memoryview]:
    """Yield the contents of a file, request by request, without the page cache.

    Each piece is valid until the next one. Where O_DIRECT is not supported, the file is read as
    usual and its pages are dropped afterwards.

    Args:
        request_bytes: bytes of a request; rounded up to a multiple of 4096.

    Raises UsageError if the file cannot be read.
    """
    size = -(-request_bytes // _ALIGNMENT) * _ALIGNMENT
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if supports_direct(path) else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _unreadable(path, error) from error
    buffer = mmap.mmap(-1, size)  # Begins at a page.
    view = memoryview(buffer)
    try:
        at = 0
        while count := os.preadv(descriptor, [view], at):
            yield view[:count]
            at += count
            if flags & os.O_DIRECT and count % _ALIGNMENT:
                break  # The end; the next offset would not be aligned.
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        # Unmapped when the last piece is gone.
        view.release()


def _unreadable(path: str, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read ({error.strerror}): make the file readable")
