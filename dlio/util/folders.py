"""The folders that dlio writes to, deletes or believes, on space that is shared with other users.

Each is opened component by component, from one verified descriptor to the next. All further work
goes through the descriptor, so that nobody who swaps a path meanwhile redirects it. There are
three kinds:

- Folders that users name, such as that of `--report`: see `named`.
- Private folders, such as those of tiers: `open_private`. They have mode 0700, whatever the umask,
  and belong to this user.
- Working folders, such as that of an unfinished packing: `open_working`. They are private, too.

A file named `.dlio` marks the last two: nothing is deleted in a folder without it, so a folder
that somebody has renamed, or a user has named by mistake, keeps its contents.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlio.errors import TierError
from dlio.util.limits import OPEN_FILES, lacks_files
from dlio.util.trusted_files import (
    UntrustedFile,
    closing_descriptor,
    open_file,
    open_new,
    path_of,
    read_small,
    shown_as,
    temporary_name,
)
from dlio.util.user_folders import open_folder, parent_of
from dlio.util.whole_files import not_written, take_lock

MARK: Final = ".dlio"
"""Name of the file that marks a folder as dlio's."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_MARK: Final = 256
_FAULTS: Final = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
_TRIES: Final = 10
_RETRY_S: Final = 0.001


def open_private(root: str, *names: str, marked: int = 0) -> int:
    """Open the folder `root`/names... and return its descriptor; create missing folders.

    `root` itself must exist. The first `marked` folders get a mark when they are made, and are
    refused without it. In shared memory nobody can rename another user's folder, so those there
    have no mark.

    Raises TierError if `root` does not exist or cannot be written, or if a folder below it belongs
    to another user, is a link, is accessible to others, or is not dlio's.
    """
    path = root
    try:
        descriptor = open_folder(root, to_list=not names)
    except OSError as error:
        remedy = "create it, or " if isinstance(error, FileNotFoundError) else ""
        remedy = OPEN_FILES if lacks_files(error) else f"{remedy}name another one in --tiers"
        raise TierError(
            f"tier folder {root} cannot be opened ({error.strerror}): {remedy}"
        ) from error
    for depth, name in enumerate(names):
        path = os.path.join(path, name)
        parent = descriptor
        try:
            descriptor = open_working(parent, name, marked=depth < marked)
        except UntrustedFile as error:
            raise TierError(
                f"tier folder {path} {error.strerror}: remove it, or name another folder in --tiers"
            ) from error
        except OSError as error:
            raise TierError(f"tier folder {not_written(path, error)}") from error
        finally:
            os.close(parent)
    return descriptor


def open_working(parent: int, name: str, *, text: str = "dlio\n", marked: bool = True) -> int:
    """Open a private folder of dlio in another one and return its descriptor; create it if missing.

    If `marked`, a new one gets a mark with `text`, and one that holds anything but has no mark is
    refused. Raises OSError; UntrustedFile if the folder belongs to another user, is accessible to
    others, or is not dlio's.
    """
    descriptor = _make_and_open(name, parent)
    try:
        _check_private(descriptor)
        if marked and not is_marked(descriptor):
            if os.listdir(descriptor):
                _check_marked(descriptor)
            try:
                mark(descriptor, text)
            except OSError:  # On a full disk there may be room for the folder only.
                with suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
                raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Make a folder that the user has named; it appears at the end of the `with` block.

    Yields the path to it by which its files are written. After an error nothing is left.

    Raises OSError if there is such an entry, or the folder cannot be written.
    """
    with parent_of(path) as (parent, name):
        if _exists(parent, name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        hidden = temporary_name(name)
        folder = open_working(parent, hidden, marked=False)
        try:
            inside = path_of(folder)
            with shown_as(inside, path):
                yield inside
            publish_folder(parent, hidden, folder, name)
        finally:
            remove_entry(parent, hidden)
            os.close(folder)


def _mode_below(folder: int) -> int:
    """Return the mode for a new folder in one that the user has named: no more than its own."""
    status = os.fstat(folder)
    shared = 0o755 if status.st_mode & 0o002 else 0o2775
    return stat.S_IMODE(status.st_mode) & shared | 0o700


def _exists(parent: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_below(parent: int, name: str, *, private: bool = True) -> int:
    """Open an existing folder of dlio, which may not be a link, and return its descriptor.

    Raises OSError; UntrustedFile if the folder is to be private, and others own or can enter it.
    """
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    try:
        if private:
            _check_private(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_private(descriptor: int) -> None:
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise UntrustedFile(
            f"belongs to user {status.st_uid} with mode {mode:o}, but must be yours alone (0700)"
        )


def _make_and_open(name: str, parent: int) -> int:
    """Create the folder `name` unless it exists, and open it.

    Tries again if another process removes the empty folder in between.
    """
    for last in (*[False] * (_TRIES - 1), True):
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        try:
            return os.open(name, _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            if last:
                raise
    raise AssertionError("unreachable")


def mark(folder: int, text: str = "dlio\n") -> None:
    """Mark a folder as dlio's. Raises OSError, and leaves no half mark."""
    # The folder is private; if it is published, the mark's mode is that of its other files.
    with suppress(FileExistsError), open_new(folder, MARK) as file:
        try:
            file.write(text.encode())
            file.flush()
        except OSError:
            os.unlink(MARK, dir_fd=folder)
            raise


