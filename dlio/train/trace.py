"""Files that a run writes: whole, or not at all."""

import contextlib
import json
import os
from collections.abc import Callable
from typing import IO, Any, Self

from dlio.comm import Communicator
from dlio.errors import UsageError


def check_writable(option: str, path: str) -> None:
    """Find out before the run that its result can be written. Raises UsageError."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: is a folder; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}; create it")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: {folder} cannot be written")


def write_whole(path: str, write: Callable[[IO[bytes]], object]) -> None:
    """Have `write` fill a file that appears under its name when it is complete."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


class Trace:
    """Which samples each rank consumed at each step, a JSON object a line.

    Ranks hand their lines to rank 0 at the end of an epoch. The file appears at the end of the
    run; a run that fails leaves none.
    """

    def __init__(self, path: str, comm: Communicator) -> None:
        self._path = path
        self._comm = comm
        self._lines: list[dict[str, Any]] = []
        self._temporary = f"{path}.{os.getpid()}.tmp"
        self._file = open(self._temporary, "w") if comm.rank == 0 else None  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # What a full disk did not take is reported where it was written, not here.
            with contextlib.suppress(OSError):
                self._file.close()
            if os.path.exists(self._temporary):
                os.unlink(self._temporary)

    def step(self, epoch: int, step: int, samples: list[int]) -> None:
        rank = self._comm.rank
        self._lines.append({"epoch": epoch, "step": step, "rank": rank, "samples": samples})

    def end_epoch(self) -> None:
        """Collective."""
        everyone = self._comm.allgather(self._lines)
        self._lines = []
        if self._file is not None:
            rows = [row for lines in everyone for row in lines]
            rows.sort(key=lambda row: (row["epoch"], row["step"], row["rank"]))
            try:
                self._file.writelines(json.dumps(row) + "\n" for row in rows)
                self._file.flush()
            except OSError as error:
                raise _unwritable(self._path, error) from error

    def finish(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                os.replace(self._temporary, self._path)
            except OSError as error:
                raise _unwritable(self._path, error) from error


def _unwritable(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be written: {error.strerror}; free some space there, or name another file"
    )
