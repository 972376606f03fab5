"""Output files that appear complete or not at all, and locks on files."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from typing import IO, Final

from dlio.errors import UsageError

__all__ = ["check_writable", "take_lock", "unwritable", "write_json", "write_whole"]

_POLL_S: Final = 0.02


def check_writable(option: str, path: str) -> None:
    """Check before a run that its result can be written.

    Args:
        option: option of the command line, which the error names.

    Raises UsageError if it cannot.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: this is a folder; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: {folder} does not exist; create it")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: {folder} cannot be written")


def write_whole(path: str, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file by calling `write`; it appears under its name once it is complete.

    Raises UsageError if it cannot be written.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def take_lock(descriptor: int, how: int, timeout_s: float = 0.0) -> bool:
    """Lock an open file; False if another process held the lock until the deadline.

    Args:
        how: fcntl.LOCK_EX or fcntl.LOCK_SH.

    Raises OSError if the file system does not support locks.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)


def write_json(path: str, value: object) -> None:
    """Write a value as JSON. Raises UsageError if the file cannot be written."""
    text = json.dumps(value, indent=2).encode()
    write_whole(path, lambda file: file.write(text))


def unwritable(path: str, error: OSError) -> UsageError:
    """Return the error for a file that cannot be written."""
    return UsageError(
        f"{path} cannot be written: {error.strerror}; free some space there, or name another file"
    )
