"""Rehearsals: HDF5, Parquet and Arrow files are first read by a process that may die of them.

The libraries of these formats abort the process, or compute for ever, for some damaged files. So
files that are new to this user's cache are opened and read by a child process first. If it dies, or
computes for long without reading or writing a byte, the file is refused. Else nothing more is done
until the files change: the child's index is in the cache, and is not built twice.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Final

import numpy as np

from dlio.data.index import Arrays, cached_index
from dlio.data.source import File
from dlio.errors import DlioError, SourceError
from dlio.util.child_processes import end_with_parent, module_command
from dlio.util.settings import REHEARSAL

_VERSION: Final = 1
_STUCK_CPU_S: Final = 8.0
"""Processor time without a byte read or written after which a library counts as stuck."""
_SILENT_S: Final = 600.0
"""Time without a byte or any work after which a file counts as unreadable."""
_POLL_S: Final = 0.02
_REMEDY: Final = "it is damaged, or was made to do so; restore it"
_READERS: Final = {
    "arrow": "dlio_readers.arrow:ArrowReader",
    "hdf5": "dlio_readers.hdf5:Hdf5Reader",
    "parquet": "dlio_readers.parquet:ParquetReader",
}


def rehearse(kind: str, library: str, path: str | Sequence[str], files: Sequence[File]) -> None:
    """Have a child process read files that this user's cache does not know, before this one does.

    `path` is as the reader of the format `kind` takes it; `library` is the package that will read.

    Raises SourceError if the child dies or gets stuck.
    """
    if REHEARSAL in os.environ:
        return

    named = f"{library} {version(library)}"

    def run() -> Arrays:
        _run(kind, named, path, files)
        return {"read": np.ones(1, np.uint8)}

    cached_index(f"rehearsed-{named.replace(' ', '-')}", _VERSION, files, run)


def note_opening(name: str) -> None:
    """Tell the parent of a rehearsal which file is opened next; does nothing in other processes."""
    if REHEARSAL in os.environ:
        print(json.dumps(name), flush=True)


def _run(kind: str, library: str, path: str | Sequence[str], files: Sequence[File]) -> None:
    given = [path] if isinstance(path, str) else list(path)
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
            into.write(json.dumps(given).encode())
        os.set_blocking(child.stdout.fileno(), False)
        name, stuck = _watched(child, files[0].name)
    if stuck:
        raise SourceError(f"{name}: {library} does not come to an end with it: {_REMEDY}")
    if child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
        raise SourceError(f"{name}: {library} ends the process that reads it ({ended}): {_REMEDY}")
    if child.returncode:
        warnings.warn(
            f"{name} is read without the trial of its contents in another process, which could not "
            f"be started: `{' '.join(command[:4])}` fails; check that dlio is installed",
            RuntimeWarning,
            stacklevel=2,
        )


def _watched(child: "subprocess.Popen[bytes]", name: str) -> tuple[str, bool]:
    """Wait for a child's end; return the file that it opened last, and True if it got stuck."""
    assert child.stdout is not None
    text = b""
    done, began, since = _progress(child.pid), 0.0, time.monotonic()
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
        if used > _STUCK_CPU_S or time.monotonic() - since > _SILENT_S:
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


def main() -> None:
    """Open and read the files that standard input names, as the child of `rehearse`."""
    end_with_parent(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = json.load(sys.stdin)
    reader_class = resolve_name(_READERS[sys.argv[1]])
    # Errors are for the parent to find again, and to report.
    with contextlib.suppress(DlioError, MemoryError):
        reader = reader_class(path if len(path) > 1 else path[0])
        count = len(reader)
        for sample in sorted({0, count // 2, count - 1}):
            reader.read(np.array([sample], np.int64))
    sys.stdout.flush()
    os._exit(0)  # What a library does at its end does not matter.


if __name__ == "__main__":
    main()
