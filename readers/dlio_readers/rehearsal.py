"""Rehearsals: HDF5, Parquet and Arrow files are first read by a process that may die of them.

The libraries of these formats abort the process, or compute for ever, for some damaged files. So
files that are new to this user's cache are opened and read by a child process first. If it dies, or
computes for long without reading or writing a byte, the file is refused. So it is if the child ends
in any way without its word that it has read the files: an error that it has found is raised here,
and the files are not opened again. Files have passed by that word alone. Then nothing more is done
until they, the parts that are read, the library or dlio change: the child's index is in the cache,
and is not built twice.

If no child can be started, or a new process cannot see files that are not local, this is said each
time, and the files are read without it.

A child that is a copy of this process begins at once, where a new process of Python imports for
half a second. Only a process of one thread is copied, and neither under MPI nor with CUDA, whose
memory must not be shared; the copy first lets go of all memory that others can see. What a copy
finds is believed if the file has passed. If not, a new process has the last word: a copy may also
wait for a lock that nobody will release.

Files of data sets that the user trusts are not rehearsed.
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import operator
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Final, Protocol

import numpy as np

import dlio
from dlio.data.index import Arrays, cached_index, fingerprint_of
from dlio.data.links import links_followed, opened_by_user, path_of_user
from dlio.data.source import File
from dlio.errors import CorruptBlock, DecodeError, DlioError, SourceError, UsageError
from dlio.util.child_processes import end_with_parent, module_command
from dlio.util.input_files import json_value
from dlio.util.limits import is_trusted
from dlio.util.printable import warn_user
from dlio.util.settings import REHEARSAL, settings

_VERSION: Final = 2
_STUCK_CPU_S: Final = 8.0
"""Processor time without a byte read or written after which a library counts as stuck."""
_CPU_S: Final = 20.0
_CPU_S_A_BYTE: Final = 4e-6
"""Processor time in all, and for each byte of the files, after which a library counts as stuck
although it reads: sound files take a hundredth of it."""
_SILENT_S: Final = 600.0
"""Time without a byte or any work after which a file counts as unreadable."""
_COPY_SILENT_S: Final = 5.0
"""The same of a copy of this process, which may wait for a lock: a new process tries again."""
_POLL_S: Final = 0.02
_BEGUN, _PASSED, _REFUSED = "begun", "passed", "refused"
"""Words of a child: nothing is opened before the first; it has read the files; it has found an
error, whose type and text follow."""
_LONGEST_LINE: Final = 1 << 16
_LONGEST_TEXT: Final = 8192
_ERRORS: Final = {each.__name__: each for each in (UsageError, DecodeError, CorruptBlock)}
_REMEDY: Final = "it is damaged, or was made to do so; restore it"
_READERS: Final = {
    "arrow": "dlio_readers.arrow:ArrowReader",
    "files": "dlio_readers.files:FilesReader",
    "hdf5": "dlio_readers.hdf5:Hdf5Reader",
    "parquet": "dlio_readers.parquet:ParquetReader",
}
_LIBRARIES: Final = {
    "arrow": "pyarrow",
    "files": "h5py",
    "hdf5": "h5py",
    "parquet": "pyarrow.parquet",
}
_SLICE: Final = "slice"
_told: list[int] = []
"""In a child, the descriptor to which it writes the names of files."""


class NoRehearsal(Exception):
    """The files could not be tried, for a reason that is in the text: they have not passed."""


class ChildWords:
    """The words of a child, one value of JSON in a line, and names of files.

    A word is a list of the child's own `token`, which nothing that a library prints has, and texts.
    """

    def __init__(self, name: str, token: str) -> None:
        self.name = name
        """File that was opened last."""
        self.words: dict[str, list[str]] = {}
        """Texts that follow each word that was said."""
        self._token, self._left = token, b""

    def hear(self, data: bytes) -> None:
        """Take bytes that the child has written."""
        *lines, left = (self._left + data).split(b"\n")
        self._left = left[: _LONGEST_LINE + 1]
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                said = json_value(line) if len(line) <= _LONGEST_LINE else None
                if isinstance(said, str):
                    self.name = said
                elif isinstance(said, list) and said[:1] == [self._token]:
                    word, *texts = map(str, said[1:])
                    self.words[word] = texts


class WatchedProcess(Protocol):
    """A child that reads files: a `subprocess.Popen`, or a copy of this process."""

    pid: int
    stdout: Any
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, less than 0 for a signal; None while it runs."""


