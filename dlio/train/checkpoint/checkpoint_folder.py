"""The folder of checkpoints, opened: each rank writes and publishes by its own descriptor of it."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.errors import UsageError, printable
from dlio.util.folders import open_below, open_working, publish_folder, remove_marked, rename
from dlio.util.trusted_files import (
    closing_descriptor,
    open_file,
    path_of,
    planted,
    shown_as,
)
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import PUBLIC_FILE, take_lock, unwritable

_LOCK: Final = ".lock"
_LOCK_TIMEOUT_S: Final = 2.0


class CheckpointFolder:
    """A folder of checkpoints, made if missing; each of them is a folder in it, private until it is
    published.

    Owner: Checkpoints.

    Raises UsageError if it cannot be opened, or another user has planted a part of the path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._folder = make_folders(path)
        except OSError as error:
            raise unwritable(f"--checkpoint {path}", error) from error

    def close(self) -> None:
        """Close the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def lock(self) -> int | None:
        """Lock the folder; return the lock's file descriptor.

        None if the file system has no locks. Raises UsageError if another run holds the lock.
        """
        try:
            owner = os.fstat(self._folder).st_uid
            flags = os.O_RDWR | os.O_CREAT
            lock = open_file(self._folder, _LOCK, flags, PUBLIC_FILE, owners=(owner,))
        except OSError as error:
            raise unwritable(f"--checkpoint {self.path}", error) from error
        try:
            # The lock of a run that was just killed may still be held for a moment.
            free = take_lock(lock, fcntl.LOCK_EX, _LOCK_TIMEOUT_S)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                return None
            raise
        if not free:
            who = printable(os.pread(lock, 200, 0).strip())
            os.close(lock)
            raise UsageError(
                f"--checkpoint {self.path}: another run ({who}) writes there; wait for it, or "
                "name another folder"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return lock

    def names(self, believed: bool = True) -> list[str]:
        """Names in the folder that may be believed, no links and no folders of strangers; or the
        others."""
        here = os.fstat(self._folder)
        names = []
        for name in os.listdir(self._folder):
            with suppress(OSError):
                entry = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if (stat.S_ISDIR(entry.st_mode) and not planted(here, entry)) == believed:
                    names.append(name)
        return names

    @contextmanager
    def unfinished(self, name: str) -> Iterator[str]:
        """Open the private folder of an unfinished checkpoint; yields a path to it.

        It is made if missing.
        """
        with closing_descriptor(open_working(self._folder, name)) as folder:
            inside = path_of(folder)
            with shown_as(inside, os.path.join(self.path, name)):
                yield inside

    def exists(self, name: str) -> bool:
        """True if the folder has an entry of this name."""
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def publish(self, hidden: str, name: str) -> None:
        """Rename a complete checkpoint, with the mode of the folder that contains it."""
        self.remove(name)  # Left by a run that was later resumed from an older checkpoint.
        with closing_descriptor(open_below(self._folder, hidden)) as folder:
            publish_folder(self._folder, hidden, folder, name)
        os.fsync(self._folder)

    def hide(self, name: str, hidden: str) -> None:
        """Remove a checkpoint; first hide it, so that it never looks complete meanwhile."""
        rename(name, hidden, self._folder, self._folder)
        self.remove(hidden)

    def remove(self, name: str) -> None:
        """Remove a checkpoint that this user's dlio has written; without effect on others."""
        remove_marked(self._folder, name)
