"""The file system as one rank other than 0 sees it: as it was, with the rank's own changes.

Each path that the rank has changed has one of three states:

- its own: a file, folder or link in the rank's scratch folder, at the same path below it;
- gone: the rank has removed it;
- rank 0's: rank 0 has written it for all ranks, or it was there before and the rank has only
  renamed it. It is read where rank 0 has it.

All others are the real file system's, but for rank 0's changes since (`file_journal`).
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from dlio.integrations.script.file_journal import JournalReader

_MOST_LINKS: Final = 40
_MOST_FOLDERS: Final = 10_000
_OWN: Final = "own"
_GONE: Final = "gone"
_HIDDEN: Final = "rank 0 has written it, but this rank of the same script has not"


@dataclass(frozen=True, slots=True)
class _RankZeros:
    """State of a path that is read where rank 0 has it."""

    places: tuple[str, ...]
    """Paths of the real file system, the first that exists counts."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A path as the rank sees it."""

    path: str
    """Its name, after the rank's own links."""
    place: str | None
    """Where its contents are; None if it does not exist."""
    is_own: bool = False
    """True if it is in the scratch folder."""
    reason: str = ""
    """Cause of an absence that the real file system does not explain."""

    @property
    def is_folder(self) -> bool:
        return self.place is not None and _is_folder(self.place)


