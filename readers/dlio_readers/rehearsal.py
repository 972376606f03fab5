"""Rehearsals: HDF5, Parquet and Arrow files are first read by a process that may die of them.

The libraries of these formats abort the process, or compute for ever, for some damaged files. So
files that are new to this user's cache are opened and read by a child process first. If it dies, or
computes for long without reading or writing a byte, the file is refused. Else nothing more is done
until the files change: the child's index is in the cache, and is not built twice.

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

from dlio.data.index import Arrays, cached_index
from dlio.data.source import File
from dlio.errors import DlioError, SourceError
from dlio.util.child_processes import end_with_parent, module_command
from dlio.util.limits import is_trusted
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
_PASSED, _REFUSED = 0, 3
"""Exit codes of a child that has read the files, and of one that has found an ordinary error."""
_REMEDY: Final = "it is damaged, or was made to do so; restore it"
_READERS: Final = {
    "arrow": "dlio_readers.arrow:ArrowReader",
    "hdf5": "dlio_readers.hdf5:Hdf5Reader",
    "parquet": "dlio_readers.parquet:ParquetReader",
}
_LIBRARIES: Final = {"arrow": "pyarrow", "hdf5": "h5py", "parquet": "pyarrow.parquet"}
_SLICE: Final = "slice"
_told: list[int] = []
"""In a child, the descriptor to which it writes the names of files."""


class OrdinaryRefusal(Exception):
    """A child has found an error that reading the files raises: they have not passed."""


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
    that will read. An ordinary error of the child is left for this process to find: the files are
    then rehearsed again when they are opened next.

    Raises SourceError if the child dies or gets stuck.
    """
    if REHEARSAL in os.environ or is_trusted():
        return
    from importlib.metadata import version

    named = f"{library} {version(library)}"

    def run() -> Arrays:
        import_module(_LIBRARIES[kind])  # Here, and not once in a copy and once more after it.
        if not (_may_copy() and _copy_passes(kind, path, files, options or {})):
            _run(kind, named, path, files, options or {})
        return {"read": np.ones(1, np.uint8)}

    with contextlib.suppress(OrdinaryRefusal):
        cached_index(f"rehearsed-{named.replace(' ', '-')}", _VERSION, files, run)


def note_opening(name: str) -> None:
    """Tell the parent of a rehearsal which file is opened next; does nothing in other processes."""
    for descriptor in _told:
        os.write(descriptor, (json.dumps(name) + "\n").encode())


def _run(
    kind: str,
    library: str,
    path: str | Sequence[str],
    files: Sequence[File],
    options: Mapping[str, object],
) -> None:
    """Have a new process read the files."""
    given = [[path] if isinstance(path, str) else list(path), options]
    command = module_command("dlio_readers.rehearsal", kind, str(os.getpid()))
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, REHEARSAL: "1"},
        ) as child,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as into:
            into.write(json.dumps(given, default=_plain_part).encode())
        os.set_blocking(child.stdout.fileno(), False)
        name, stuck = _watched(child, files, _SILENT_S)
    if stuck:
        raise SourceError(f"{name}: {library} does not come to an end with it: {_REMEDY}")
    if child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
        raise SourceError(f"{name}: {library} ends the process that reads it ({ended}): {_REMEDY}")
    if child.returncode == _REFUSED:
        raise OrdinaryRefusal
    if child.returncode:
        warnings.warn(
            f"{name} is read without the trial of its contents in another process, which could not "
            f"be started: `{' '.join(command[:4])}` fails; check that dlio is installed",
            RuntimeWarning,
            stacklevel=2,
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

    def __init__(self, kind: str, path: str | Sequence[str], options: Mapping[str, object]) -> None:
        self.returncode: int | None = None
        read, write = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python counts idle threads of libraries, too, which the copy does not need.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            code = 1
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
                code = _read_in_child(kind, parent, path, options)
            finally:
                os._exit(code)
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
    kind: str, path: str | Sequence[str], files: Sequence[File], options: Mapping[str, object]
) -> bool:
    """Have a copy of this process read the files; True if it has."""
    with contextlib.closing(ProcessCopy(kind, path, options)) as child:
        _, stuck = _watched(child, files, _COPY_SILENT_S)
        if child.returncode == _REFUSED:
            raise OrdinaryRefusal
        return not stuck and child.returncode == _PASSED


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


def _watched(child: WatchedProcess, files: Sequence[File], silent_s: float) -> tuple[str, bool]:
    """Wait for a child's end; return the file that it opened last, and True if it got stuck."""
    text, name = b"", files[0].name
    most = _CPU_S + _CPU_S_A_BYTE * sum(file.size for file in files)
    done, began, since = _progress(child.pid), 0.0, time.monotonic()
    first = done[1] if done is not None else 0.0
    pause = 0.002
    while True:
        ended = child.poll() is not None
        while more := child.stdout.read(1 << 16):
            text += more
        last = text[: text.rfind(b"\n") + 1].rstrip(b"\n").rpartition(b"\n")[2]
        text = text[text.rfind(b"\n") + 1 :] if last else text
        name = str(json.loads(last)) if last else name
        if ended:
            return name, False
        now = _progress(child.pid)
        if now is not None and (done is None or now[0] != done[0]):
            done, began, since = now, now[1], time.monotonic()
        used = now[1] - began if now is not None else 0.0
        whole = now[1] - first if now is not None else 0.0
        if used > _STUCK_CPU_S or whole > most or time.monotonic() - since > silent_s:
            return name, True
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
    kind: str, parent: int, path: str | Sequence[str], options: Mapping[str, object]
) -> int:
    """Open and read files; return the exit code."""
    end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader_class = resolve_name(_READERS[kind])
    try:
        reader = reader_class(path, **options)
        count = len(reader)
        for sample in sorted({0, count // 2, count - 1}):
            reader.read(np.array([sample], np.int64))
    except (DlioError, MemoryError):
        return _REFUSED  # For the parent to find again, and to report.
    return _PASSED


def main() -> None:
    """Open and read the files that standard input names, as the child of `rehearse`."""
    path, options = json.load(sys.stdin, object_hook=_part_of)
    _told[:] = [sys.stdout.fileno()]
    code = _read_in_child(
        sys.argv[1], int(sys.argv[2]), path if len(path) > 1 else path[0], options
    )
    os._exit(code)  # What a library does at its end does not matter.


if __name__ == "__main__":
    main()
