"""Folders in shared memory that last as long as a process uses them.

    /dev/shm/dlio-<uid>/sweep           locked while folders are created or removed
    /dev/shm/dlio-<uid>/<name>/alive    lock shared by every process that uses the folder

The locks are the kernel's and end with their process. The last process that uses a folder removes
it. If that process is killed, a reaper process removes the folder, and if the reaper is killed, the
next start of dlio does. The user's folder is removed with the last folder in it, so an idle machine
has no files of dlio in shared memory.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.util.closable import Closable
from dlio.util.folders import lock_file, open_private, remove_if_unheld
from dlio.util.owned_descriptors import OwnedDescriptors
from dlio.util.threads import Workers

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the kernel's own; folders in it are made private
"""Folder of the kernel's in-memory file system."""
_SWEEP: Final = "sweep"
_ALIVE: Final = "alive"
_START_TIMEOUT_S: Final = 20.0


class SharedFolder(Closable):
    """A folder in shared memory, in use by this process until `close`; a context manager.

    Processes with the same name share it. Creating one also removes the folders of jobs that have
    died. Raises TierError if other users own or can enter this user's folder.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owned = OwnedDescriptors(self)
        self.path = os.path.join(SHARED_MEMORY, user_folder(), name)
        # The lock prevents a sweep from removing the folder before this process has locked it.
        with _users_folder() as user:
            # Each folder in use takes 10 ms, so only one process of many looks at all.
            first = name not in os.listdir(user) or bool(_sweep(user, name))
            if first:
                _sweep(user)
            folder = open_private(SHARED_MEMORY, user_folder(), name)
            self.descriptor = self._owned.take(folder)
            self.alive = self._owned.take(lock_file(self.descriptor, _ALIVE, shared=True))
            """The lock: whoever holds a copy of this descriptor keeps the folder, too."""
        self._starting = _start_reaper(os.path.join(self.path, _ALIVE)) if first else None

    def close(self) -> None:
        """Release the folder; remove it if no other process uses it."""
        if self.descriptor < 0:
            return
        if self._starting is not None:
            self._starting.close()
        self._owned.close()
        self.descriptor = -1
        with _users_folder() as user:
            remove_if_unheld(user, self._name, _ALIVE)


def user_folder() -> str:
    """Return the name of this user's private folder below a tier's root."""
    return f"dlio-{os.geteuid()}"


def sweep_shared_memory(only: str | None = None) -> list[str]:
    """Remove the folders of jobs that have died; with `only`, at most the one of that name.

    Returns the names of the removed folders.
    """
    if not os.path.isdir(os.path.join(SHARED_MEMORY, user_folder())):
        return []
    with _users_folder() as user:
        return _sweep(user, only)


@contextmanager
def _users_folder() -> Iterator[int]:
    """Open and lock this user's folder; remove it at the end if it is empty."""
    user, lock = _lock()
    try:
        yield user
    finally:
        if os.listdir(user) == [_SWEEP]:
            with suppress(OSError):
                os.unlink(_SWEEP, dir_fd=user)
                os.rmdir(os.path.join(SHARED_MEMORY, user_folder()))
        os.close(lock)
        os.close(user)


def _lock() -> tuple[int, int]:
    """Return descriptors of the user's folder and of the lock in it.

    Tries again if the folder is removed in between.
    """
    while True:
        user = open_private(SHARED_MEMORY, user_folder())
        try:
            lock = lock_file(user, _SWEEP)
        except FileNotFoundError:
            os.close(user)
            continue
        if os.fstat(lock).st_nlink:
            return user, lock
        os.close(lock)
        os.close(user)


def _start_reaper(lock: str) -> Workers | None:
    """Start the process that removes a folder after all that share its lock, a path, have died.

    It has a session of its own and inherits no open file. Returns the thread that waits until it
    has detached itself; None if it could not be started.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reaper.py")
    try:
        starting = subprocess.Popen(
            [sys.executable, "-I", "-S", script, lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None  # The next start of dlio will remove the folder instead.

    def reaped(_: int) -> None:
        try:
            starting.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            starting.kill()
            starting.wait()

    return Workers("dlio-reaper-start", reaped, stop_timeout_s=2 * _START_TIMEOUT_S).start()


def _sweep(user: int, only: str | None = None) -> list[str]:
    names = [entry.name for entry in os.scandir(user) if entry.is_dir(follow_symlinks=False)]
    return [name for name in names if only in (None, name) and remove_if_unheld(user, name, _ALIVE)]