class FileView:
    """See the module. Paths are absolute and without `..`."""

    def __init__(self, scratch: Callable[[], str], journal: JournalReader | None) -> None:
        self._make_scratch, self._journal = scratch, journal
        self._scratch = ""
        self._states: dict[str, str | _RankZeros] = {}
        self._names: dict[str, set[str]] = {}
        """By folder, the names in it that have a state."""
        self._folders: dict[str, str] = {}
        """Folders as scripts name them, and without links."""
        self._renamed: list[str] = []
        """Paths that this rank has renamed, and rank 0 perhaps not yet."""

    @property
    def scratch(self) -> str:
        """The scratch folder; it is made when it is asked for first."""
        if not self._scratch:
            self._scratch = self._make_scratch()
        return self._scratch

    @property
    def knows_all(self) -> bool:
        """False without rank 0's journal: then any new file may be rank 0's."""
        return self._journal is not None

    def name_of(self, path: str) -> str:
        """Return the name by which a path is known here: without the scratch folder in front, and
        without links on the way."""
        if self._scratch and path.startswith(self._scratch):
            path = path.removeprefix(self._scratch) or "/"
        folder, name = os.path.split(path)
        if self._near(folder) is not None:
            return path
        real = self._folders.get(folder)
        if real is None:
            real = _real_folder(folder)
            if len(self._folders) >= _MOST_FOLDERS:
                self._folders.clear()
            if _is_folder(folder):
                self._folders[folder] = real
        return os.path.join(real, name)

    def find(self, path: str, follow: bool = True) -> Lookup:
        """Look a path up; `follow` an own link that it is itself."""
        for _ in range(_MOST_LINKS):
            near = self._near(path)
            if near is None:
                return self._find_real(path)
            state, rest = self._states[near], path[len(near) :]
            if state is _GONE:
                return Lookup(path, None)
            if isinstance(state, _RankZeros):
                places = [place + rest for place in state.places]
                there = [place for place in places if _exists(place)]
                if not there and rest:
                    return Lookup(path, None)
                return Lookup(path, there[0] if there else self._placeholder())
            place = self._scratch + near
            if stat.S_ISLNK(os.lstat(place).st_mode) and (rest or follow):
                target = os.path.join(os.path.dirname(near), os.readlink(place))
                path = os.path.normpath(target) + rest
                continue
            place += rest
            return Lookup(path, place, is_own=True) if _exists(place) else Lookup(path, None)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def _find_real(self, path: str) -> Lookup:
        there = _exists(path)
        if self._journal is None:
            return Lookup(path, path if there else None)
        self._journal.refresh()
        entry = self._journal.former(path)
        if entry is None:
            return Lookup(path, path if there else None)
        if entry.former == "absent":
            return Lookup(path, None, reason=_HIDDEN if there else "")
        if entry.kept is not None and _exists(entry.kept):
            return Lookup(path, entry.kept)
        return Lookup(path, path if there else self._placeholder(entry.former == "folder"))

    def existing(self, path: str, follow: bool = True) -> Lookup:
        """Look a path up. Raises FileNotFoundError if there is none."""
        spot = self.find(path, follow)
        if spot.place is None:
            _missing(path, spot.reason)
        return spot

    def names(self, path: str) -> list[str]:
        """List a folder. Raises OSError as os.listdir."""
        spot = self.existing(path)
        assert spot.place is not None
        listed = os.listdir(spot.place)  # Before the journal, which explains new names.
        if not spot.is_own:
            listed = [name for name in listed if not self._is_changed(spot.path, name)]
        own = self._names.get(spot.path, ())
        changed = set() if self._journal is None else self._journal.names.get(spot.path, set())
        more = {name for name in {*own, *changed} if self._is_there(spot.path, name)}
        return [*listed, *(more - set(listed))]

    def _is_changed(self, folder: str, name: str) -> bool:
        if name in self._names.get(folder, ()):
            return True
        if self._journal is None:
            return False
        self._journal.refresh()
        return name in self._journal.names.get(folder, ())

    def _is_there(self, folder: str, name: str) -> bool:
        return self.find(os.path.join(folder, name), follow=False).place is not None

    def is_plain(self, path: str) -> bool:
        """True if a folder is the real one, and nobody has changed anything in it."""
        spot = self.find(path)
        if self._journal is not None:
            self._journal.refresh()
            if self._journal.names.get(spot.path):
                return False
        return spot.place == path and not self._names.get(spot.path)

    # Changes

    def to_write(self, path: str, flags: int) -> str:
        """Return where to open a file for writing, with the flags of os.open.

        Raises FileNotFoundError and FileExistsError as os.open, and IsADirectoryError.
        """
        spot = self.find(path)
        if spot.place is None:
            if not flags & os.O_CREAT:
                _missing(path, spot.reason)
            return self._room(spot.path)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        if exclusive and (self.knows_all or spot.is_own):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if spot.is_folder and flags & os.O_DIRECTORY:  # To write files into it.
            return spot.place if spot.is_own else self._room(spot.path)
        if spot.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if spot.is_own:
            return spot.place
        if not stat.S_ISREG(os.stat(spot.place).st_mode):
            return spot.place  # A pipe or a device.
        place = self._room(spot.path)
        if not flags & os.O_TRUNC and not exclusive:
            _copy(spot.place, place)
        return place

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """As os.mkdir."""
        spot = self.find(path, follow=False)
        if spot.place is not None and (self.knows_all or spot.is_own):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        place = self._room(path)
        os.mkdir(place, mode | 0o700)

    def make_link(self, target: str, path: str) -> None:
        """As os.symlink."""
        spot = self.find(path, follow=False)
        if spot.place is not None and (self.knows_all or spot.is_own):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.symlink(target, self._room(path))

    def copy_name(self, old: str, new: str) -> None:
        """Give a file a second name, as os.link."""
        spot = self.existing(old, follow=False)
        if self.find(new, follow=False).place is not None and self.knows_all:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if spot.is_own:
            os.link(str(spot.place), self._room(new), follow_symlinks=False)
        else:
            self._follow_rank_0(old, self._target(new))

    def remove(self, path: str) -> None:
        """As os.remove."""
        spot = self._to_remove(path)
        if spot.place is not None and _is_folder(spot.place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._drop(path)

    def remove_folder(self, path: str) -> None:
        """As os.rmdir."""
        spot = self._to_remove(path)
        if spot.place is not None:
            if not _is_folder(spot.place):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if self.knows_all and self.names(path):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._drop(path)

    def _to_remove(self, path: str) -> Lookup:
        spot = self.find(path, follow=False)
        if spot.place is None and (self.knows_all or self._states.get(path) is _GONE):
            _missing(path, spot.reason)
        return spot

    def rename(self, old: str, new: str) -> None:
        """As os.replace."""
        moved = self._to_remove(old)
        new = self._target(new)
        if old == new:
            return
        there = self.find(new, follow=False)
        if there.is_folder and (self.knows_all or there.is_own):
            if not moved.is_folder:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
            if self.names(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), new)
        below = {path: each for path, each in self._states.items() if path.startswith(old + "/")}
        self._drop(new)
        if self._scratch and _exists(self._scratch + old):
            os.makedirs(os.path.dirname(self._scratch + new), exist_ok=True)
            os.rename(self._scratch + old, self._scratch + new)
        if moved.is_own:
            self._set(new, _OWN)
        else:
            self._follow_rank_0(old, new)
        for path, state in below.items():
            name = new + path[len(old) :]
            self._set(name, state)
            if isinstance(state, _RankZeros):
                self._follow_rank_0(path, name)
        self._drop(old)

    def _follow_rank_0(self, old: str, new: str) -> None:
        """Read `new` where rank 0 has it, or has had it until it renames it, too."""
        state = self._states.get(old)
        if isinstance(state, _RankZeros):
            places = state.places
        else:
            place = self.find(old, follow=False).place
            places = (old,) if place in (None, old) else (str(place), old)
        self._set(new, _RankZeros((*places, new)))
        self._renamed.append(new)

    def adopt(self, path: str, real: str) -> None:
        """Note that rank 0 has written `path` for all ranks, under the name `real`."""
        self._drop(path)
        self._set(path, _RankZeros((real,)))

    def move_in(self, place: str, path: str) -> None:
        """Move a real file of this rank alone to a path."""
        there = self._room(path)
        shutil.move(place, there)

    def settle(self) -> None:
        """Note that all ranks have met: see `JournalReader.settle`."""
        for path in self._renamed:
            # Rank 0 has done so, too: the newest name is the right one.
            if isinstance(state := self._states.get(path), _RankZeros):
                self._states[path] = _RankZeros(state.places[::-1])
        self._renamed.clear()
        if self._journal is not None:
            self._journal.settle()

    def publish(self, is_chosen: Callable[[str, set[str]], bool] | None = None) -> None:
        """Make real all that the real file system lacks, as this rank has become rank 0; or else
        the chosen paths, which another run may have left, but for those that rank 0 has changed."""
        by_rank_0: set[str] = set()
        if is_chosen is not None and self._journal is not None:
            self._journal.refresh()
            by_rank_0 = self._journal.changed
        for path, state in sorted(self._states.items(), key=lambda item: item[0]):
            if state is not _OWN:
                continue
            if _exists(path) if is_chosen is None else not is_chosen(path, by_rank_0):
                continue
            place = self._scratch + path
            try:
                if _is_folder(place):
                    os.makedirs(path, exist_ok=True)
                else:
                    shutil.copy2(place, path, follow_symlinks=False)
            except OSError:
                continue  # Rank 0 could not have written it either.

    # States

    def _near(self, path: str) -> str | None:
        """Return the path itself, or the nearest folder above it, that has a state."""
        if not self._states:
            return None
        while path not in self._states:
            if len(path) <= 1:
                return None
            path = os.path.dirname(path)
        return path

    def _set(self, path: str, state: str | _RankZeros) -> None:
        self._states[path] = state
        folder, name = os.path.split(path)
        self._names.setdefault(folder, set()).add(name)

    def _drop(self, path: str) -> None:
        """Take a path and all below it away."""
        if self._scratch:
            _remove(self._scratch + path)
        for each in [each for each in self._states if each.startswith(path + "/")]:
            del self._states[each]
            self._names[os.path.dirname(each)].discard(os.path.basename(each))
        self._set(path, _GONE)

    def _target(self, path: str) -> str:
        """Return the name of a new entry.

        Raises FileNotFoundError or NotADirectoryError without a folder for it.
        """
        parent = self.find(os.path.dirname(path))
        if parent.place is None:
            _missing(path, parent.reason)
        if not _is_folder(parent.place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return os.path.join(parent.path, os.path.basename(path))

    def _room(self, path: str) -> str:
        """Return the place of a new file, folder or link of the rank's own."""
        path = self._target(path)
        place = self.scratch + path
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        self._drop(path)
        self._set(path, _OWN)
        return place

    def _placeholder(self, is_folder: bool = False) -> str:
        """Return an empty file or folder in place of one that is not where it was expected."""
        place = os.path.join(os.path.dirname(self.scratch), "folder" if is_folder else "file")
        if is_folder:
            os.makedirs(place, exist_ok=True)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        return place


def _missing(path: str, reason: str = "") -> NoReturn:
    said = os.strerror(errno.ENOENT)
    raise FileNotFoundError(errno.ENOENT, f"{said} ({reason})" if reason else said, path)


def _exists(place: str) -> bool:
    try:
        os.lstat(place)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # The call that is asked for raises the error that is right.
    return True


def _is_folder(place: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(place).st_mode)
    except OSError:
        return False


def _real_folder(path: str) -> str:
    """Return a folder without links on the way; where there is none, as far as there is."""
    rest = ""
    while not _exists(path) and len(path) > 1:
        path, name = os.path.split(path)
        rest = f"/{name}{rest}"
    return os.path.realpath(path).rstrip("/") + rest or "/"


def _remove(place: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(place).st_mode):
            shutil.rmtree(place, ignore_errors=True)
        else:
            os.unlink(place)
    except OSError:
        return


def _copy(place: str, to: str) -> None:
    shutil.copyfile(place, to)
    os.chmod(to, stat.S_IMODE(os.stat(place).st_mode) | 0o600)
