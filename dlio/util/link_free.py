"""Opening files by paths of which no component is a symbolic link.

Whoever has found out where a path leads opens that place, and nothing else: a component that
somebody exchanges for a link meanwhile is not followed. The kernel's `openat2` does it in one call
(Linux 5.6); elsewhere folders are opened one by one, each from the descriptor before it.
"""

import ctypes
import errno
import os
from functools import cache
from typing import Any, Final

_OPENAT2: Final = 437
"""Its number on all architectures but Alpha."""
_AT_FDCWD: Final = -100
_NO_SYMLINKS: Final = 4
READING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
"""Without O_NONBLOCK, opening a FIFO waits for a writer. It does not matter to a regular file."""
FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""To open files from the folder's descriptor, which takes no right to list it."""


class _How(ctypes.Structure):
    """`struct open_how` of the kernel."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_HOW_BYTES: Final = ctypes.sizeof(_How)


def open_unlinked(path: str, flags: int = READING) -> int:
    """Open an absolute path and return the descriptor. Waits for nobody; the caller checks what it
    is. `flags` are `READING` with others, or `FOLDER`.

    Raises OSError; with ELOOP if a component is a symbolic link.
    """
    calls = _kernel_calls()
    if calls is None:
        return open_by_components(path, flags)
    quick, telling = calls
    name, how = path.encode("utf-8", "surrogateescape"), _how(flags)
    descriptor: int = quick(_OPENAT2, _AT_FDCWD, name, ctypes.addressof(how), _HOW_BYTES)
    while descriptor < 0:
        # Once more, for the reason: to keep it takes ctypes as long as all the rest.
        descriptor = telling(_OPENAT2, _AT_FDCWD, name, ctypes.addressof(how), _HOW_BYTES)
        number = ctypes.get_errno()
        if descriptor < 0 and number == errno.ENXIO:  # A socket.
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if descriptor < 0 and number == errno.EAGAIN:
            text = "another process holds it to write (a lease); run again once it has let go"
            raise OSError(number, text, path)
        if descriptor < 0 and number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)
    return descriptor


def opens_at_once() -> bool:
    """True if the kernel opens a path without links in one call."""
    return _kernel_calls() is not None


def open_by_components(path: str, flags: int = READING) -> int:
    """Do what `open_unlinked` does, without `openat2`."""
    *folders, last = path.strip("/").split("/")
    folder = os.open("/", FOLDER)
    try:
        for name in folders:
            try:
                inner = os.open(name, FOLDER, dir_fd=folder)
            except NotADirectoryError as error:
                # A link, or a file where a folder should be: the path itself tells which.
                number = errno.ELOOP if _is_link(name, folder) else errno.ENOTDIR
                raise OSError(number, os.strerror(number), path) from error
            os.close(folder)
            folder = inner
        return os.open(last or ".", flags, dir_fd=folder)
    finally:
        os.close(folder)


def _is_link(name: str, folder: int) -> bool:
    try:
        os.readlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


@cache
def _how(flags: int) -> _How:
    return _How(flags, 0, _NO_SYMLINKS)


@cache
def _kernel_calls() -> tuple[Any, Any] | None:
    """Return the C library's `syscall`, and the same that keeps errno; None without `openat2`."""
    try:
        calls = ctypes.CDLL(None).syscall, ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    for each in calls:
        each.restype = ctypes.c_int
        # fmt: off
        each.argtypes = (
            ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t,
        )
        # fmt: on
    how = _how(FOLDER)
    descriptor = calls[0](_OPENAT2, _AT_FDCWD, b"/", ctypes.addressof(how), _HOW_BYTES)
    if descriptor < 0:
        return None
    os.close(descriptor)
    return calls
