"""Standard output and error of ranks other than 0, which write what rank 0 writes, too."""

import io
import sys
from typing import TextIO

from typing_extensions import Buffer

from dlio.comm import Communicator


def muted(output: TextIO, comm: Communicator, but_errors: bool = False) -> TextIO:
    """Return a stream that discards all that this rank writes, until it is the lowest rank that is
    left. With `but_errors` it passes on what is written while an exception is handled."""
    stream = _MutedStream(output, comm, but_errors)
    return io.TextIOWrapper(stream, output.encoding, output.errors, write_through=True)


class _MutedStream(io.BufferedIOBase):
    def __init__(self, output: TextIO, comm: Communicator, but_errors: bool) -> None:
        self._output, self._comm, self._but_errors = output, comm, but_errors

    def write(self, data: Buffer) -> int:
        text = bytes(data)
        if self._comm.rank == 0 or (self._but_errors and sys.exc_info()[0] is not None):
            self._output.write(text.decode(self._output.encoding, "replace"))
        return len(text)

    def flush(self) -> None:
        self._output.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._output.fileno()

    def isatty(self) -> bool:
        return self._output.isatty()
