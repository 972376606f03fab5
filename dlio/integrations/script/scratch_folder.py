"""A scratch copy of all folders, made of links, in which a script runs without changing the user's.

The scratch folder stands for `/`. A folder in it is real from the moment on that something in it is
written; until then it is a link to the user's. So nothing is copied but files that the script
opens to change, and the paths `data` and `../data` lead where they did.
"""

import ctypes
import fcntl
import importlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from dlio.errors import UsageError
from dlio.util.input_files import read_text
from dlio.util.whole_files import take_lock

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOCK_S: Final = 600.0
_HERE: Final = -100  # AT_FDCWD
_RENAME_EXCHANGE: Final = 2
_NOT_FILES: Final = ("/dev", "/proc", "/sys")
_CHANGES: Final[Mapping[str, tuple[int, ...]]] = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
    "sqlite3.connect": (0,),
}
"""Events of `sys.addaudithook` that announce a change, and the places of their paths."""
_OF_LINKS: Final = ("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir")
"""Those that act on a link itself, not on the file that it leads to."""


class ScratchFolder:
    """The scratch folder of one run, seen from one of its processes.

    Args:
        root: a folder that is to stand for `/`; all processes of the run share it.
        home: the user's working folder, an absolute path without links.
    """

    def __init__(self, root: str, home: str) -> None:
        self.root, self._home = root, home
        self.made = root + ".outside"
        """File with the paths that the script has made outside, one a line."""
        self.records = root + ".records"
        """Folder next to it for facts about the run."""
        self._inside = threading.local()
        caches = (os.path.expanduser("~/.cache"), sys.prefix, tempfile.gettempdir(), "/tmp")  # noqa: S108
        named = (os.environ.get(key) for key in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME"))
        folders = (*_NOT_FILES, *caches, *(each for each in named if each))
        self._free = tuple(os.path.realpath(each) for each in folders)
        """Folders outside that may be written: devices, caches and temporary files."""

    def place(self, path: str) -> str:
        """Return the path that stands for an absolute path of the user's."""
        return self.root + path

    def make(self) -> None:
        """Make the scratch copy, before a process enters it."""
        os.mkdir(self.root)
        os.mkdir(self.records)
        self._fill(self.root, os.sep)
        self.own(self.place(self._home), changes=True)

    def enter(self) -> None:
        """Make the scratch copy of the working folder this process's, and redirect its writes."""
        os.chdir(self.place(self._home))
        _redirect_libraries(self)
        sys.addaudithook(self._hear)

    def own(self, path: str, *, changes: bool, empties: bool = False) -> None:
        """Have a path in the scratch folder lead to no file of the user's.

        Args:
            path: absolute, or from the current folder.
            changes: the file at the path itself is to be changed, not only its folder.
            empties: its present content is not needed.

        Raises UsageError if a file of the user's outside the scratch folder is to be changed.
        """
        path = os.path.abspath(path)
        if path != self.root and not path.startswith(self.root + os.sep):
            self._outside(path)
            return
        if getattr(self._inside, "busy", False):
            return
        self._inside.busy = True
        try:
            parts = path[len(self.root) :].strip(os.sep).split(os.sep)
            here = self.root
            for number, part in enumerate(parts):
                here = os.path.join(here, part)
                last = number == len(parts) - 1
                if os.path.islink(here) and (changes or not last):
                    self._break(here, empties and last)
        finally:
            self._inside.busy = False

    def _break(self, link: str, empties: bool) -> None:
        """Replace a link out of the scratch folder by a copy; that of a folder consists of links.

        Processes of one run may do so at the same time.
        """
        lock = os.open(self.root + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not take_lock(lock, fcntl.LOCK_EX, _LOCK_S):
                raise UsageError(f"{link}: another rank has copied its file for {_LOCK_S:.0f} s")
            if not os.path.islink(link):
                return
            target = os.path.realpath(link)
            if target.startswith(self.root + os.sep):
                return  # One that the script has made.
            fresh = f"{link}.dlio-{os.getpid()}"
            if os.path.isdir(target):
                os.mkdir(fresh)
                self._fill(fresh, target)
                _exchange(fresh, link)
            elif empties or not os.path.exists(target):
                os.unlink(link)
            else:
                shutil.copy2(target, fresh)
                os.replace(fresh, link)
        finally:
            os.close(lock)

    def _fill(self, folder: str, target: str) -> None:
        for name in os.listdir(target):
            os.symlink(os.path.join(target, name), os.path.join(folder, name))

    def _outside(self, path: str) -> None:
        """Note a file that is made outside. Raises UsageError if a file of the user's is there."""
        real = os.path.realpath(path)
        if real == self.root or real.startswith(self.root + os.sep):
            return
        at_home = real == self._home or real.startswith(self._home + os.sep)
        if not at_home and any(real.startswith(each) for each in self._free):
            return
        if not os.path.lexists(real):
            self._inside.busy = True
            try:
                record = os.open(self.made, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.write(record, os.fsencode(real + "\n"))
                os.close(record)
            finally:
                self._inside.busy = False
        elif not os.path.isdir(real) and real not in made_outside(self.made):
            raise UsageError(
                f"the script changes {path}, which is there already and outside the folder that "
                "--check copies: name the file by a path from the working folder"
            )

    def _hear(self, event: str, values: tuple[object, ...]) -> None:
        if event != "open" and event not in _CHANGES:
            return
        if getattr(self._inside, "busy", False):
            return
        if event == "open":
            path, flags = values[0], values[2]
            if isinstance(path, str | bytes) and isinstance(flags, int) and flags & _WRITES:
                empties = bool(flags & os.O_TRUNC)
                self.own(os.fsdecode(path), changes=True, empties=empties)
            return
        folders = [each for each in values if type(each) is int and each >= 0]
        if event.startswith("os.") and folders and event not in ("os.mkdir", "os.chmod"):
            return  # Relative to an open folder, in a tree that the caller has announced.
        for place in _CHANGES[event]:
            path = values[place]
            if isinstance(path, str | bytes) and not os.fsdecode(path).startswith((":", "file:")):
                self.own(os.fsdecode(path), changes=event not in _OF_LINKS)


def _exchange(folder: str, link: str) -> None:
    """Put a folder in the place of a link, without a moment in which another process sees neither,
    where the system can do that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(folder), os.fsencode(link)
        if libc.renameat2(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0:
            os.unlink(folder)
            return
    os.unlink(link)
    os.rename(folder, link)


def made_outside(record: str) -> list[str]:
    """Return the paths that a run has made outside its scratch folder, in their order."""
    try:
        return read_text(record).splitlines()
    except FileNotFoundError:
        return []


def remove_outside(record: str) -> None:
    """Remove the files that a run has made outside its scratch folder, and folders left empty."""
    for path in reversed(made_outside(record)):
        with suppress(OSError):
            if os.path.isdir(path):
                os.rmdir(path)
            else:
                os.remove(path)


def _redirect_libraries(scratch: ScratchFolder) -> None:
    """Announce the files that libraries write by code that is not Python's."""
    import torch

    saved: Callable[..., None] = torch.save

    def save(obj: object, f: object, *args: object, **options: object) -> None:
        if isinstance(f, str | os.PathLike):
            scratch.own(os.fspath(f), changes=True, empties=True)
        saved(obj, f, *args, **options)

    torch.save = save
    for name in ("safetensors.torch", "safetensors.numpy"):
        with suppress(ImportError):
            names = vars(importlib.import_module(name))
            names["serialize_file"] = _announced(names["serialize_file"], scratch)


def _announced(written: Callable[..., None], scratch: ScratchFolder) -> Callable[..., None]:
    def serialize_file(tensors: object, filename: str, *args: object, **options: object) -> None:
        scratch.own(os.fspath(filename), changes=True, empties=True)
        written(tensors, filename, *args, **options)

    return serialize_file
