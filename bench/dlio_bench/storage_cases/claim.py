"""One run at a time in a data folder: two would remove each other's files and share the disk."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.errors import UsageError
from dlio.util.trusted_files import closing_descriptor
from dlio.util.whole_files import take_lock

_ENDING_S: Final = 5.0
"""Time for ranks that were told to end to let go of their folder."""


@contextmanager
def claimed(folder: str, keep: bool) -> Iterator[None]:
    """Make a folder if it is not there, and have it alone until the end.

    A folder that this call made is removed at the end unless `keep` is set. On a file system
    without locks, runs do not see each other.

    Raises UsageError if another run has it, or if it cannot be made.
    """
    descriptor, made = _open_locked(folder)
    try:
        yield
    finally:
        if made and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_unclaimed(folder: str) -> None:
    """Remove a folder once no run has it; leave it if one still has it after 5 s."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    with closing_descriptor(descriptor):
        with suppress(OSError):
            if not take_lock(descriptor, fcntl.LOCK_EX, _ENDING_S):
                return
        shutil.rmtree(folder, ignore_errors=True)


def _open_locked(folder: str) -> tuple[int, bool]:
    """Return (descriptor that holds the lock, True if the folder was made)."""
    while True:
        made = False
        try:
            with suppress(FileExistsError):
                os.mkdir(folder)
                made = True
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(os.path.abspath(folder))):
                continue  # Another run has just removed it.
            parent = os.path.dirname(folder)
            raise UsageError(f"{folder} cannot be made: create {parent} first") from None
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be used ({error.strerror}): name a folder that you can write"
            ) from error
        try:
            is_alone = take_lock(descriptor, fcntl.LOCK_EX)
        except OSError:
            is_alone = True  # The file system has no locks.
        if not is_alone:
            os.close(descriptor)
            raise UsageError(
                f"{folder} is in use by another dlio bench storage: wait for its end, or measure "
                "in another folder"
            )
        if os.fstat(descriptor).st_nlink:
            return descriptor, made
        os.close(descriptor)  # Its last owner removed it before this lock.
