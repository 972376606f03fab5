"""Many files below a folder read by one call, without the interpreter's lock."""

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import NAMED_FILE
from dlio.image.native import LIBRARY
from dlio.util.settings import settings


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
    call = _call()
    if call is not None and len(files):
        files = np.ascontiguousarray(files, NAMED_FILE)
        call(*(each.ctypes.data for each in (files, sizes, offsets)), len(files),
             memory.ctypes.data, read.ctypes.data)  # fmt: skip
    return read


@functools.cache
def _call() -> "ctypes._NamedFuncPointer | None":
    # Another decoder of pictures may be the faster one here; this has nothing to do with it.
    if not settings().native:
        return None
    try:
        call = ctypes.CDLL(LIBRARY).dlio_files_read
    except (OSError, AttributeError):
        return None
    address = ctypes.c_void_p
    call.argtypes = (address, address, address, ctypes.c_int64, address, address)
    call.restype = None
    return call
