"""How far each rank has come, in memory that other ranks of its machine read without its help."""

import os
from contextlib import suppress
from typing import Final

from dlio.comm import Communicator

_BYTES: Final = 160


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

    def write(self, text: str) -> None:
        """Say how far this rank has come."""
        os.pwrite(self._file, text.encode(errors="replace")[:_BYTES].ljust(_BYTES), 0)

    def read(self) -> dict[int, str]:
        """Return the rows of ranks of this machine, by rank; nothing after a loss, which gives
        ranks other numbers."""
        said: dict[int, str] = {}
        if self._comm.size != len(self._rows):
            return said
        for rank, (name, process, file) in enumerate(self._rows):
            path = f"/proc/{process}/fd/{file}"
            with suppress(OSError):
                if f"/memfd:{name} " in os.readlink(path):
                    row = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    said[rank] = os.pread(row, _BYTES, 0).decode(errors="replace").rstrip()
                    os.close(row)
        return said

    def close(self) -> None:
        """Forget this rank's row."""
        os.close(self._file)
