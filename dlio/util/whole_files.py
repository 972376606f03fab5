"""Output files that appear complete or not at all, and locks on files."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Final

from dlio.errors import UsageError
from dlio.util.json_output import json_text
from dlio.util.limits import OPEN_FILES
from dlio.util.trusted_files import (
    closing_descriptor,
    open_file,
    path_of,
    publish_file,
    refuse_device,
    temporary_name,
)
from dlio.util.user_folders import parent_of

_POLL_S: Final = 0.02
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers of file systems on which nothing more can be written."""
_NAMELESS_UNKNOWN: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
PUBLIC_FILE: Final = 0o664
"""Mode of files that users name, and of all files in folders that are published: as the umask has
it, which may let a group write, but never all users."""


def check_writable(option: str, path: str) -> None:
    """Check before a run that its result can be written. Raises UsageError for the option."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: this is a folder; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: {folder} does not exist; create it")
    check_folder(folder, f"{option} {path}: ")
    try:
        refuse_device(None, path)
    except OSError as error:
        raise unwritable(f"{option} {path}", error) from error


def write_whole(path: str, write: Callable[[IO[bytes]], object], mode: int = PUBLIC_FILE) -> None:
    """Write a file by calling `write`; it appears under its name once it is complete.

    The path is one that the user has named, or below the `path_of` a folder; the umask takes its
    part from the mode. Raises UsageError if it cannot be written.
    """
    try:
        with parent_of(path) as (folder, name):
            write_whole_at(folder, name, write, mode)
    except OSError as error:
        raise unwritable(path, error) from error


def write_whole_at(
    folder: int, name: str, write: Callable[[IO[bytes]], object], mode: int = 0o600
) -> None:
    """Write a file in a verified folder as `write_whole` does. Raises OSError."""
    temporary = temporary_name(name)
    descriptor, named = _open_unfinished(folder, temporary, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if not named:
                _give_name(descriptor, folder, temporary)
        publish_file(folder, temporary, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _open_unfinished(folder: int, temporary: str, mode: int) -> tuple[int, bool]:
    """Open a file to write it; returns its descriptor, and True if it has the temporary name.

    Without a name, nothing of it stays where its writer is killed. Parallel and network file
    systems may not know such files.
    """
    try:
        return open_unnamed(folder, mode), False
    except OSError as error:
        if error.errno not in _NAMELESS_UNKNOWN:
            raise
    return open_file(folder, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), True


def open_unnamed(folder: int, mode: int = 0o600) -> int:
    """Open a file in a folder that is gone when it is closed. Raises OSError."""
    return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=folder)


def open_own(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a file of this user's in a folder that the user has named; returns its descriptor.

    Flags are as for os.open, without O_TRUNC; the umask takes its part from a new file's mode.
    Raises OSError; UntrustedFile if it is not a regular file of this user's.
    """
    with parent_of(path) as (folder, name):
        return open_file(folder, name, flags, mode)


def open_partial(path: str, *, new: bool, nameless: bool = False) -> IO[str]:
    """Open a text file, to be read and written, that will be renamed when it is complete.

    A new one begins empty; otherwise it must exist. A new one that no other process opens may be
    `nameless` until `name_partial`, where the file system knows such files. Raises OSError;
    UntrustedFile if it is not this user's own file.
    """
    if nameless:
        with parent_of(path) as (folder, name):
            return os.fdopen(_open_unfinished(folder, name, PUBLIC_FILE)[0], "r+")
    flags = os.O_RDWR | (os.O_CREAT if new else 0)
    file = os.fdopen(open_own(path, flags, PUBLIC_FILE), "r+")
    if new:
        file.truncate()
    return file


def name_partial(file: IO[str], path: str) -> None:
    """Give a file of `open_partial` the name that it was opened with. Raises OSError."""
    if not os.fstat(file.fileno()).st_nlink:
        with parent_of(path) as (folder, name):
            _give_name(file.fileno(), folder, name)


