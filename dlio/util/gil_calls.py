"""File calls that keep the interpreter's lock.

Opening a file in shared memory takes two microseconds and never waits. With many threads, taking
the lock again after it would take ten times as long: all others that wait for the lock come first.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final

from dlio.util.limits import open_regular

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_Openat = Callable[[int, bytes, int], int]
_Close = Callable[[int], int]


def _calls() -> tuple[_Openat, _Close] | None:
    try:
        library = ctypes.PyDLL(None, use_errno=True)
        openat, close = library.openat, library.close
    except (OSError, AttributeError):  # A C library that cannot be found in this process.
        return None
    openat.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int
    close.argtypes = (ctypes.c_int,)
    return openat, close


_known: Final = _calls()


def open_held(name: str, folder: int) -> int:
    """Open a file for reading, in a folder of shared memory that nobody else can write to.

    Close it with `close_held`. Raises OSError.

    Args:
        folder: its descriptor.
    """
    if _known is None:
        return open_regular(name, os.O_NOFOLLOW, dir_fd=folder)
    while (descriptor := _known[0](folder, os.fsencode(name), _FLAGS)) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), name)
    return descriptor


def close_held(descriptor: int) -> None:
    """Close a descriptor of `open_held`."""
    if _known is None:
        os.close(descriptor)
    else:
        _known[1](descriptor)
