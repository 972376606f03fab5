"""Files of a script: rank 0 alone writes them, the other ranks write into a folder of their own.

A script for one process opens, moves and removes files as if nobody else did. On the other ranks
of a `dlio run` the functions of Python that do so are therefore replaced until the process ends
(`file_calls`): files that the script and its libraries write land in a private folder, and the
rank sees the file system as if it had changed it (`file_view`). Others are read where they are.

Left as they are: devices and /proc, caches that a user's processes share,
temporary files, which have names of their own, and whatever dlio itself writes (`file_callers`).
Libraries that open files without Python are known one by one (`native_files`). For others, and for
functions that a library has kept from before, an audit hook names files that every rank writes.
"""

import atexit
import builtins
import importlib
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy as np

from dlio.comm import Communicator
from dlio.comm.launch_environment import job_folder
from dlio.comm.survival.recovery import uniform
from dlio.integrations.script.file_callers import (
    is_called_by,
    is_called_by_dlio,
    is_called_by_script,
    shared_places,
)
from dlio.integrations.script.file_journal import NAME, JournalReader, JournalWriter
from dlio.integrations.script.file_view import FileView
from dlio.integrations.script.native_files import ROOTS, replace_native, replace_torch
from dlio.integrations.script.share import ScriptContext
from dlio.util.folders import lock_file, remove_if_unheld
from dlio.util.input_files import open_input
from dlio.util.trusted_files import closing_descriptor
from dlio.util.whole_files import open_own

