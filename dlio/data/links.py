"""Symbolic links in data sets, and the opening of whatever lies in a data set's folder.

A data set may come from someone else, and a link in it can name any file of the user's. So links
are followed if they stay within the data set's own folder, and otherwise only if the user wants it:
`--follow-links`, `follow_links=True` or DLIO_FOLLOW_LINKS.

A path that the user names himself may be a link, or lie below links: that is the `DataRoot`. Each
name below it, whether listed or read out of an index, is opened by `DataRoot.open`, which judges
all of its components, and opens the place that it has judged: a component that is exchanged
meanwhile is refused.
"""

import errno
import os
import resource
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from dlio.errors import SourceError
from dlio.util.limits import open_unchecked, regular
from dlio.util.link_free import FOLDER, READING, open_unlinked
from dlio.util.settings import settings

_MAX_VISITS: Final = 16
_MOST_FOLDERS: Final = 1024
"""Folders that a process keeps open to read files in them, at most."""
_SHARE: Final = 8
"""At most one in so many of the descriptors that the process may have."""
_DOTS: Final = ("", ".", "..")
_followed: ContextVar[bool | None] = ContextVar("followed", default=None)
_named: ContextVar["DataRoot | None"] = ContextVar("named", default=None)


@contextmanager
def following_links(follow: bool | None) -> Iterator[None]:
    """Follow links out of data sets that are opened in the block, or refuse them. None leaves it as
    it is."""
    token = _followed.set(_followed.get() if follow is None else follow)
    try:
        yield
    finally:
        _followed.reset(token)


def links_followed() -> bool:
    """True if links out of a data set that is opened now are to be followed."""
    follow = _followed.get()
    return settings().follow_links if follow is None else follow


@contextmanager
def opened_by_user(path: str | None) -> Iterator[None]:
    """Judge whatever is opened below a local path in the block by that path, which the user has
    named, and not by the folder of it that a reader opens. None leaves it as it is."""
    token = _named.set(_named.get() if path is None else DataRoot(path, links_followed()))
    try:
        yield
    finally:
        _named.reset(token)


def path_of_user() -> str | None:
    """Return the path of the enclosing `opened_by_user`, if any."""
    named = _named.get()
    return None if named is None else named.path


@dataclass(slots=True)
class Looks:
    """Folders and files of a data set that are looked at to understand it."""

    states: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Of folders and files by their paths, as they were before they were looked at."""
    names: int = 0
    """Names in the folders that were listed."""
    has_links: bool = False
    """True if one of these is a link: its target may change with no change here."""


def state_of(path: str) -> tuple[int, ...] | None:
    """Return numbers that change when a file or the names in a folder do, its times at their end;
    None if it cannot be found."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def noting(looks: Looks) -> Iterator[None]:
    """Note all that is looked at below the path of the enclosing `opened_by_user`, or outside."""
    root = _named.get()
    assert root is not None
    root.looks = looks
    try:
        yield
    finally:
        root.looks = None


