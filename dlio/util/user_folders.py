"""Folders that users name, such as that of `--report`, opened component by component.

Links are followed, but where every user may write (/tmp), links and folders that strangers have put
there are refused. A folder of one of the user's groups is accepted: its owner wants to share it,
but below a folder that a stranger has made there no link of a stranger is followed. Wherever it is,
a stranger's link may not lead to a folder of this user's.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.util.trusted_files import UntrustedFile, closing_descriptor, planted

PUBLIC: Final = 0o775
"""Mode of the folders that users name; the umask takes its part from it."""
_PATH: Final = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN: Final = "/proc/self/fd/"
_MOST_LINKS: Final = 40


def open_folder(path: str, *, to_list: bool = True) -> int:
    """Open a folder that the user has named, or a path below a `path_of`, and return its
    descriptor.

    One that is not `to_list` or to synchronise need not be readable. Raises OSError, UntrustedFile
    if another user has planted a part of the path.
    """
    at = _open_path(path)
    if not to_list:
        return at
    with closing_descriptor(at):
        return os.open(".", _FOLDER, dir_fd=at)


def _open_path(path: str) -> int:
    """Open a folder as a place (O_PATH), each link and folder on the way verified."""
    left = path.split("/")[::-1]
    at = os.open("/" if path.startswith("/") else ".", _PATH | os.O_DIRECTORY)
    links, led, is_theirs = 0, "", False
    try:
        if path.startswith(_OWN):
            del left[-5:]
            number = path.removeprefix(_OWN).partition("/")[0]
            at = _exchange(at, os.open(f"{_OWN}{int(number)}", os.O_PATH | os.O_CLOEXEC))
        while left:
            name = left.pop()
            if name in ("", "."):
                continue
            try:
                # O_DIRECTORY mounts what is mounted on demand.
                entry = os.open(name, _PATH | os.O_DIRECTORY, dir_fd=at)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                entry = os.open(name, _PATH, dir_fd=at)
            try:
                status = os.fstat(entry)
                above = os.fstat(at)
                reason = "" if name == ".." else planted(above, status)
                target = os.readlink("", dir_fd=entry) if stat.S_ISLNK(status.st_mode) else None
                if status.st_uid not in (0, os.geteuid()):
                    link = f"is a link by user {status.st_uid}"
                    if target is not None and is_theirs:
                        reason = reason or f"{link}, below a folder of a stranger's"
                    led = led if target is None else f"{name} on the way there {link}"
                    is_theirs |= bool(above.st_mode & 0o022)
                if reason:
                    raise UntrustedFile(f"{name} on the way there {reason}")
                if target is None and not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            except BaseException:
                os.close(entry)
                raise
            if target is None:
                at = _exchange(at, entry)
                continue
            os.close(entry)
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            left += target.split("/")[::-1]
            if target.startswith("/"):
                is_theirs = False
                at = _exchange(at, os.open("/", _PATH | os.O_DIRECTORY))
        if led and os.fstat(at).st_uid == os.geteuid():
            raise UntrustedFile(f"{led} to a folder of yours")
    except BaseException:
        os.close(at)
        raise
    return at


def _exchange(old: int, new: int) -> int:
    os.close(old)
    return new


@contextmanager
def parent_of(path: str) -> Iterator[tuple[int, str]]:
    """Open the folder of a file that the user has named; yields its descriptor and the file's name.

    Raises OSError.
    """
    folder, name = os.path.split(path.rstrip("/") or path)
    with closing_descriptor(open_folder(folder or ".", to_list=False)) as at:
        yield at, name


def make_folders(path: str, mode: int = PUBLIC) -> int:
    """Open a folder that the user has named and return its descriptor; create missing ones.

    The umask takes its part from their mode. Raises OSError as `open_folder`.
    """
    try:
        return open_folder(path)
    except FileNotFoundError:
        folder, name = os.path.split(path.rstrip("/"))
        if not name:
            raise
        above = make_folders(folder or ".", mode)
        with closing_descriptor(above), suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=above)
        return open_folder(path)