def _give_name(descriptor: int, folder: int, name: str) -> None:
    """Give a file without a name one, or give the name to a copy: a link needs /proc, and a file
    system that knows links. Raises OSError."""
    try:
        os.link(path_of(descriptor), name, dst_dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        _copy(descriptor, folder, name)


def _copy(descriptor: int, folder: int, name: str) -> None:
    status = os.fstat(descriptor)
    copy = open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with closing_descriptor(copy):
            os.fchmod(copy, stat.S_IMODE(status.st_mode))
            done = 0
            while done < status.st_size:
                done += os.sendfile(copy, descriptor, done, status.st_size - done)
            os.fsync(copy)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def move_file(path: str, to: str) -> None:
    """Rename a complete file of a folder that the user has named. Raises OSError."""
    with parent_of(path) as (folder, name):
        publish_file(folder, name, os.path.basename(to))


def remove_file(path: str) -> None:
    """Remove a file that the user has named, if it exists. Raises OSError."""
    with suppress(FileNotFoundError), parent_of(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def take_lock(descriptor: int, how: int, timeout_s: float = 0.0, poll_s: float = _POLL_S) -> bool:
    """Lock an open file by fcntl.LOCK_EX or LOCK_SH; False if another process held it until the
    deadline.

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
            time.sleep(poll_s)


def lock_holders(descriptor: int) -> list[tuple[int, int]]:
    """Return (process, user) of those on this node that have locked an open file, as far as the
    kernel tells."""
    status = os.fstat(descriptor)
    device = status.st_dev
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    holders = []
    with suppress(OSError), open("/proc/locks", encoding="ascii", errors="replace") as table:
        for row in map(str.split, table):
            if len(row) > 5 and row[1] != "->" and row[5] == file and row[4].isdecimal():
                with suppress(OSError):
                    holders.append((int(row[4]), os.stat(f"/proc/{row[4]}").st_uid))
    return holders


def write_json(path: str, value: object) -> None:
    """Write a value as `json_text`. Raises UsageError if the file cannot be written."""
    text = json_text(value, indent=2).encode()
    write_whole(path, lambda file: file.write(text))


def unwritable(path: str, error: OSError) -> UsageError:
    """Return the error for a file or folder, after its option if it has one, that cannot be
    written."""
    return UsageError(not_written(path, error))


def not_written(path: str, error: OSError) -> str:
    """Return a sentence about a file or folder that cannot be written, with the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, _ELSEWHERE)
    if error.errno == errno.ENOENT and os.path.isdir(os.path.dirname(os.path.abspath(path))):
        remedy = _ELSEWHERE  # Such as /proc, in which nothing can be made.
    return f"{path} cannot be written: {error.strerror}; {remedy}"


def make_folder(folder: str, option: str) -> None:
    """Make a folder where there is none. Raises UsageError, which begins with the option."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise unwritable(f"{option} {folder}", error) from error


def check_folder(folder: str, option: str = "") -> None:
    """Check that files can be made in a folder. Raises UsageError, which begins with the option."""
    if not os.access(folder, os.W_OK | os.X_OK):
        is_mounted_so = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_mounted_so else errno.EACCES
        raise unwritable(f"{option}{folder}", OSError(number, os.strerror(number)))


_ELSEWHERE: Final = "name another place"
_REMEDIES: Final = {
    errno.EMFILE: OPEN_FILES,
    errno.ENFILE: OPEN_FILES,
    errno.ENOSPC: "free some space there, or inodes (df -i), or name another place",
    errno.EDQUOT: "the quota is used up: free some space there, or name another place",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or name another place",
    errno.EACCES: "make it writable, or name another place",
    errno.EPERM: "make it writable, or name another place",
    errno.EROFS: "mount it writable, or name another place",
    errno.ENOENT: "create its folder, or name another place",
    errno.ENOTDIR: "a file is in the place of a folder: name another place",
    errno.EEXIST: "a file is in the place of a folder: name another place",
    errno.EISDIR: "a folder has this name: name a file",
    errno.ENAMETOOLONG: "give it a shorter name",
}
