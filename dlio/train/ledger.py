"""The trace of a run (`--trace`): a file of the samples that each rank consumed at each step."""

import contextlib
import json
import os
from typing import Self, TypedDict

from dlio.comm import Communicator
from dlio.util.files import unwritable

__all__ = ["SampleLedger"]


class _Line(TypedDict):
    """One line of the file."""

    epoch: int
    step: int
    rank: int
    samples: list[int]


class SampleLedger:
    """Record the samples of each rank and step, one JSON object per line.

    Ranks send their lines to rank 0 at the end of an epoch. The file appears at the end of the run;
    a failed run leaves no file.
    """

    def __init__(self, path: str, comm: Communicator) -> None:
        self._path = path
        self._comm = comm
        self._lines: list[_Line] = []
        self._temporary = f"{path}.{os.getpid()}.tmp"
        self._file = open(self._temporary, "w") if comm.rank == 0 else None  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # Errors of a full disk have been raised by the writes.
            with contextlib.suppress(OSError):
                self._file.close()
            if os.path.exists(self._temporary):
                os.unlink(self._temporary)

    def step(self, epoch: int, step: int, samples: list[int]) -> None:
        """Record this rank's samples of one step."""
        rank = self._comm.rank
        self._lines.append({"epoch": epoch, "step": step, "rank": rank, "samples": samples})

    def end_epoch(self) -> None:
        """Write the epoch's lines. Collective. Raises TierError or UsageError as `unwritable`."""
        everyone = self._comm.allgather(self._lines)
        self._lines = []
        if self._file is not None:
            rows = [row for lines in everyone for row in lines]
            rows.sort(key=lambda row: (row["epoch"], row["step"], row["rank"]))
            try:
                self._file.writelines(json.dumps(row) + "\n" for row in rows)
                self._file.flush()
            except OSError as error:
                raise unwritable(self._path, error) from error

    def finish(self) -> None:
        """Publish the file under its final name."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                os.replace(self._temporary, self._path)
            except OSError as error:
                raise unwritable(self._path, error) from error
