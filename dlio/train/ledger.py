"""The trace of a run: who consumed which samples, for anyone to check."""

import contextlib
import json
import os
from typing import Any, Self

from dlio.comm import Communicator
from dlio.util.files import unwritable


class SampleLedger:
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
                raise unwritable(self._path, error) from error

    def finish(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                os.replace(self._temporary, self._path)
            except OSError as error:
                raise unwritable(self._path, error) from error
