"""A copy of each rank's output in a file of its own: `rank-0.log`, `rank-1.log`, ...

    python -m dlio.launch.rank_log FOLDER PROGRAM ARGUMENTS...

This process becomes the program, so that its number, signals and end are the program's. A process
of its own copies both streams, and ends when the program and its children have closed them.
"""

import os
import selectors
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from dlio.errors import UsageError
from dlio.util.child_processes import module_command
from dlio.util.live_line import without_progress
from dlio.util.settings import settings
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import PUBLIC_FILE, not_written, open_own, unwritable

LOGS: Final = "DLIO_LOGS"
_RANKS: Final = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK"),
    *("JSM_NAMESPACE_RANK", "RANK", "SLURM_PROCID"),
)
"""Variables with a rank's number; mpirun's before those of a job that it is in."""
_CHUNK: Final = 1 << 16


def logged(argv: Sequence[str]) -> list[str]:
    """Return the command of a rank that also writes its log, if there is to be one."""
    folder = settings().logs
    return list(argv) if folder is None else module_command("dlio.launch.rank_log", folder, *argv)


def rank_number(environment: Mapping[str, str]) -> str:
    """Return this rank's number; `0` of a process that nobody has started as one of several."""
    return next((environment[name] for name in _RANKS if name in environment), "0")


def main(folder: str, argv: Sequence[str]) -> NoReturn:
    """Become a program whose output is copied."""
    path = os.path.join(folder, f"rank-{rank_number(os.environ)}.log")
    try:
        os.close(make_folders(folder))
        log = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PUBLIC_FILE)
    except OSError as error:
        raise unwritable(f"--logs {folder}", error) from error
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        # A child of a child: the program may wait for any child of its own.
        if os.fork():
            os._exit(0)
        for _, end in pipes:
            os.close(end)
        _copy({pipes[0][0]: 1, pipes[1][0]: 2}, log, path)
        os._exit(0)
    os.waitpid(child, 0)
    for number, (_, end) in enumerate(pipes):
        os.dup2(end, number + 1)
    for descriptor in (log, *(each for pair in pipes for each in pair)):
        os.close(descriptor)
    # Python would keep lines for a pipe until there are many, and lose them in a crash.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's command
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error


def _copy(streams: Mapping[int, int], log: int, path: str) -> None:
    """Copy streams to this process's own, and to a log by whole lines, until all have ended.

    A log that cannot be written is told once, and lacks lines until it can be written again.
    """
    is_told = False
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The program may still speak.
    rests = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _CHUNK)
                _write(streams[key.fd], data)
                lines = (rests[key.fd] + data).splitlines(keepends=True)
                rests[key.fd] = b""
                if not data:
                    selector.unregister(key.fd)
                elif not lines[-1].endswith(b"\n"):
                    rests[key.fd] = lines.pop()
                error = _write(log, b"".join(map(without_progress, lines)))
                if error is not None and not is_told:
                    is_told = True
                    said = f"dlio: --logs: {not_written(path, error)}; it lacks lines\n"
                    _write(sys.stderr.fileno(), said.encode())


def _write(descriptor: int, data: bytes) -> OSError | None:
    """Write all of some data; returns the error if that is not possible."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            return error
    return None


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except UsageError as problem:
        sys.stderr.write(f"dlio: error: {problem}\n")
        sys.exit(2)
