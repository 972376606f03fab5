"""The head of a .npy file, read without trust: bounded, and never by pickle or eval."""

import ast
import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import DTYPES, MAX_DIMENSIONS
from dlio.errors import CorruptBlock

__all__ = ["NpyHead", "read_npy_head"]

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEAD: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class NpyHead:
    """What a .npy file holds, and where."""

    dtype: str
    """numpy's name of it, little-endian as stored or not."""
    descr: str
    shape: tuple[int, ...]
    fortran: bool
    offset: int
    """Of the data in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.descr).itemsize

    def array(self, data: memoryview) -> npt.NDArray[Any]:
        """The array of a whole file that lies in memory: a view where it can be one."""
        shape = self.shape[::-1] if self.fortran else self.shape
        found: npt.NDArray[Any] = np.ndarray(shape, self.descr, data, self.offset)
        found = found.T if self.fortran else found
        return np.asarray(found, np.dtype(self.dtype).newbyteorder("<"), order="C")


def read_npy_head(data: memoryview, size: int | None = None) -> NpyHead:
    """Parse the beginning of a .npy file.

    Args:
        data: the head, and more.
        size: bytes of the whole file; by default those of `data`.

    Raises CorruptBlock for what is no .npy file, is too short for what it claims, or holds objects
    or types that samples cannot have.
    """
    size = len(data) if size is None else size
    if len(data) < 10 or bytes(data[:6]) != _MAGIC or data[6] not in (1, 2, 3):
        raise CorruptBlock("is no .npy file")
    wide = data[6] > 1
    if len(data) < 12:
        raise CorruptBlock("is no .npy file: it is cut off")
    length = struct.unpack_from("<I" if wide else "<H", data, 8)[0]
    offset = (12 if wide else 10) + length
    if length > _MAX_HEAD or offset > len(data):
        raise CorruptBlock(f"its .npy head of {length} bytes is cut off, or too long")
    try:
        head = ast.literal_eval(bytes(data[offset - length : offset]).decode("latin-1").strip())
        descr, shape, fortran = head["descr"], head["shape"], head["fortran_order"]
        dtype = np.dtype(descr) if isinstance(descr, str) else np.dtype(object)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise CorruptBlock("its .npy head makes no sense") from error
    if dtype.name not in DTYPES:
        raise CorruptBlock(f"holds {dtype.name}, which samples cannot have: convert it")
    sound = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
    if not sound or not all(isinstance(n, int) and 0 <= n < 2**48 for n in shape):
        raise CorruptBlock("its .npy head makes no sense")
    found = NpyHead(dtype.name, dtype.str, shape, bool(fortran), offset)
    if found.offset + found.nbytes > size:
        raise CorruptBlock(f"is cut off: {size} bytes, where {offset + found.nbytes} should be")
    return found