_PREFIX: Final = "dlio-run-"
_ALIVE: Final = "alive"
_TRIES: Final = 10
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags of os.open with which a file is not only read."""
_EVENTS: Final = {
    "open": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
}
"""Audit events of changes, with the number of paths among their arguments."""
_PROGRAMS: Final = ("subprocess.Popen", "os.system", "os.posix_spawn")


_PART_BYTES: Final = 16 << 20


class PrivateFiles:
    """The files of a script on one rank. One per process; it ends with the process."""

    def __init__(self, comm: Communicator, context: ScriptContext) -> None:
        """Collective."""
        self._comm, self._context = comm, context
        self._thread = threading.local()
        self._process, self._folder = os.getpid(), ""
        self._shared = shared_places()
        self._temporary: set[str] = set()
        """Temporary files and folders of this rank, with names that only it knows."""
        self.cwd = ""
        """The working folder by its name in the script, if it is in the private folder."""
        self._said: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._is_first = comm.rank == 0
        self._is_aside = False
        self._remove_left()
        self._journal = JournalWriter(self._private_folder()) if self._is_first else None
        path = os.path.join(self._folder, NAME)
        self._journal_path = uniform(comm, lambda: comm.tell(path))
        reader = None
        if not self._is_first:
            with suppress(OSError):  # Rank 0 is on another node.
                reader = JournalReader(self._journal_path)
        self.view = FileView(self._scratch, reader)
        atexit.register(self._close)
        replace_torch(self.place, self.replace)
        replace_native(self.place, self.replace)
        self.replace(builtins, "__import__", self._imported(builtins.__import__))
        self.replace(importlib, "import_module", self._imported(importlib.import_module))
        if not self._is_first:
            os.environ.setdefault("WANDB_MODE", "disabled")
        sys.addaudithook(self._audit)

    # For the runner

    def met(self) -> None:
        """Note that all ranks have met, as in an optimizer's step."""
        if not self.passes():
            with self.inside():
                self.view.settle()

    def saving(self, path: "str | os.PathLike[str]") -> str:
        """Return the absolute name of a file that rank 0 is about to write for all ranks."""
        name = self.name_of(path) or ""
        if self._comm.rank == 0 and self._journal is not None:
            with self.inside(), suppress(OSError):
                self._journal.note(name)
        return name

    def spread(self, name: str) -> None:
        """Copy a temporary file that rank 0 has written for all ranks to this rank's own name of
        it: rank 0 may remove its own next, and other nodes do not see it. Collective."""
        is_first = self._comm.rank == 0
        with self.inside():
            flags = os.O_WRONLY | os.O_CREAT
            with open_input(name) if is_first else os.fdopen(open_own(name, flags), "wb") as file:
                if not is_first:
                    file.truncate()
                size = -1
                while size:
                    data = file.read(_PART_BYTES) if is_first else b""
                    size = self._comm.tell(len(data))
                    part = np.empty(size, np.uint8)
                    part[: len(data)] = np.frombuffer(data, np.uint8)
                    self._comm.bcast(part)
                    if not is_first:
                        file.write(part.tobytes())

    def saved(self, name: str, real: str) -> None:
        """Note that rank 0 has written a file for all ranks, as `real`."""
        if not self.passes():
            with self.inside():
                self.view.adopt(name, real)
                self.view.settle()

    def hand_over(self) -> None:
        """Make real the files that have this rank's number in their path where one of rank 0 has a
        0: the script has asked for its rank, and means to write one for each. To be called once
        rank 0 has written all of its own."""
        if not self.passes():
            with self.inside():
                self.view.publish(partial(_is_of_rank, self._comm.rank))

    # For the replaced functions

    def passes(self) -> bool:
        """True if calls do as they always do: on rank 0, and where a framework distributes."""
        if not self._is_first and self._comm.rank == 0:
            self._is_first = True
            self._become_real()
            with suppress(OSError):
                self._journal = JournalWriter(os.path.dirname(self._journal_path))
        if not self._is_aside and self._context.aside:
            self._is_aside = True
            self._become_real()
        return self._is_first or self._is_aside or self.is_inside()

    def _become_real(self) -> None:
        """Write for real from now on: all ranks before this one are lost, or the ranks belong to a
        framework."""
        with self.inside():
            if self._is_first:
                self.view.publish()
            if self.cwd:
                os.makedirs(self.cwd, exist_ok=True)
                os.chdir(self.cwd)
                self.cwd = ""

    def is_inside(self) -> bool:
        return getattr(self._thread, "depth", 0) > 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have calls of this thread do as they always do."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def name_of(self, path: object, folder: object = None) -> str | None:
        """Return the absolute name of an argument, str, bytes or os.PathLike, relative to a
        `folder`'s descriptor if there is one; None if the argument is a descriptor."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        with self.inside():
            text = os.fsdecode(path)
            if not text.startswith("/"):
                base = self.cwd or os.getcwd()
                if isinstance(folder, int) and folder >= 0:
                    base = os.readlink(f"/proc/self/fd/{folder}")
                text = f"{base}/{text}"
            return self.view.name_of(os.path.normpath(text))

    def is_left(self, name: str) -> bool:
        """True if a change of a path is to be made for real, whoever makes it, or by dlio."""
        return self.is_shared(name) or is_called_by_dlio()

    def is_shared(self, name: str) -> bool:
        """True for devices, caches, and temporary files with names of their own."""
        if (name + "/").startswith(self._shared) or "__pycache__" in name:
            return True
        return self.is_temporary(name)

    def is_temporary(self, name: str) -> bool:
        """True for temporary files with names of their own, and in such folders."""
        while self._temporary and len(name) > 1:
            if name in self._temporary:
                return True
            name = os.path.dirname(name)
        return False

    def takes_temporary(self, name: str) -> bool:
        """Note a new temporary file of Python's `tempfile`; False if it is none, or in a folder
        that the script has named."""
        if not is_called_by("tempfile"):
            return False
        with self.inside():
            if os.path.dirname(name) != os.path.realpath(tempfile.gettempdir()):
                return False
        self._temporary.add(name)
        return True

    def place(self, path: Any, flags: int) -> Any:
        """Return where a library is to open a file, given the flags of os.open that it stands for;
        an argument that is not a path is returned."""
        if self.is_inside() or path == ":memory:":
            return path
        name = self.name_of(path)
        if name is None:
            return path
        if self.passes():
            if flags & WRITES:
                self._note(name, says=flags & os.O_TRUNC == 0)
            return path
        if flags & WRITES and self.is_left(name):
            return path
        with self.inside():
            if flags & WRITES:
                return self.view.to_write(name, flags)
            place = self.view.find(name).place
            return path if place in (None, name) else place

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the process ends."""
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def replace_item(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Set a value of a dictionary until the process ends."""
        self._undo.append(partial(table.__setitem__, key, table[key]))
        table[key] = value

    def _imported(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def imported(name: str, *args: Any, **options: Any) -> Any:
            before = len(sys.modules)
            module = original(name, *args, **options)
            # Functions import loaded modules again and again.
            if len(sys.modules) != before and name.partition(".")[0] in ROOTS:
                replace_native(self.place, self.replace)
            return module

        return imported

    # The private folder

    def _scratch(self) -> str:
        if not self._folder:
            self._private_folder()
        path = os.path.join(self._folder, "files")
        os.makedirs(path, 0o700, exist_ok=True)
        return path

    def _remove_left(self) -> None:
        """Remove the folders of processes that were killed. Before functions are replaced, as it
        takes those of `shutil` that know descriptors."""
        root = os.path.realpath(tempfile.gettempdir())
        with self.inside(), closing_descriptor(os.open(root, os.O_RDONLY | os.O_DIRECTORY)) as at:
            for name in os.listdir(at):
                if name.startswith(_PREFIX):
                    with suppress(OSError):
                        remove_if_unheld(at, name, _ALIVE)

    def _private_folder(self) -> str:
        root = os.path.realpath(tempfile.gettempdir())
        with self.inside():
            for left in reversed(range(_TRIES)):
                self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=job_folder() or root)
                try:
                    with closing_descriptor(os.open(self._folder, os.O_DIRECTORY)) as at:
                        lock_file(at, _ALIVE)
                    # Locked, perhaps, when another rank had just removed it.
                    os.stat(os.path.join(self._folder, _ALIVE))
                    break
                except FileNotFoundError:
                    if not left:  # Else another rank has taken it for one that was left.
                        raise
        return self._folder

    def _close(self) -> None:
        """Restore the functions replaced, and remove the folder, at the end of the process."""
        self._thread.depth = 1
        for undo in reversed(self._undo):
            undo()
        if self._folder and os.getpid() == self._process:
            if self.cwd:
                os.chdir("/")
            shutil.rmtree(self._folder, ignore_errors=True)

    # The audit hook

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS and event not in _PROGRAMS:
            return
        if self.is_inside() or self._context.aside:
            return
        if event == "open" and not (len(args) > 2 and args[2] & WRITES):
            return
        with self.inside():
            if event in _PROGRAMS:
                self._started(args)
                return
            for name in self._changed(event, args):
                if self._comm.rank == 0:
                    if event not in ("open", "os.mkdir") or not self.takes_temporary(name):
                        self._note(name, says=event == "open")
                else:
                    self._slipped(name)

    def _changed(self, event: str, args: tuple[Any, ...]) -> Iterator[str]:
        """Yield the paths that an event changes."""
        count = _EVENTS[event]
        for place, path in enumerate(args[:count]):
            if event == "os.symlink" and not place:
                continue
            folder = None if event == "open" else args[-1]
            if len(args) == 2 * count:  # One for each: of os.rename and os.link.
                folder = args[count + place]
            with suppress(OSError):
                name = self.name_of(path, folder)
                if name is not None:
                    yield name

    def _note(self, name: str, says: bool = True) -> None:
        """Tell the other ranks that rank 0 is about to change a path."""
        if self._journal is None or name.startswith(self._folder) or self.is_left(name):
            return
        with self.inside(), suppress(OSError):
            self._journal.note(name)
        if says and not self._context.aside and "files" not in self._said:
            self._said.add("files")
            self._context.note(
                f"rank 0 alone wrote the script's files, such as {os.path.basename(name)}; those "
                "of the other ranks went to a private folder of each, which is removed"
            )

    def _slipped(self, name: str) -> None:
        """Say once that this rank changes a file for real."""
        if self._folder and name.startswith(self._folder):
            return
        if "slipped" in self._said or self.is_left(name):
            return
        with suppress(OSError):
            if not stat.S_ISREG(os.stat(name).st_mode):
                return
        self._said.add("slipped")
        sys.stderr.write(
            f"dlio run: warning: {name} is written by every rank, by a function that dlio could "
            "not replace: have one rank write it, or each a file of its own\n"
        )

    def _started(self, args: tuple[Any, ...]) -> None:
        """Note that the script starts a program, of which dlio sees no file."""
        if self._comm.rank or "program" in self._said:
            return
        if not is_called_by_script("subprocess", "os"):
            return
        self._said.add("program")
        command = next((each for each in args if each), "?")
        first = command if isinstance(command, str | bytes | os.PathLike) else command[0]
        word = os.fsdecode(first).split()[:1]
        self._context.note(
            f"the script starts other programs, such as {os.path.basename(*word)}: every rank "
            "does, and they write their files for real"
        )


def _is_of_rank(rank: int, path: str, by_rank_0: set[str]) -> bool:
    """True for a path that rank 0 has not changed, with a rank's number where another one that it
    has changed has a 0."""
    return path not in by_rank_0 and any(
        f"{path[: number.start()]}{0:0{len(number[0])}}{path[number.end() :]}" in by_rank_0
        for number in re.finditer(r"\d+", path)
        if int(number[0]) == rank
    )