def mark_of(folder: int) -> str | None:
    """Return the text of a folder's mark; None if this user's dlio has not marked it."""
    try:
        return read_small(folder, MARK, _MOST_MARK).decode("ascii", "replace")
    except OSError:
        return None


def file_sizes(folder: int, *suffixes: str) -> list[int]:
    """Return the bytes of each file of a folder whose name has one of these endings."""
    sizes = []
    for name in os.listdir(folder):
        if name.endswith(suffixes):
            with suppress(FileNotFoundError):  # Removed or renamed meanwhile.
                sizes.append(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size)
    return sizes


def is_marked(folder: int) -> bool:
    """True if this user's dlio has marked a folder as its own."""
    return mark_of(folder) is not None


def _check_marked(folder: int) -> None:
    """Raise UntrustedFile for a folder without a mark; OSError if the disk or the machine keeps the
    mark from being read: nobody is to remove such a folder."""
    try:
        read_small(folder, MARK, _MOST_MARK)
    except OSError as error:
        if error.errno in _FAULTS:
            raise
        raise UntrustedFile(f"was not made by dlio: it has no {MARK}") from error


def same_folder(parent: int, name: str, folder: int) -> bool:
    """True if `name` still is the folder that was opened as `folder`."""
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(folder))


def empty_folder(folder: int, *, keep: tuple[str, ...] = (MARK,)) -> None:
    """Remove all but the files `keep` from a folder that is marked as dlio's; without effect on
    others.

    Follows no link. Entries that cannot be removed stay.
    """
    if not is_marked(folder):
        return
    for name in os.listdir(folder):
        if name not in keep:
            remove_entry(folder, name)


def unlink(parent: int, name: str) -> None:
    """Remove a file in a folder of dlio. Raises OSError."""
    os.unlink(name, dir_fd=parent)


def remove_entry(parent: int, name: str) -> None:
    """Remove a file, a link or a folder in a folder of dlio; if it cannot be removed, it stays."""
    with suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)


def remove_bare(parent: int, name: str) -> None:
    """Remove a folder of dlio that holds nothing but its mark; one that is in use stays."""
    with suppress(OSError), closing_descriptor(open_below(parent, name)) as folder:
        _remove_emptied(parent, name, folder)


def _remove_emptied(parent: int, name: str, folder: int) -> None:
    """Remove a folder that holds nothing but its mark, or nothing. Raises OSError."""
    if os.listdir(folder) == [MARK]:
        os.unlink(MARK, dir_fd=folder)
    os.rmdir(name, dir_fd=parent)


