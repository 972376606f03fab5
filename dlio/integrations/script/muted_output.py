"""Standard output of ranks other than 0, which write what rank 0 writes, too."""

import io
from typing import TextIO

from typing_extensions import Buffer

from dlio.comm import Communicator


def muted(output: TextIO, comm: Communicator) -> TextIO:
    """Return a stream that discards all that this rank writes, until it is the lowest rank that is
    left."""
    stream = _MutedStream(output, comm)
    return io.TextIOWrapper(stream, output.encoding, output.errors, write_through=True)


class _MutedStream(io.BufferedIOBase):
    def __init__(self, output: TextIO, comm: Communicator) -> None:
        self._output, self._comm = output, comm

    def write(self, data: Buffer) -> int:
        text = bytes(data)
        if self._comm.rank == 0:
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
