"""Limits under which untrusted data are read.

Files of a data set, a tier or a checkpoint may have been made by anyone. So

- only regular files are opened for reading: opening a FIFO or a device could wait for ever, or give
  data without an end (`open_regular`);
- sizes that a file declares are compared with its stored bytes, and with this process's memory,
  before memory is taken for them (`check_claim`), and nothing is decompressed beyond its declared
  size (`dlio.util.decompression_limits`);
- text becomes objects only if these are not far larger than it (`check_objects`), by
  `dlio.util.structured_text`;
- libraries that raise errors of any kind for malformed metadata are called within `parsing`.

Whoever knows where a data set comes from lifts the guards that are against strangers alone:
`--trust`, `trust=True` or DLIO_TRUST (`trusting`).
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Final

from dlio.errors import DlioError, SourceError
from dlio.util.machine_memory import usable_memory
from dlio.util.settings import settings

MAX_ABSENT_ROWS: Final = 1 << 20
"""Rows that a data set may declare without storing them."""
LFS_POINTER: Final = (
    "is a pointer of Git LFS and not the file itself: run `git lfs pull` where it was cloned"
)
"""Words about a file for which `is_lfs_pointer` is true."""
_LFS_HEAD: Final = b"version https://git-lfs.github.com/spec/"
_FREE_BYTES: Final = 128 << 20
_EXPANSION: Final = 256
_OBJECTS: Final = 16
_SHARE: Final = 4
"""A part of this process's memory, one of so many, may be taken for bytes that are not stored."""
_REASON: Final = "it is not a regular file"
_SHORT: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Errors of the machine, not of the data."""
_REMEDY: Final = "this process has used up what it may have (`ulimit -a`); use fewer workers"


OPEN_FILES: Final = "raise the limit of open files (`ulimit -n`)"
"""Remedy for an error that `lacks_files`."""


def lacks_files(error: BaseException) -> bool:
    """True for an error of a process, or of a library in it, that may open no more files; False for
    dlio's own errors, which have a remedy."""
    if isinstance(error, DlioError):
        return False
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in str(error)


def is_lfs_pointer(head: bytes | bytearray | memoryview) -> bool:
    """True if a file begins as the text that stands for it in a clone without Git LFS."""
    return bytes(head[: len(_LFS_HEAD)]) == _LFS_HEAD


def open_unchecked(path: str, flags: int = 0, *, dir_fd: int | None = None) -> int:
    """Open what may not be a regular file, without waiting for anybody; the caller checks it.

    For those who need the file's status anyway: `check_regular` on it. See `open_regular`.

    Raises OSError.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It does not matter to a regular file.
    how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags
    try:
        return os.open(path, how, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket.
            raise OSError(errno.EINVAL, _REASON, path) from error
        raise


def open_regular(path: str, flags: int = 0, *, dir_fd: int | None = None) -> int:
    """Open a regular file for reading, with further flags of `os.open`, and return its descriptor.

    Raises OSError, also for anything but a regular file.
    """
    return regular(open_unchecked(path, flags, dir_fd=dir_fd), path)


def regular(descriptor: int, path: str) -> int:
    """Return the descriptor of a regular file; of others, close it and raise OSError."""
    try:
        check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(status: os.stat_result, path: str) -> None:
    """Raise OSError if a path's status is not that of a regular file."""
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _REASON, path)


def why_no_file(path: str) -> str:
    """Return the reason why a path cannot be read as a file; nothing if it is a regular file."""
    try:
        check_regular(os.stat(path), path)
    except FileNotFoundError:
        return "it is a link to nothing" if os.path.islink(path) else "the file does not exist"
    except IsADirectoryError:
        return "this is a folder"
    except OSError as error:
        return error.strerror or str(error)
    return ""


_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)


@contextmanager
def trusting(trust: bool | None) -> Iterator[None]:
    """Trust data sets that are opened in the block, or not. None leaves it as it is."""
    token = _trusted.set(_trusted.get() if trust is None else trust)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """True if a data set that is opened now is trusted."""
    trust = _trusted.get()
    return settings().trust if trust is None else trust


def check_claim(declared: int, stored: int, where: str) -> None:
    """Check that stored bytes may become as many as is declared when they are decompressed.

    Raises SourceError if that is implausible: more than 256 times the stored bytes, and more than a
    quarter of the memory that this process may use, unless the data set is trusted.
    """
    if not is_plausible(declared, stored):
        raise SourceError(
            f"{where} claims to hold {declared} bytes, of which {stored} are stored: that is more "
            "than a quarter of this process's memory, and a way to take all of it; if you trust "
            "whoever made the file, give --trust (in Python, trust=True), else store it in smaller "
            "parts"
        )


def check_objects(needed: int, stored: int, where: str) -> None:
    """Check that stored bytes may become objects of Python that need some bytes of memory.

    Raises SourceError for more than 16 times the stored bytes, of which sound data take 4 to 12,
    and more than a quarter of the memory that this process may use, unless the data set is trusted.
    """
    if needed <= _FREE_BYTES + _OBJECTS * stored or is_trusted():
        return
    if needed > usable_memory() // _SHARE:
        raise SourceError(
            f"{where} would need {needed} bytes of memory for its {stored}: that is more than a "
            "quarter of this process's memory, and a way to take all of it; if you trust whoever "
            "made the file, give --trust (in Python, trust=True), else split it"
        )


def is_plausible(declared: int, stored: int) -> bool:
    """True if stored bytes may become as many as is declared; see `check_claim`."""
    if 0 <= declared <= _FREE_BYTES + _EXPANSION * stored:
        return True
    return declared >= 0 and (is_trusted() or declared <= usable_memory() // _SHARE)


def parsing(where: str | Callable[[], str]) -> "_ParseErrors":
    """Turn errors of any kind, as malformed data cause in libraries, into one of the data set.

    For a `with` statement, which then raises SourceError. `where` is the path for the message, or a
    function that returns it, called when there is an error.
    """
    return _ParseErrors(where)


class _ParseErrors:
    """Written out, as samples are parsed one by one: a generator takes four times as long."""

    __slots__ = ("_where",)

    def __init__(self, where: str | Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, DlioError):
            return
        where = self._where if isinstance(self._where, str) else self._where()
        reason = str(error) or type(error).__name__
        if isinstance(error, MemoryError):
            text = "needs more memory than there is: check its sizes"
        elif isinstance(error, OSError) and error.errno in _SHORT:
            text = f"cannot be read: {error.strerror}: {_REMEDY}"
        elif isinstance(error, RuntimeError) and "start new thread" in reason:
            text = f"cannot be read: no thread can be started: {_REMEDY}"
        else:
            # Not "damaged": a library also fails at sound data that it, or dlio, does not know.
            text = f"cannot be read: {reason[:500]}; check it with the program that wrote it"
        raise SourceError(f"{where} {text}") from error