def remove_path(path: str) -> None:
    """Remove a file or folder below the `path_of` a folder of dlio, if it exists."""
    with suppress(FileNotFoundError), parent_of(path) as (parent, name):
        remove_entry(parent, name)


def publish_folder(parent: int, hidden: str, folder: int, name: str) -> None:
    """Rename a complete private folder of `parent` to its final name; both are descriptors.

    It is sealed, and gets the mode of the folder that contains it.
    """
    seal(parent, hidden)
    os.fchmod(folder, _mode_below(parent))
    rename(hidden, name, parent, parent)


def rename(old: str, new: str, parent: int | None = None, to: int | None = None) -> None:
    """Rename a file or folder between folders of dlio, and verified folders. Names are in the
    folders `parent` and `to`, or paths below the `path_of` a folder of dlio.
    """
    os.rename(old, new, src_dir_fd=parent, dst_dir_fd=to)


def seal(parent: int, name: str) -> None:
    """Make a folder ready to be published: synchronised, and not writable by all users.

    Files that libraries have written in it have modes as the umask has it. Where a group may write,
    that group can read them.
    """
    above = os.fstat(parent)
    for _, _, files, folder in os.fwalk(name, dir_fd=parent):
        shared = above.st_mode & 0o020 and os.fstat(folder).st_gid == above.st_gid
        more = 0o040 if shared else 0
        for each in files:
            mode = os.stat(each, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode) and (mode & 0o002 or mode | more != mode):
                os.chmod(each, stat.S_IMODE(mode) & ~0o002 | more, dir_fd=folder)
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        os.fchmod(folder, mode & ~0o002 | (0o2050 if shared else 0))
        os.fsync(folder)


def remove_marked(parent: int, name: str) -> bool:
    """Remove a folder that is this user's and marked as dlio's, or empty; True if it was one."""
    try:
        folder = open_below(parent, name, private=False)
    except OSError:
        return False
    with closing_descriptor(folder):
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        if not is_marked(folder) and os.listdir(folder):
            return False
        # The mark goes last, so that a removal that was killed can be continued.
        empty_folder(folder)
        if same_folder(parent, name, folder):
            with suppress(OSError):
                _remove_emptied(parent, name, folder)
        return True


def remove_all_marked(path: str, *files: str) -> None:
    """Remove a folder that the user has named, as far as it holds folders that are marked as dlio's
    and these files; others stay."""
    with suppress(OSError), parent_of(path) as (parent, name):
        folder = open_below(parent, name, private=False)
        with closing_descriptor(folder):
            for each in os.listdir(folder):
                remove_marked(folder, each)
            if set(os.listdir(folder)) <= set(files):
                for each in files:
                    remove_entry(folder, each)
                os.rmdir(name, dir_fd=parent)


def lock_file(directory: int, name: str, *, shared: bool = False) -> int:
    """Lock the file `name`, exclusively unless `shared`, and return its descriptor.

    The lock ends when the descriptor is closed or the process dies.

    Raises FileNotFoundError if the directory was removed.
    """
    descriptor = open_file(directory, name, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return descriptor


def remove_if_unheld(directory: int, name: str, lock: str) -> bool:
    """Remove the folder `name` unless a live process locks `name`/`lock`; True if removed.

    A folder that is not private to this user, or has no such file and is not empty, stays.
    """
    try:
        inner = open_below(directory, name)
    except OSError:
        return False
    with closing_descriptor(inner):
        try:
            held = open_file(inner, lock, os.O_RDWR)
        except FileNotFoundError:
            if os.listdir(inner):
                return False
            held = open_file(inner, lock, os.O_RDWR | os.O_CREAT)
        except UntrustedFile:
            return False
        with closing_descriptor(held):
            # Tried for a while: a reaper may get the lock first, and release it at once. While
            # holding the lock, so that other processes do not remove the folder, too.
            alone = take_lock(held, fcntl.LOCK_EX, _TRIES * _RETRY_S, _RETRY_S)
            if not alone or not same_folder(directory, name, inner):
                return False
            shutil.rmtree(name, dir_fd=directory)
            return True