def rehearse(
    kind: str,
    library: str,
    path: str | Sequence[str],
    files: Sequence[File],
    options: Mapping[str, object] | None = None,
) -> None:
    """Have a child process read files that this user's cache does not know, before this one does.

    `path` and `options` are as the reader of the format `kind` takes them; `library` is the package
    that will read.

    Raises SourceError if the child dies, gets stuck, or does not say that it has read the files;
    the errors that it finds.
    """
    if REHEARSAL in os.environ or is_trusted():
        return
    from importlib.metadata import version

    named = f"{library} {version(library)}"

    paths = [path] if isinstance(path, str) else list(path)
    given: str = json.dumps([paths, options or {}], default=_plain_part)

    def run() -> Arrays:
        import_module(_LIBRARIES[kind])  # Here, and not once in a copy and once more after it.
        if not (_may_copy() and _copy_passes(kind, named, path, files, options or {})):
            _run(kind, named, given, files)
        return {"read": np.ones(1, np.uint8)}

    # These parts of these files pass, with this library, by this dlio.
    digest = fingerprint_of("rehearsal", _VERSION, kind, str(dlio.__version__), given)
    try:
        cached_index(f"rehearsed-{named.replace(' ', '-')}-{digest[:16]}", _VERSION, files, run)
    except NoRehearsal as error:
        warn_user(
            f"{files[0].name} is read without the trial of its contents in another process, which "
            f"{error}",
            RuntimeWarning,
        )


def note_opening(name: str) -> None:
    """Tell the parent of a rehearsal which file is opened next; does nothing in other processes."""
    for descriptor in _told:
        os.write(descriptor, (json.dumps(name) + "\n").encode())


def _say(*words: str) -> None:
    for descriptor in _told:
        os.write(descriptor, (json.dumps(words) + "\n").encode())


def _run(kind: str, library: str, given: str, files: Sequence[File]) -> None:
    """Have a new process read the files. Raises NoRehearsal if it cannot."""
    command = module_command("dlio_readers.rehearsal", kind, str(os.getpid()))
    token = secrets.token_hex(16)
    more = {REHEARSAL: "1", "DLIO_FOLLOW_LINKS": str(int(links_followed()))}
    try:
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **more},
        )
    except OSError as error:
        raise NoRehearsal(f"could not be started: {error.strerror}") from error
    with started as child, contextlib.ExitStack() as undo:
        undo.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as into:
            into.write(json.dumps([token, given, path_of_user()]).encode())
        os.set_blocking(child.stdout.fileno(), False)
        heard = ChildWords(files[0].name, token)
        stuck = _watched(child, heard, files, _SILENT_S)
    if _BEGUN not in heard.words and not stuck and child.returncode > 0:
        raise NoRehearsal(
            f"could not be started: `{' '.join(command[:4])}` fails; check that dlio is installed"
        )
    if _REFUSED in heard.words and any(file.local_path is None for file in files):
        # A new process may not know their file system, or have no key to it.
        raise NoRehearsal(f"could not read it: {heard.words[_REFUSED][-1]}")
    _judge(child, heard, stuck, library)


def _judge(child: WatchedProcess, heard: ChildWords, stuck: bool, library: str) -> None:
    """Raise the error of a child that has ended, unless it has said that the files have passed."""
    if stuck:
        raise SourceError(f"{heard.name}: {library} does not come to an end with it: {_REMEDY}")
    code = child.returncode or 0
    if code == 0 and _REFUSED in heard.words:
        kind, text = heard.words[_REFUSED]
        raise _ERRORS.get(kind, SourceError)(text)
    if code or _PASSED not in heard.words:
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise SourceError(
            f"{heard.name}: {library} ends the process that reads it ({ended}): {_REMEDY}"
        )


def _plain_part(part: Any) -> object:
    """Return a part of `select=`, a slice or an ellipsis, as JSON has it."""
    if isinstance(part, slice):
        return {_SLICE: [part.start, part.stop, part.step]}
    return {_SLICE: []} if part is Ellipsis else operator.index(part)


def _part_of(row: dict[str, Any]) -> object:
    if row.keys() != {_SLICE}:
        return row
    return slice(*row[_SLICE]) if row[_SLICE] else Ellipsis


# Copies of this process


