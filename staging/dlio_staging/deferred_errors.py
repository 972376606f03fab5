"""A file whose errors are kept for later, for libraries that do not survive them.

HDF5 crashes (SIGSEGV) when a file cannot be written while it is being closed, as on a full disk.
"""

import os
from typing import Final

from dlio.util.whole_files import open_own

_SET, _FROM_HERE = 0, 1
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class UnfailingFile:
    """A new binary file, which takes everything after an error and writes nothing more.

    It has the methods that h5py calls, and works as a context manager.

    Raises OSError if it cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = open_own(path, _FLAGS, 0o644)
        self._at = 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error of the file, if there was one."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = _SET) -> int:
        """Move to an offset from the start (0), from here (1) or from the end (2)."""
        if whence == _SET:
            self._at = offset
        elif whence == _FROM_HERE:
            self._at += offset
        else:
            self._at = os.fstat(self._descriptor).st_size + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def read(self, count: int) -> bytes:
        """Return bytes, as `readinto` gives them."""
        memory = bytearray(count)
        self.readinto(memory)
        return bytes(memory)

    def readinto(self, into: bytearray | memoryview) -> int:
        """Fill `into`; with zeros where nothing was written."""
        view = memoryview(into)
        done = 0
        while self._error is None and done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], self._at + done)
            except OSError as error:
                self._error = error
                break
            if not count:
                break
            done += count
        view[done:] = bytes(len(view) - done)
        self._at += len(view)
        return len(view)

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, unless an error came before."""
        view = memoryview(data)
        done = 0
        try:
            while self._error is None and done < len(view):
                done += os.pwrite(self._descriptor, view[done:], self._at + done)
        except OSError as error:
            self._error = error
        self._at += len(view)
        return len(view)

    def truncate(self, size: int) -> int:
        """Set the size, unless an error came before."""
        try:
            if self._error is None:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._error = error
        return size

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""

    def sync(self) -> None:
        """Wait until the bytes are on the disk. Raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
