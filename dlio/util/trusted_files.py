"""The files that dlio writes, deletes or believes: opened below verified folders.

No file is opened through a link. What was opened is then verified on the descriptor: a regular file
of this user, with a single name. A FIFO does not delay that.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class UntrustedFile(PermissionError):
    """A file or folder is not opened, because another user may have put it there."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(folder: int) -> str:
    """Return a path to an open folder, for libraries that take paths only.

    It is valid in this process while the descriptor is open, and reaches the folder even if
    somebody has renamed it.
    """
    return f"/proc/self/fd/{folder}"


@contextmanager
def shown_as(inside: str, shown: str) -> Iterator[None]:
    """Have errors name a folder as the user knows it, not by `inside`, its `path_of`."""
    pattern = re.compile(re.escape(inside) + r"(?!\d)")
    try:
        yield
    except Exception as error:
        error.args = tuple(
            pattern.sub(lambda _: shown, each) if isinstance(each, str) else each
            for each in error.args
        )
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = pattern.sub(lambda _: shown, error.filename)
        raise


def planted(folder: os.stat_result, entry: os.stat_result) -> str:
    """Return the reason not to follow an entry of a folder that the user has named, or nothing.

    Where every user may write, entries of strangers are refused, except for folders that one of
    this user's groups shares. Where a group may write, links of strangers are refused: of everybody
    else in a folder of one of this user's groups, elsewhere of all but the folder's owner. Pure,
    but for the process's user and groups.
    """
    if entry.st_uid in (0, os.geteuid()):
        return ""
    is_link, groups = stat.S_ISLNK(entry.st_mode), (os.getegid(), *os.getgroups())
    if folder.st_mode & 0o002:
        shared = entry.st_mode & 0o020 and entry.st_gid in groups and not entry.st_mode & 0o002
        if entry.st_uid == folder.st_uid or (stat.S_ISDIR(entry.st_mode) and shared):
            return ""
        kind = "a link" if is_link else "made"
        return f"is {kind} by user {entry.st_uid}, where every user may write"
    owners = entry.st_uid == folder.st_uid and folder.st_gid not in groups
    if not is_link or not folder.st_mode & 0o020 or owners:
        return ""
    return f"is a link by user {entry.st_uid}, where a group may write"


def open_file(
    folder: int, name: str, flags: int, mode: int = 0o600, *, owners: tuple[int, ...] = ()
) -> int:
    """Open a regular file in a verified folder and return its descriptor.

    Args:
        folder: descriptor of the folder.
        name: of the file, without a slash.
        flags: as for os.open, without O_TRUNC: nothing is cut off before the file is verified.
        mode: of a new file; the umask takes its part from it.
        owners: users that may own the file besides this one.

    Raises OSError; UntrustedFile if the file is a link, is not regular, has other names (hard
    links), or belongs to another user.
    """
    assert "/" not in name, name
    assert not flags & os.O_TRUNC
    try:
        descriptor = os.open(name, flags | _FLAGS, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # ENXIO: a socket, or a FIFO without reader.
            raise UntrustedFile(f"{name} is not a regular file") from error
        raise
    if flags & os.O_EXCL:
        return descriptor  # This process has just made it.
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFile(f"{name} is not a regular file")
        if status.st_nlink > 1:
            raise UntrustedFile(f"{name} has other names, too (hard links)")
        if status.st_uid not in (os.geteuid(), *owners):
            raise UntrustedFile(f"{name} belongs to user {status.st_uid}")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_new(folder: int, name: str, mode: int = 0o664) -> BinaryIO:
    """Open a file that does not exist yet in a verified folder, to write it. Raises OSError."""
    return os.fdopen(open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")


def read_small(folder: int, name: str, most: int, *, owners: tuple[int, ...] = ()) -> bytes:
    """Read a file of at most `most` bytes in a verified folder. Raises OSError as `open_file`, or
    if it is larger.
    """
    descriptor = open_file(folder, name, os.O_RDONLY, owners=owners)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"{name} is larger than {most} bytes")
    return data


def temporary_name(name: str) -> str:
    """Return a name for a file until it is complete, which nobody can guess."""
    return f"{name}.{secrets.token_hex(8)}.tmp"


def publish_file(folder: int, temporary: str, name: str) -> None:
    """Rename a complete file in a verified folder to its final name.

    Raises OSError, also if a device has this name: root could replace /dev/null itself.
    """
    refuse_device(folder, name)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def refuse_device(folder: int | None, name: str) -> None:
    """Raise OSError if a name in a folder, or a path without one, is that of a device, a pipe or a
    socket, where somebody reads, or of an open file of this process (/dev/stdout)."""
    with suppress(FileNotFoundError):
        entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
        is_taken = False
        if stat.S_ISLNK(entry.st_mode):
            is_taken = os.readlink(name, dir_fd=folder).startswith("/proc/")
            with suppress(OSError):
                entry = os.stat(name, dir_fd=folder)
        kinds = (stat.S_ISCHR, stat.S_ISBLK, stat.S_ISFIFO, stat.S_ISSOCK)
        if is_taken or any(is_one(entry.st_mode) for is_one in kinds):
            reason = "a device, a pipe, a socket or an open file has this name"
            raise OSError(errno.ENODEV, reason, name)
