"""Many files below a folder looked at, or read, by one call, without the interpreter's lock."""

import ctypes
import functools
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import NAMED_FILE
from dlio.data.schema import WholeNumbers
from dlio.image.native import LIBRARY
from dlio.util.settings import settings

_SOME: Final = 64
_MANY: Final = 1024
"""Files of a call that takes few system calls: its ring is made and mapped anew each time."""


def read_files(
    files: npt.NDArray[np.void],
    sizes: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    memory: npt.NDArray[np.uint8],
) -> npt.NDArray[np.bool_]:
    """Read whole files, of so many bytes each, to offsets of a memory that has room for them.

    Args:
        files: of type NAMED_FILE, shape (n,).

    Returns a mask of those that were read, shape (n,): the others cannot be, or are not the ones
    that are meant, and their memory is undefined. None was, without the library.
    """
    read = np.zeros(len(files), np.bool_)
    library = _library()
    if library is not None and len(files):
        files = np.ascontiguousarray(files, NAMED_FILE)
        inputs = (each.ctypes.data for each in (files, sizes, offsets))
        library.dlio_files_read(*inputs, len(files), memory.ctypes.data, read.ctypes.data)
    return read


def look_at_files(
    folder: int, follows: bool, names: npt.NDArray[np.uint8], ends: WholeNumbers
) -> npt.NDArray[np.int64]:
    """Look at regular files in an open folder, over links if these are followed.

    Args:
        names: bytes of the names, one after another; `ends` has the end of each, shape (n,).

    Returns (bytes, time of the last change of the contents, of all, 1), in nanoseconds; shape
    (n, 4). Zeros for other files, links and those that are gone: of all, without the library.
    """
    rows = np.zeros((len(ends), 4), np.int64)
    library = _library()
    if library is not None and len(ends):
        ends = np.ascontiguousarray(ends, np.int64)
        library.dlio_files_status(folder, follows, names.ctypes.data, ends.ctypes.data, len(ends),
                                  rows.ctypes.data)  # fmt: skip
    return rows


@functools.cache
def looks_together() -> bool:
    """True where the kernel looks at the files of one call in parallel, by io_uring."""
    library = _library()
    return library is not None and bool(library.dlio_ring_works())


def files_a_look() -> int:
    """Return how many files one call is to look at: many where the kernel takes them together, and
    some for each of several threads elsewhere."""
    return _MANY if looks_together() else _SOME


@functools.cache
def _library() -> ctypes.CDLL | None:
    # Another decoder of pictures may be the faster one here; this has nothing to do with it.
    if not settings().native:
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    try:
        library = ctypes.CDLL(LIBRARY)
        read, look = library.dlio_files_read, library.dlio_files_status
        library.dlio_ring_works.restype = number
    except (OSError, AttributeError):
        return None
    read.argtypes = (address, address, address, number, address, address)
    look.argtypes = (number, number, address, address, number, address)
    read.restype = look.restype = None
    return library