class DataRoot:
    """A folder or file that the user has named, below which links may not lead out. Thread-safe.

    Folders below it stay open, some of them, until `close`: to open a file from there takes less.
    """

    def __init__(self, path: str, follows: bool, inner: str | None = None) -> None:
        """`path` is absolute, without dots; `follows` is True if links may lead anywhere. `inner`
        is a path below it that the user has named, too.
        """
        self.path, self.follows = path, follows
        self._roots = [each for each in (inner, path) if each is not None]
        self._real: dict[str, str] = {}
        self._judged: set[str] = set()
        self._folders: dict[str, OpenFolder] = {}
        self.looks: Looks | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folders": {}}

    @staticmethod
    def of(path: str) -> "DataRoot":
        """Return the root by which an absolute path is judged: a path that the user has named, or
        else itself."""
        named, follows = _named.get(), links_followed()
        if named is None or named.follows != follows:
            return DataRoot(path, follows)
        if is_below(path, named.path):
            return named
        root = DataRoot(path, follows, named.path if is_below(named.path, path) else None)
        root.looks = named.looks
        return root

    def open(self, path: str, flags: int = 0) -> int:
        """Open an absolute path for reading, with further flags of `os.open`, and return its
        descriptor. Waits for nobody; the caller checks what it is.

        Raises OSError; SourceError if it is or lies below a link out of the root, or a circle.
        """
        if self.looks is not None:
            self.note(path)
        if self.follows:
            return open_unchecked(path, flags)
        place, _, name = path.rpartition("/")
        folder = self._folders.get(place)
        if folder is not None and name not in _DOTS:
            try:
                return os.open(name, READING | flags, dir_fd=folder.number)
            except OSError:  # A link, a socket, or the folder is another by now.
                self._folders.pop(place, None)
        return self._open(path, flags)

    def open_regular(self, path: str) -> int:
        """Do what `open` does for a regular file. Raises as it, also for anything else."""
        return regular(self.open(path), path)

    def folder(self, path: str) -> "OpenFolder":
        """Return a folder at an absolute path, open for files below it to be opened from it; see
        `open`. Raises as it."""
        kept = self._folders.get(path)
        if kept is None:
            kept = OpenFolder(self.open(path, os.O_DIRECTORY))
            if len(_open_folders) < _most_folders():
                _open_folders.add(kept)
                self._folders[path] = kept
        return kept

    def status(self, path: str) -> os.stat_result:
        """Return the status of the place that a path leads to; to open it judges it again.

        Raises OSError; SourceError for a link out of the root.
        """
        if self.looks is not None:
            self.note(path)
        if self.follows or path in self._roots:
            return os.stat(path)
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            status = os.stat(path)
            self.check(path)
        else:
            self.check_folder(path.rpartition("/")[0])
        return status

    def note(self, path: str) -> None:
        """Note the state of a path that is looked at; see `noting`."""
        if self.looks is not None and path not in self.looks.states:
            self.looks.states[path] = state_of(path)

    def check_folder(self, path: str) -> None:
        """Raise SourceError as `check` does, for a folder that is looked at once."""
        if not self.follows and path not in self._judged:
            self.check(path)
            self._judged.add(path)

    def check(self, path: str) -> None:
        """Raise SourceError if a path leads out of the root, by a link anywhere below it."""
        if not self.follows:
            self._leading_to(path)

    def close(self) -> None:
        """Close the folders that are open. Those that are needed again are opened again."""
        self._folders.clear()

    def _open(self, path: str, flags: int) -> int:
        root = self._root_of(path)
        if path == root:
            return open_unchecked(path, flags)
        straight = self._straight(root, path)
        if straight is not None:
            try:
                descriptor = open_unlinked(straight, READING | flags)
            except FileNotFoundError:
                self._real.pop(root, None)
                again = self._straight(root, path)
                if again == straight:
                    raise
            except OSError as error:  # ENOTDIR for a link where a folder is to be listed.
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
            else:
                self._keep(path, straight)
                return descriptor
        self._real.pop(root, None)
        real = self._leading_to(path)
        try:
            descriptor = open_unlinked(real, READING | flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise SourceError(
                f"{path} is, or lies below, a link that leads in a circle, or that was exchanged "
                "just now: remove the link, or copy its target"
            ) from error
        if not os.path.islink(path):
            self._keep(path, real)
        return descriptor

    def _root_of(self, path: str) -> str:
        for root in self._roots:
            if is_below(path, root):
                return root
        raise SourceError(f"{path} lies outside of the data set's folder {self.path}: refused")

    def _straight(self, root: str, path: str) -> str | None:
        """Return the path below the root's real one; None if that is not its place for sure."""
        inner = path[len(root.rstrip("/")) + 1 :]
        if any(part in _DOTS for part in inner.split("/")):
            return None
        real = self._real.get(root)
        if real is None:
            self._real[root] = real = os.path.realpath(root)
        return f"{real.rstrip('/')}/{inner}"

    def _leading_to(self, path: str) -> str:
        """Return the real path of one below the root. Raises SourceError if it leads out."""
        root = self._root_of(path)
        real, inside = os.path.realpath(path), os.path.realpath(root)
        if is_below(real, inside):
            return real
        link = path
        while len(above := link.rpartition("/")[0]) > len(root):
            if is_below(os.path.realpath(above), inside):
                break
            link = above
        how = "is a link to" if os.path.islink(link) else "leads to"
        raise SourceError(
            f"{link} {how} {os.path.realpath(link)}, outside of the data set's folder: copy what "
            "it names, or follow such links with --follow-links (in Python, follow_links=True)"
        )

    def _keep(self, path: str, straight: str) -> None:
        """Keep the folder of a path open, if there may be more."""
        place, _, name = path.rpartition("/")
        if name in _DOTS or place in self._folders or len(_open_folders) >= _most_folders():
            return
        try:
            folder = OpenFolder(open_unlinked(straight.rpartition("/")[0] or "/", FOLDER))
        except OSError:
            return
        _open_folders.add(folder)
        self._folders[place] = folder


class OpenFolder:
    """The descriptor of a folder, closed with the last reference to it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Any = os.close) -> None:
        close(self.number)


@cache
def _most_folders() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FOLDERS if soft < 0 else min(_MOST_FOLDERS, soft // _SHARE)


_open_folders: Final[weakref.WeakSet[OpenFolder]] = weakref.WeakSet()


def is_below(path: str, root: str) -> bool:
    """True if a path is another one, or lies below it, by their texts."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def check_descent(path: str) -> None:
    """Raise SourceError if a local folder is a link to one that it lies in."""
    real = os.path.realpath(path)
    if is_below(os.path.realpath(os.path.dirname(path)), real):
        raise SourceError(f"{path} is a link to {real}, which it lies in: remove the link")


class FolderLinks:
    """Links to folders that one walk meets. Thread-safe."""

    def __init__(self) -> None:
        self._visits: dict[str, list[None]] = {}

    def enter(self, path: str, came_by: tuple[str, ...]) -> tuple[str, ...]:
        """Return the folders that a walk has come by once it follows a link. `came_by` are the real
        paths of the folders whose links it followed so far.

        Raises SourceError if the link leads back to where the walk comes from, and if links lead to
        a folder very often.
        """
        real = os.path.realpath(path)
        before = (*came_by, os.path.realpath(os.path.dirname(path)))
        if any(each == real or each.startswith(real.rstrip("/") + "/") for each in before):
            raise SourceError(f"{path} is a link to {real}, which it lies in: remove the link")
        visits = self._visits.setdefault(real, [])
        visits.append(None)
        if len(visits) > _MAX_VISITS:
            raise SourceError(
                f"{path} is one of over {_MAX_VISITS} links to {real}: remove some of them"
            )
        return before