class ProcessCopy:
    """A copy of this process that reads files, and ends."""

    def __init__(
        self, kind: str, path: str | Sequence[str], options: Mapping[str, object], token: str
    ) -> None:
        self.returncode: int | None = None
        read, write = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python counts idle threads of libraries, too, which the copy does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                os.environ[REHEARSAL] = "1"
                faulthandler.disable()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV):
                    signal.signal(number, signal.SIG_DFL)
                silent = os.open(os.devnull, os.O_RDWR)
                for standard in (0, 1, 2):
                    os.dup2(silent, standard)
                _let_go_of_shared_memory()
                _told[:] = [write]
                _read_in_child(kind, parent, path, options, token)
            finally:
                os._exit(0)
        os.close(write)
        os.set_blocking(read, False)
        self.stdout = io.FileIO(read)

    def poll(self) -> int | None:
        """Return the exit code, less than 0 for a signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def close(self) -> None:
        """End the copy if it runs, and wait for it."""
        self.stdout.close()
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _may_copy() -> bool:
    """True if a copy of this process can do without the rest of it."""
    if threading.active_count() > 1 or settings().no_fork or "mpi4py.MPI" in sys.modules:
        return False
    cuda = sys.modules.get("torch.cuda")
    return cuda is None or not cuda.is_initialized()


def _copy_passes(
    kind: str,
    library: str,
    path: str | Sequence[str],
    files: Sequence[File],
    options: Mapping[str, object],
) -> bool:
    """Have a copy of this process read the files; True if it has. Raises its error."""
    token = secrets.token_hex(16)
    heard = ChildWords(files[0].name, token)
    try:
        copy = ProcessCopy(kind, path, options, token)
    except OSError:
        return False
    with contextlib.closing(copy) as child:
        stuck = _watched(child, heard, files, _COPY_SILENT_S)
        if stuck or child.returncode or not heard.words.keys() & {_PASSED, _REFUSED}:
            return False
        _judge(child, heard, stuck, library)
        return True


def _let_go_of_shared_memory() -> None:
    """Unmap the memory that this process could change for others."""
    unmap = ctypes.CDLL(None).munmap
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as table:
        rows = [line.split(maxsplit=2)[:2] for line in table]
    for span, rights in rows:
        if rights[1] == "w" and rights[3] == "s":
            first, last = (int(end, 16) for end in span.split("-"))
            unmap(ctypes.c_void_p(first), ctypes.c_size_t(last - first))


# Children


def _watched(
    child: WatchedProcess, heard: ChildWords, files: Sequence[File], silent_s: float
) -> bool:
    """Wait for the end of a child, and hear its words; True if it got stuck."""
    most = _CPU_S + _CPU_S_A_BYTE * sum(file.size for file in files)
    done, began, since = _progress(child.pid), 0.0, time.monotonic()
    first = done[1] if done is not None else 0.0
    pause = 0.002
    while True:
        ended = child.poll() is not None
        while more := child.stdout.read(1 << 16):
            heard.hear(more)
        if ended:
            return False
        now = _progress(child.pid)
        if now is not None and (done is None or now[0] != done[0]):
            done, began, since = now, now[1], time.monotonic()
        used = now[1] - began if now is not None else 0.0
        whole = now[1] - first if now is not None else 0.0
        if used > _STUCK_CPU_S or whole > most or time.monotonic() - since > silent_s:
            return True
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S)


def _progress(process: int) -> tuple[int, float] | None:
    """Return (bytes read and written, seconds of processor time); None where it is not known."""
    try:
        with open(f"/proc/{process}/io", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return int(rows["rchar"]) + int(rows["wchar"]), ticks / os.sysconf("SC_CLK_TCK")


def _read_in_child(
    kind: str, parent: int, path: str | Sequence[str], options: Mapping[str, object], token: str
) -> None:
    """Open and read files, and say how that went."""
    end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader_class = resolve_name(_READERS[kind])
    _say(token, _BEGUN)
    try:
        reader = reader_class(path, **options)
        count = len(reader)
        for sample in sorted({0, count // 2, count - 1}):
            reader.read(np.array([sample], np.int64))
    except DlioError as error:
        _say(token, _REFUSED, type(error).__name__, str(error)[:_LONGEST_TEXT])
    except Exception as error:
        shown = path if isinstance(path, str) else path[0]
        reason = str(error)[:500] or type(error).__name__
        text = f"{shown} cannot be read: {reason}; check it with the program that wrote it"
        _say(token, _REFUSED, "", text)
    else:
        _say(token, _PASSED)


def main() -> None:
    """Open and read the files that standard input names, as the child of `rehearse`."""
    token, given, named = json.loads(sys.stdin.read())
    paths, options = json.loads(given, object_hook=_part_of)
    # Libraries print to standard output, which is the parent's ear.
    _told[:] = [os.dup(sys.stdout.fileno())]
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    path = paths if len(paths) > 1 else paths[0]
    with opened_by_user(named):
        _read_in_child(sys.argv[1], int(sys.argv[2]), path, options, token)
    os._exit(0)  # The end of a library does not matter.


if __name__ == "__main__":
    main()
