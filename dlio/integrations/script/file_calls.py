"""Python's functions of files, as ranks other than 0 have them in a `dlio run`."""

import builtins
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

from dlio.comm import Communicator
from dlio.integrations.script.file_callers import is_dlios
from dlio.integrations.script.private_files import WRITES, PrivateFiles
from dlio.integrations.script.share import ScriptContext

_READERS: Final = (
    "access",
    "getxattr",
    "listxattr",
    "lstat",
    "pathconf",
    "readlink",
    "stat",
    "statvfs",
)
_MARKERS: Final = ("chmod", "chown", "lchown", "removexattr", "setxattr", "utime")
_ON_LINKS: Final = ("lstat", "readlink", "lchown")
_LEFT: Final = frozenset({"posix", "_io", "os", "io", "builtins"})
"""Modules whose own names stay as they are, or are replaced one by one."""
_MODES: Final = {
    "w": os.O_CREAT | os.O_TRUNC,
    "a": os.O_CREAT | os.O_APPEND,
    "x": os.O_CREAT | os.O_EXCL,
    "r": 0,
}
_OPENER: Final = 7
"""Position of the opener among the arguments of `open`."""


def keep_files_private(comm: Communicator, context: ScriptContext) -> PrivateFiles:
    """Have rank 0 alone write a script's files, until this process ends. Collective."""
    files = PrivateFiles(comm, context)
    if comm.rank:
        FileCalls(files).replace_all()
    return files


