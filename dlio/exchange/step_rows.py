"""How far each rank has come, in memory that other ranks of its machine read without its help."""

import os
import struct
from contextlib import suppress
from typing import Final

from dlio.comm import Communicator

_BYTES: Final = 160
_END: Final = struct.Struct("q")
"""After the text: averages of gradients that a rank has begun before its end, and one more."""
_WHY_BYTES: Final = 320
"""After that: the exception that has ended it."""


_ended: list[int] = []
"""Files of rows that others may still read."""


class StepRows:
    """The row of this rank, and a view of those of the others on its machine. Collective.

    Memory without a path goes with the process: a rank that waits for its end still has its row.
    """

    def __init__(self, comm: Communicator) -> None:
        # By a name of its own a rank of another machine is not taken for a process of this one.
        name = f"dlio-steps-{os.urandom(8).hex()}"
        self._comm = comm
        self._file = os.memfd_create(name)
        self._rows: list[tuple[str, int, int]] = comm.allgather((name, os.getpid(), self._file))
        while _ended:  # All ranks have come further.
            os.close(_ended.pop())

    def write(self, text: str) -> None:
        """Say how far this rank has come."""
        os.pwrite(self._file, text.encode(errors="replace")[:_BYTES].ljust(_BYTES), 0)

    def end(self, averages: int, why: str = "") -> None:
        """Say that this rank takes part no more. The row stays until the next exchanges begin."""
        text = why.encode(errors="replace")[:_WHY_BYTES]
        os.pwrite(self._file, _END.pack(averages + 1) + text, _BYTES)

    def read(self) -> dict[int, str]:
        """Return the texts of ranks of this machine, by rank."""
        return {
            rank: row[:_BYTES].decode(errors="replace").rstrip()
            for rank, row in self._all().items()
        }

    def ends(self) -> dict[int, tuple[int, str]]:
        """Return the averages of ranks of this machine that have ended, by rank, and why; empty for
        those that no exception has ended."""
        rows = ((rank, row[_BYTES:]) for rank, row in self._all().items())
        return {
            rank: (_END.unpack_from(end)[0] - 1, end[_END.size :].decode(errors="replace"))
            for rank, end in rows
            if len(end) >= _END.size
        }

    def _all(self) -> dict[int, bytes]:
        """Return rows; nothing after a loss, which gives ranks other numbers."""
        said: dict[int, bytes] = {}
        if self._comm.size != len(self._rows):
            return said
        for rank, (name, process, file) in enumerate(self._rows):
            path = f"/proc/{process}/fd/{file}"
            with suppress(OSError):
                if f"/memfd:{name} " in os.readlink(path):
                    row = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    said[rank] = os.pread(row, _BYTES + _END.size + _WHY_BYTES, 0)
                    os.close(row)
        return said

    def close(self) -> None:
        """Forget this rank's row once all ranks begin others."""
        _ended.append(self._file)
