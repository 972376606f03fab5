"""The trace of a run (`--trace`): a file of the samples that each rank consumed at each step."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Self, TypedDict, cast

from dlio.comm import Communicator
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.errors import DlioError
from dlio.train.ledger_file import LedgerLine, line_hash, placed
from dlio.util.whole_files import move_file, name_partial, open_partial, remove_file, unwritable


class LedgerPlace(TypedDict):
    """Where a rank is in the file of a run that goes on."""

    written: int
    """Bytes of the epochs that are in it."""
    steps: list[tuple[int, tuple[int, int, int]]]
    """Each step of the epoch so far, with (update, ranks, part); see `LedgerLine`."""


class SampleLedger:
    """Record the samples of each rank and step, one JSON object per line.

    Ranks send their lines to rank 0 at the end of an epoch. The file appears at the end of the run;
    a failed run leaves no file.
    """

    def __init__(
        self,
        path: str,
        comm: Communicator,
        numbers: Sequence[int] | None = None,
        token: str | None = None,
        written: int = 0,
        start: int = 0,
    ) -> None:
        """`numbers` are the ranks' when the job began, by default these. A job that starts again
        has a token, whose launcher removes what a failed run leaves; it has begun again `start`
        times, and has `written` bytes of the epochs before."""
        self._path = path
        self._comm = comm
        self._numbers = range(comm.size) if numbers is None else numbers
        self._me = self._numbers[comm.rank]
        self._is_kept = token is not None
        # No other process goes on with its file, which has no name until it is complete.
        self._is_alone = token is None and recovery_of(comm) is None
        self._start = start
        self._lines: list[LedgerLine] = []
        self._earlier: list[LedgerLine] = []
        self._places: dict[int, tuple[int, int, int]] = {}
        """(update, ranks, part) of the epoch's steps, for lines of lost ranks."""
        self._temporary = comm.tell(f"{path}.{token or secrets.token_hex(8)}.tmp")
        self.written = written
        """Bytes of the epochs that are in the file."""
        self._file: IO[str] | None = None
        if comm.rank == 0:
            self._file = self._open(new=not written)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._file is not None:
            # Errors of a full disk have been raised by the writes.
            with contextlib.suppress(OSError):
                self._file.close()
            bug = isinstance(error, Exception) and not isinstance(error, DlioError)
            survived = bug and recovery_of(self._comm) is not None and self._comm.size > 1
            survived = survived or (self._is_kept and error is not None)
            # Others go on without a rank that has a bug, and with its file.
            if not survived:
                remove_file(self._temporary)

    def step(
        self, epoch: int, step: int, samples: list[int], update: int, ranks: int, part: int = 0
    ) -> None:
        """Record this rank's samples of one step; see `LedgerLine` for the fields."""
        self._places[step] = update, ranks, part
        line = _line(epoch, step, self._me, samples)
        self._lines.append(placed(line, update, ranks, part, self._start))

    def tell_place(self) -> LedgerPlace:
        """Return the state that a rank that joins needs to go on with the file, for JSON."""
        return {"written": self.written, "steps": list(self._places.items())}

    def follow_place(self, place: LedgerPlace) -> None:
        """Go on where another rank is; see `tell_place`."""
        self.written = place["written"]
        self._places = {
            step: (update, ranks, part) for step, (update, ranks, part) in place["steps"]
        }

    def earlier(self, lines: Sequence[LedgerLine]) -> None:
        """Record lines of an earlier start, on all ranks: the first that is left writes them."""
        self._earlier = list(lines)

    def end_epoch(
        self,
        of_lost: Callable[[], Iterable[tuple[int, int, int, list[int]]]] = tuple,
        left_out: int = 0,
    ) -> None:
        """Write the epoch's lines. Collective. Raises TierError or UsageError as `unwritable`.

        `of_lost` returns (epoch, step, rank, samples) of ranks that were lost after these steps.
        The epoch does without the samples `left_out`.
        """

        def write() -> int:
            everyone = self._comm.allgather(self._lines)
            size = 0
            if self._comm.rank == 0:
                rows = [*self._earlier, *(row for lines in everyone for row in lines)]
                places = {
                    row["step"]: (row["update"], row["ranks"], row.get("part", 0)) for row in rows
                }
                places = (
                    self._places | places
                )  # Steps of lost ranks alone are told by `tell_place`.
                for epoch, step, rank, samples in of_lost():
                    line = _line(epoch, step, self._numbers[rank], samples)
                    if step in places:
                        placed(line, *places[step], self._start)
                    rows.append({**line, "lost": True})
                rows.sort(key=lambda row: (row["epoch"], row["step"], row["rank"]))
                size = self._append(_hashed(rows, left_out))
            return self._comm.tell(size)

        self.written = uniform(self._comm, write)
        self._lines, self._earlier, self._places = [], [], {}

    def _open(self, *, new: bool) -> IO[str]:
        """Open the unfinished file. Raises UsageError if that is not possible."""
        try:
            return open_partial(self._temporary, new=new, nameless=new and self._is_alone)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _append(self, rows: Sequence[LedgerLine]) -> int:
        """Write lines after those of the epochs before; returns the size of the file."""
        try:
            if self._file is None:  # The rank that wrote it is lost.
                self._file = self._open(new=False)
            self._file.seek(self.written)
            self._file.truncate()
            self._file.writelines(json.dumps(row) + "\n" for row in rows)
            self._file.flush()
            return self._file.tell()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def finish(self) -> None:
        """Publish the file under its final name. Collective."""

        def publish() -> None:
            try:
                if self._comm.rank == 0 and self._file is not None:
                    name_partial(self._file, self._temporary)
                # If the rank that published it is lost, the next one finds it done.
                if self._comm.rank == 0 and os.path.exists(self._temporary):
                    with self._open(new=False) as file:
                        os.fsync(file.fileno())
                    move_file(self._temporary, self._path)
            except OSError as error:
                raise unwritable(self._path, error) from error
            self._comm.barrier()

        uniform(self._comm, publish)


def _line(epoch: int, step: int, rank: int, samples: list[int]) -> LedgerLine:
    return {"epoch": epoch, "step": step, "rank": rank, "samples": samples}


def _hashed(rows: Sequence[LedgerLine], left_out: int) -> list[LedgerLine]:
    """Return an epoch's lines with their hashes."""
    before, hashed = "", []
    for row in rows:
        line: LedgerLine = {**row, "left_out": left_out} if left_out else row
        before = line_hash(before, line)
        hashed.append(cast(LedgerLine, {**line, "hash": before}))
    return hashed