class FileCalls:
    """The replacements on one rank."""

    def __init__(self, files: PrivateFiles) -> None:
        self._files, self._view = files, files.view
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the id of a function of Python's, it and its replacement."""

    def replace_all(self) -> None:
        """Replace the functions wherever modules have them."""
        view = self._view
        self._replace(builtins, "open", self._open)
        self._files.replace(io, "open", builtins.open)
        self._replace(os, "open", self._os_open)
        for name in _READERS:
            self._replace(os, name, self._reads)
        for name in _MARKERS:
            self._replace(os, name, self._marks)
        for name, change in (
            ("mkdir", view.make_folder),
            ("remove", view.remove),
            ("unlink", view.remove),
            ("rmdir", view.remove_folder),
        ):
            self._replace(os, name, functools.partial(self._changes, change=change))
        for name, move in (
            ("rename", view.rename),
            ("replace", view.rename),
            ("link", view.copy_name),
        ):
            self._replace(os, name, functools.partial(self._moves, move=move))
        self._replace(os, "symlink", self._links)
        self._replace(os, "truncate", self._truncates)
        self._replace(os, "listdir", self._lists)
        self._replace(os, "scandir", self._scans)
        self._replace(os, "chdir", self._changes_folder)
        self._replace(os, "getcwd", lambda original: lambda: self._files.cwd or original())
        self._replace(shutil, "rmtree", self._removes_tree)
        self._replace_kept()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        value = self._guarded(original, make(original))
        self._made[id(original)] = original, value
        self._files.replace(owner, name, value)
        for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in known:
                known.add(value)

    def _replace_kept(self) -> None:
        """Replace the functions that modules have kept by `from os import ...`."""
        for module in list(sys.modules.values()):
            name = str(getattr(module, "__name__", ""))
            if name in _LEFT or is_dlios(name):
                continue
            for key, value in list(getattr(module, "__dict__", {}).items()):
                original, made = self._made.get(id(value), (None, None))
                if made is not None and original is value:
                    self._files.replace(module, key, made)
        # By extension; np.savetxt asks it.
        openers = sys.modules.get("numpy.lib._datasource")
        table = getattr(getattr(openers, "_file_openers", None), "_file_openers", {})
        for key, value in list(table.items()):
            if id(value) in self._made:
                self._files.replace_item(table, key, self._made[id(value)][1])

    def _guarded(self, original: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Return a function that does as the `original` where files are not the script's."""

        @functools.wraps(original)
        def guarded(*args: Any, **options: Any) -> Any:
            if self._files.passes() or is_dlios(sys._getframe(1).f_globals.get("__name__", "")):
                return original(*args, **options)
            return call(*args, **options)

        return guarded

    # Opening

    def _open(self, original: Any) -> Any:
        os_open = os.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if options.get("opener") is not None or len(args) > _OPENER - 2:
                return original(file, mode, *args, **options)
            flags = next((_MODES[key] for key in mode if key in _MODES), 0)
            if "+" in mode:
                flags |= os.O_RDWR
            elif flags:
                flags |= os.O_WRONLY
            place = self._to_open(file, flags)
            if place is file:
                return original(file, mode, *args, **options)

            def opener(_: str, flags: int) -> int:
                return os_open(place, flags | os.O_CLOEXEC, 0o666)

            # By an opener, so that the file has the name that the script gives it.
            with self._files.inside():
                return original(file, mode, *args, **options, opener=opener)

        return opened

    def _os_open(self, original: Any) -> Any:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> Any:
            name = self._files.name_of(path, dir_fd)
            is_unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
            if name is None or is_unnamed:
                return original(path, flags, mode, dir_fd=dir_fd)
            if flags & WRITES and self._files.takes_temporary(name):
                return original(path, flags, mode, dir_fd=dir_fd)
            place = self._to_open(path, flags, dir_fd)
            if place is path:
                return original(path, flags, mode, dir_fd=dir_fd)
            with self._files.inside():
                return original(place, flags, mode)

        return opened

    def _to_open(self, path: Any, flags: int, folder: object = None) -> Any:
        """Return the argument that stands for `path`: itself if it is opened where it says."""
        name = self._files.name_of(path, folder)
        if name is None or not flags & WRITES:
            return self._to_read(path, folder)
        if self._files.is_left(name):
            return path
        with self._files.inside():
            return self._view.to_write(name, flags)

    def _to_read(self, path: Any, folder: object = None, follow: bool = True) -> Any:
        """Return the argument that stands for `path`. Raises FileNotFoundError."""
        name = self._files.name_of(path, folder)
        if name is None or self._files.is_shared(name):
            return path
        with self._files.inside():
            spot = self._view.existing(name, follow)
        if spot.place == name and not self._files.cwd:
            return path
        return os.fsencode(str(spot.place)) if isinstance(path, bytes) else spot.place

    # Looking

    def _reads(self, original: Any) -> Any:
        name = original.__name__

        def read(path: Any, *args: Any, **options: Any) -> Any:
            follow = options.get("follow_symlinks", name not in _ON_LINKS)
            try:
                place = self._to_read(path, options.get("dir_fd"), follow)
            except FileNotFoundError:
                if name == "access":
                    return False
                raise
            if place is not path:
                options.pop("dir_fd", None)
            return original(place, *args, **options)

        return read

    def _lists(self, original: Any) -> Any:
        def listed(path: Any = None) -> Any:
            name = self._files.name_of("." if path is None else path)
            if name is None or self._files.is_shared(name):
                return original(path)
            with self._files.inside():
                names = self._view.names(name)
            return [os.fsencode(each) for each in names] if isinstance(path, bytes) else names

        return listed

    def _scans(self, original: Any) -> Any:
        def scanned(path: Any = None) -> Any:
            given = "." if path is None else os.fspath(path) if not isinstance(path, int) else path
            name = self._files.name_of(given)
            if name is None or self._files.is_shared(name):
                return original(path)
            with self._files.inside():
                if self._view.is_plain(name) and not self._files.cwd:
                    with original(given) as entries:
                        kept = list(entries)
                    if self._view.is_plain(name):  # Still: rank 0 has added nothing meanwhile.
                        return _Entries(iter(kept))
                names = self._view.names(name)
            return _Entries(
                _Entry(given, os.fsencode(each) if isinstance(given, bytes) else each)
                for each in names
            )

        return scanned

    def _changes_folder(self, original: Any) -> Any:
        def changed(path: Any) -> None:
            name = self._files.name_of(path)
            if name is None:
                original(path)
                self._files.cwd = ""
                return
            with self._files.inside():
                spot = self._view.existing(name)
                original(spot.place)
            self._files.cwd = "" if spot.place == name else spot.path

        return changed

    # Changing

    def _marks(self, original: Any) -> Any:
        """Change modes, times and attributes of the rank's own files, and of nothing else."""

        def marked(path: Any, *args: Any, **options: Any) -> Any:
            name = self._files.name_of(path, options.get("dir_fd"))
            if name is None or self._files.is_left(name):
                return original(path, *args, **options)
            follow = options.get("follow_symlinks", original.__name__ not in _ON_LINKS)
            options.pop("dir_fd", None)
            with self._files.inside():
                spot = self._view.existing(name, follow)
                return original(spot.place, *args, **options) if spot.is_own else None

        return marked

    def _changes(self, original: Any, change: Callable[..., None]) -> Any:
        is_new = original.__name__ == "mkdir"

        def changed(path: Any, *args: Any, **options: Any) -> Any:
            name = self._files.name_of(path, options.get("dir_fd"))
            if name is None or (is_new and self._files.takes_temporary(name)):
                return original(path, *args, **options)
            if self._files.is_left(name):
                return original(path, *args, **options)
            options.pop("dir_fd", None)
            with self._files.inside():
                return change(name, *args, **options)

        return changed

    def _removes_tree(self, original: Any) -> Any:
        # It would go by descriptors, which show the private folder alone.
        by_path: Any = FunctionType(
            original.__code__,
            {**vars(shutil), "_use_fd_functions": False},
            argdefs=original.__defaults__,
            closure=original.__closure__,
        )
        by_path.__kwdefaults__ = original.__kwdefaults__

        def removed(path: Any, *args: Any, dir_fd: Any = None, **options: Any) -> Any:
            at = path if dir_fd is None else self._files.name_of(path, dir_fd)
            return by_path(at, *args, **options)

        return removed

    def _moves(self, original: Any, move: Callable[[str, str], None]) -> Any:
        keeps = original.__name__ == "link"

        def moved(src: Any, dst: Any, **options: Any) -> Any:
            files = self._files
            old = files.name_of(src, options.get("src_dir_fd"))
            new = files.name_of(dst, options.get("dst_dir_fd"))
            if old is None or new is None or (files.is_left(new) and files.is_left(old)):
                return original(src, dst, **options)
            from_real, to_real = files.is_shared(old), files.is_left(new)
            with files.inside():
                if not from_real and not to_real:
                    return move(old, new)
                # Between a temporary file and one of the rank's own.
                place = old if from_real else str(self._view.existing(old).place)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                shutil.copy2(place, new if to_real else self._view.to_write(new, flags))
                if keeps:
                    return None
                return os.unlink(old) if from_real else self._view.remove(old)

        return moved

    def _links(self, original: Any) -> Any:
        def linked(src: Any, dst: Any, *args: Any, **options: Any) -> Any:
            name = self._files.name_of(dst, options.get("dir_fd"))
            if name is None or self._files.is_left(name):
                return original(src, dst, *args, **options)
            with self._files.inside():
                return self._view.make_link(os.fsdecode(src), name)

        return linked

    def _truncates(self, original: Any) -> Any:
        def truncated(path: Any, length: int) -> Any:
            name = self._files.name_of(path)
            if name is None or self._files.is_left(name):
                return original(path, length)
            with self._files.inside():
                return original(self._view.to_write(name, os.O_RDWR), length)

        return truncated


class _Entry:
    """An os.DirEntry of a folder that the rank sees otherwise than it is."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)


class _Entries:
    """The iterator that os.scandir returns."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
