"""The journal of rank 0's changes of the file system, by which other ranks see it as it was.

Rank 0 runs ahead of the others by a little: it has made a folder when another rank asks whether
there is one. It therefore notes each path before it changes it for the first time, in a file of its
node, and the others believe these notes until they have passed the same place of the script. After
that they see the file system as it is.
"""

import json
import os
import stat
from typing import Final, Literal, NamedTuple, TypeAlias

from dlio.util.input_files import open_input
from dlio.util.limits import open_regular
from dlio.util.trusted_files import closing_descriptor
from dlio.util.whole_files import open_own

NAME: Final = "journal"
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_LARGEST_KEPT: Final = 1 << 20
"""Bytes of the largest file whose former contents are kept."""

Former: TypeAlias = Literal["absent", "folder", "file"]


class FormerPath(NamedTuple):
    """A path before rank 0 changed it."""

    former: Former
    kept: str | None = None
    """A copy of the file's former contents; None if there is none."""


class JournalWriter:
    """The journal as rank 0 writes it, in a private folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = open_own(os.path.join(folder, NAME), _APPEND)
        self._noted: set[str] = set()

    def note(self, path: str) -> None:
        """Note an absolute path that is about to be changed, at its first time."""
        if path in self._noted:
            return
        self._noted.add(path)
        kept = None
        try:
            former: Former = "folder" if stat.S_ISDIR(os.lstat(path).st_mode) else "file"
            status = os.stat(path)  # Of a link, the contents of its file.
            if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_KEPT:
                # The process's number: a worker process of a loader may keep a file, too.
                kept = os.path.join(self._folder, f"{os.getpid()}-{len(self._noted)}")
                with open_input(path) as file, closing_descriptor(open_own(kept, _APPEND)) as to:
                    os.write(to, file.read(_LARGEST_KEPT))
        except OSError:
            former, kept = ("absent" if not os.path.lexists(path) else "file"), None
        os.write(self._file, json.dumps([path, former, kept]).encode() + b"\n")


class JournalReader:
    """The journal as another rank of the same node reads it."""

    def __init__(self, path: str) -> None:
        self._file = open_regular(path)
        self._read = 0
        self._pending: list[str] = []
        self.entries: dict[str, FormerPath] = {}
        """Paths that this rank sees as they were."""
        self.changed: set[str] = set()
        """All paths that rank 0 has changed, as far as was read."""
        self.names: dict[str, set[str]] = {}
        """By folder, the names in it among the paths of `entries`."""

    def refresh(self) -> None:
        """Read rank 0's notes since. To be called after a look at the file system."""
        size = os.fstat(self._file).st_size
        if size <= self._read:
            return
        text = os.pread(self._file, size - self._read, self._read)
        lines = text[: text.rfind(b"\n") + 1]
        self._read += len(lines)
        for line in lines.splitlines():
            path, former, kept = json.loads(line)
            self.changed.add(path)
            if path not in self.entries:
                self.entries[path] = FormerPath(former, kept)
                folder, name = os.path.split(path)
                self.names.setdefault(folder, set()).add(name)

    def settle(self) -> None:
        """Note that all ranks have met.

        Rank 0 had done before this meeting all that was noted at the last one: this rank has come
        past that place of the script since, and sees those paths as they are.
        """
        for path in self._pending:
            if self.entries.pop(path, None) is not None:
                folder, name = os.path.split(path)
                self.names[folder].discard(name)
        self.refresh()
        self._pending = list(self.entries)

    def former(self, path: str) -> FormerPath | None:
        """Return how a path was if rank 0 has changed it, or a folder above it was not there."""
        entry = self.entries.get(path)
        while entry is None and len(path) > 1:
            path = os.path.dirname(path)
            above = self.entries.get(path)
            if above is not None and above.former == "absent":
                return above
        return entry
