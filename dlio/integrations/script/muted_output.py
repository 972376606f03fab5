"""Standard output of ranks other than 0, which write the same as rank 0."""

import io
from typing import TextIO

from typing_extensions import Buffer

from dlio.comm import Communicator


class _MutedBytes(io.RawIOBase):
    """The bytes below a text stream, which looks like `output` to those who ask."""

    def __init__(self, output: TextIO, comm: Communicator) -> None:
        self._output, self._comm = output, comm
        self.last = b""

    def write(self, data: Buffer) -> int:
        text = bytes(data)
        self.last = next((line for line in reversed(text.splitlines()) if line.strip()), self.last)
        if self.is_shown():
            self._output.write(text.decode(self._output.encoding, "replace"))
            self._output.flush()
        return len(text)

    def is_shown(self) -> bool:
        return self._comm.rank == 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._output.fileno()

    def isatty(self) -> bool:
        return self._output.isatty()


def muted(output: TextIO, comm: Communicator) -> TextIO:
    """Return a stream that discards all that this rank writes, until it is the lowest rank that is
    left."""
    buffer = io.BufferedWriter(_MutedBytes(output, comm))
    return io.TextIOWrapper(buffer, output.encoding, output.errors, line_buffering=True)


def last_muted(output: TextIO) -> str:
    """Return the last line that this rank has written to a stream of `muted`, and that nobody has
    seen; empty if there is none."""
    raw = getattr(getattr(output, "buffer", None), "raw", None)
    if not isinstance(raw, _MutedBytes) or raw.is_shown():
        return ""
    output.flush()
    return raw.last.decode("utf-8", "replace").strip()
