"""The folder of checkpoints, opened: each rank writes and publishes by its own descriptor of it."""

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from dlio.errors import UsageError, printable
from dlio.util.folders import open_below, open_working, publish_folder, remove_marked, rename
from dlio.util.trusted_files import (
    closing_descriptor,
    open_file,
    path_of,
    planted,
    read_small,
    shown_as,
)
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import lock_holders, take_lock, unwritable

_LOCK: Final = ".lock"
_LOCK_TIMEOUT_S: Final = 2.0
_MOST_OWNER: Final = 200
_TASK: Final = re.compile(r"task (\d+) of job array (\d+)")


_TASK_ID: Final = "SLURM_ARRAY_TASK_ID"


def _array_task() -> tuple[str, str] | None:
    """Return (job, task) of the job array that this process belongs to, None without one."""
    job, task = (os.environ.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", _TASK_ID))
    return (job, task) if job.isdecimal() and task.isdecimal() else None


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
        self._mine = ""
        """Text by which this process's run holds the folder; empty on ranks that do not lock it."""
        self._earlier = ""
        """The text of the run that held it before."""

    def close(self) -> None:
        """Close the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def lock(self) -> int | None:
        """Lock the folder; return the lock's file descriptor.

        None if the file system has no locks. Raises UsageError if another run holds the lock, or
        its file cannot be written.
        """
        try:
            with ExitStack() as stack:
                lock = self._lock_file()
                stack.callback(os.close, lock)
                has_locks = self._take(lock)
                self._claim(lock)
                if has_locks:
                    stack.pop_all()
                return lock if has_locks else None
        except OSError as error:
            raise unwritable(f"--checkpoint {self.path}", error) from error

    def _take(self, lock: int) -> bool:
        """Lock an open file; False if the file system has no locks. Raises UsageError, OSError."""
        # Some file systems have no locks, and those of others end at the node: whichever run wrote
        # its name there last has the folder, and `check_held` tells the other.
        try:
            # The lock of a run that was just killed may still be held for a moment.
            free = take_lock(lock, fcntl.LOCK_EX, _LOCK_TIMEOUT_S)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                return False
            raise
        if not free:
            who = printable(os.pread(lock, _MOST_OWNER, 0).strip())
            for process, user in lock_holders(lock):
                if f"process {process} " not in who:
                    who = f"process {process} of user {user} has its lock"
            raise UsageError(
                f"--checkpoint {self.path}: another run ({who}) writes there; wait for it, or "
                f"name another folder{self._of_each_task()}"
            )
        return True

    def _lock_file(self) -> int:
        """Open the file that runs lock, which only those can open who may write to the folder:
        whoever can read a file can hold its lock. Raises OSError."""
        here = os.fstat(self._folder)
        shared = here.st_mode & 0o020
        owners = {here.st_uid}
        if shared and not here.st_mode & 0o002:
            # A colleague's: members of the folder's group go on with each other's runs.
            with suppress(FileNotFoundError):
                owners.add(os.stat(_LOCK, dir_fd=self._folder, follow_symlinks=False).st_uid)
        flags = os.O_RDWR | os.O_CREAT
        lock = open_file(self._folder, _LOCK, flags, 0o600, owners=tuple(owners))
        status = os.fstat(lock)
        if status.st_uid == os.geteuid():
            with_group = shared and status.st_gid == here.st_gid
            os.fchmod(lock, 0o660 if with_group else 0o600)
        return lock

    def _claim(self, lock: int) -> None:
        """Write which run has the folder."""
        self._earlier = os.pread(lock, _MOST_OWNER, 0).decode(errors="replace")
        task = _array_task()
        of_array = f", task {task[1]} of job array {task[0]}" if task else ""
        who = f"process {os.getpid()} on {socket.gethostname()}{of_array}"
        self._mine = f"{who}, {secrets.token_hex(4)}"
        os.ftruncate(lock, 0)
        os.pwrite(lock, self._mine.encode(), 0)
        os.fsync(lock)

    def is_held(self) -> bool:
        """True unless another run has taken the folder since this rank locked it."""
        return not self._mine or self._owner() in ("", self._mine)

    def check_held(self) -> None:
        """Raise UsageError if another run has taken the folder since this rank locked it."""
        if not self.is_held():
            raise UsageError(
                f"{self.path} was taken by another run ({printable(self._owner())}), and this one "
                "writes no checkpoints there any more: give each run a folder of its own"
                f"{self._of_each_task()}"
            )

    def sharing(self) -> str:
        """Return a sentence if another task of this process's job array had the folder before."""
        task, earlier = _array_task(), _TASK.search(self._earlier)
        if task is None or earlier is None or earlier[2] != task[0] or earlier[1] == task[1]:
            return ""
        return (
            f"the checkpoint is of task {earlier[1]} of this job array, of which this is task "
            f"{task[1]}: tasks that do not continue each other need folders of their own"
            f"{self._of_each_task()}"
        )

    def _of_each_task(self) -> str:
        return f", such as --checkpoint {self.path}/${_TASK_ID}" if _array_task() else ""

    def _owner(self) -> str:
        """Return the text of the run that has the folder; nothing if it cannot be read."""
        try:
            owner = os.stat(_LOCK, dir_fd=self._folder, follow_symlinks=False).st_uid
            text = read_small(self._folder, _LOCK, _MOST_OWNER, owners=(owner,))
        except OSError:
            return ""
        return text.decode(errors="replace")

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
        self.check_held()
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
        self.check_held()
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
