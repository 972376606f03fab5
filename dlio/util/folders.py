"""Private folders on scratch space that is shared with other users.

`makedirs(exist_ok=True)` would accept a folder that another user has created first. So each folder
below the user's root is created with mode 0700, opened without following links, and checked for
owner and mode on the open descriptor. A folder that others own or can enter is refused.
"""

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress
from typing import Final

from dlio.errors import TierError

__all__ = ["hold_shared", "lock_file", "open_private", "remove_if_unheld"]

_TRIES: Final = 10
_RETRY_S: Final = 0.001


def open_private(root: str, *names: str) -> int:
    """Open the folder `root`/names... and return its descriptor; create missing folders.

    `root` itself must exist.

    Raises TierError if `root` does not exist or cannot be written, or if a folder below it belongs
    to another user, is a link, or is accessible to others.
    """
    path = root
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise TierError(
            f"tier folder {root} cannot be opened ({error.strerror}): create it, or name another "
            "one in --tiers"
        ) from error
    for name in names:
        path = os.path.join(path, name)
        parent = descriptor
        try:
            descriptor = _make_and_open(name, parent)
        except OSError as error:
            raise TierError(
                f"tier folder {path} cannot be used ({error.strerror}): make {root} writable, or "
                "name another folder in --tiers"
            ) from error
        finally:
            os.close(parent)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise TierError(
                f"tier folder {path} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}: it must be yours alone (0700); remove it, or "
                "name another folder in --tiers"
            )
    return descriptor


def _make_and_open(name: str, parent: int) -> int:
    """Create the folder `name` unless it exists, and open it.

    Tries again if another process removes the empty folder in between.
    """
    for last in (*[False] * (_TRIES - 1), True):
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            if last:
                raise
    raise AssertionError("unreachable")


def lock_file(directory: int, name: str) -> int:
    """Lock the file `name` exclusively and return its descriptor.

    The lock ends when the descriptor is closed or the process dies.

    Raises FileNotFoundError if the directory was removed.
    """
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def hold_shared(directory: int, name: str) -> int:
    """Take a shared lock on the file `name` and return its descriptor; closing it unlocks."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_if_unheld(directory: int, name: str, lock: str) -> bool:
    """Remove the folder `name` unless a live process locks `name`/`lock`; True if removed."""
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=inner)
        try:
            if not _lock_alone(held):
                return False
            # While holding the lock, so that other processes do not remove the folder, too.
            shutil.rmtree(name, dir_fd=directory)
            return True
        finally:
            os.close(held)
    finally:
        os.close(inner)


def _lock_alone(descriptor: int) -> bool:
    """Lock a file exclusively; False if other processes share the lock.

    A reaper may get the lock first and release it at once, so a single failure does not prove that
    the folder is in use.
    """
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False
