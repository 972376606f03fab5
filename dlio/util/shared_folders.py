"""Folders in shared memory that last as long as a process uses them.

    /dev/shm/dlio-<uid>/sweep           locked while folders are created or removed
    /dev/shm/dlio-<uid>/<name>/alive    lock shared by every process that uses the folder

If somebody else has taken the name `dlio-<uid>`, the user's folder has random digits behind it. All
processes of the user find it by its owner: nobody else can make, or rename, a folder of this user's
in shared memory.

The locks are the kernel's and end with their process. The last process that uses a folder removes
it. If that process is killed, a reaper process removes the folder, and if the reaper is killed, the
next start of dlio does. The user's folder is removed with the last folder in it, so an idle machine
has no files of dlio in shared memory.
"""

import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.errors import TierError
from dlio.util.closable import Closable
from dlio.util.folders import lock_file, open_private, remove_if_unheld
from dlio.util.owned_descriptors import OwnedDescriptors
from dlio.util.threads import Workers

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the kernel's own; folders in it are made private
"""Folder of the kernel's in-memory file system."""
_SWEEP: Final = "sweep"
_ALIVE: Final = "alive"
_START_TIMEOUT_S: Final = 20.0
_SETTLE_S: Final = 0.05
"""Time in which processes that have made folders at once see each other's."""


class SharedFolder(Closable):
    """A folder in shared memory, in use by this process until `close`; a context manager.

    Processes with the same name share it. Creating one also removes the folders of jobs that have
    died. Raises TierError if other users own or can enter this user's folder.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owned = OwnedDescriptors(self)
        # The lock prevents a sweep from removing the folder before this process has locked it.
        with _users_folder() as (user, root):
            self.path = os.path.join(SHARED_MEMORY, root, name)
            # Each folder in use takes 10 ms, so only one process of many looks at all.
            first = name not in os.listdir(user) or bool(_sweep(user, name))
            if first:
                _sweep(user)
            folder = open_private(SHARED_MEMORY, root, name)
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
        with _users_folder() as (user, _):
            remove_if_unheld(user, self._name, _ALIVE)


def user_folder() -> str:
    """Return the name of this user's private folder below a tier's root."""
    return f"dlio-{os.geteuid()}"


def sweep_shared_memory(only: str | None = None) -> list[str]:
    """Remove the folders of jobs that have died; with `only`, at most the one of that name.

    Returns the names of the removed folders.
    """
    if not _own_folders():
        return []
    with _users_folder() as (user, _):
        return _sweep(user, only)


def own_memory() -> str:
    """Return the path of this user's folder in shared memory, whether or not there is one."""
    return os.path.join(SHARED_MEMORY, next(iter(_own_folders()), user_folder()))


def _own_folders() -> list[str]:
    """Names of this user's folders in shared memory; there are several only for a moment."""
    usual, own = user_folder(), []
    for name in os.listdir(SHARED_MEMORY):
        if name == usual or name.startswith(f"{usual}-"):
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(SHARED_MEMORY, name))
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    own.append(name)
    return sorted(own)


def _made_folder() -> str:
    """Return the name of this user's folder in shared memory, made if missing. Raises OSError."""
    usual = user_folder()
    if own := _own_folders():
        return own[0]
    with suppress(FileExistsError):
        os.mkdir(os.path.join(SHARED_MEMORY, usual), 0o700)
        return usual
    if own := _own_folders():
        return own[0]
    # Somebody else has the name. Other processes of this user may find that out now, too: all
    # agree on the one that is in use, or on the first.
    made = f"{usual}-{secrets.token_hex(8)}"
    os.mkdir(os.path.join(SHARED_MEMORY, made), 0o700)
    time.sleep(_SETTLE_S)
    own = _own_folders()
    used = [name for name in own if os.listdir(os.path.join(SHARED_MEMORY, name))]
    chosen = (used or own or [made])[0]
    if chosen != made:
        with suppress(OSError):
            os.rmdir(os.path.join(SHARED_MEMORY, made))
    return chosen


@contextmanager
def _users_folder() -> Iterator[tuple[int, str]]:
    """Open and lock this user's folder; remove it at the end if it is empty. Yields its descriptor
    and its name."""
    user, lock, root = _lock()
    try:
        yield user, root
    finally:
        if os.listdir(user) == [_SWEEP]:
            with suppress(OSError):
                os.unlink(_SWEEP, dir_fd=user)
                os.rmdir(os.path.join(SHARED_MEMORY, root))
        os.close(lock)
        os.close(user)


def _lock() -> tuple[int, int, str]:
    """Return descriptors of the user's folder and of the lock in it, and the folder's name.

    Tries again if the folder is removed in between.
    """
    while True:
        try:
            root = _made_folder()
        except OSError as error:
            raise TierError(
                f"{SHARED_MEMORY} cannot be used ({error.strerror}): make it writable"
            ) from error
        user = open_private(SHARED_MEMORY, root)
        try:
            lock = lock_file(user, _SWEEP)
        except FileNotFoundError:
            os.close(user)
            continue
        if os.fstat(lock).st_nlink:
            return user, lock, root
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
