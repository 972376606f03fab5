"""Parse headers of .npy files from untrusted sources: bounded, without pickle or eval."""

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
    """The parsed header of a .npy file."""

    dtype: str
    """numpy's name of the type, without byte order."""
    descr: str
    """The type with its byte order, as in the file."""
    shape: tuple[int, ...]
    fortran: bool
    """True if the array is stored in column-major order."""
    offset: int
    """Offset of the data in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * np.dtype(self.descr).itemsize

    def array(self, data: memoryview) -> npt.NDArray[np.generic]:
        """Return the array of a whole file in memory, as a view if possible.

        Args:
            data: all bytes of the file, header included.
        """
        shape = self.shape[::-1] if self.fortran else self.shape
        stored: npt.NDArray[Any] = np.ndarray(shape, self.descr, data, self.offset)
        stored = stored.T if self.fortran else stored
        return np.asarray(stored, np.dtype(self.dtype).newbyteorder("<"), order="C")


def read_npy_head(data: memoryview, size: int | None = None) -> NpyHead:
    """Parse the beginning of a .npy file.

    Args:
        data: the beginning of the file; at least the header.
        size: bytes of the whole file; by default len(data).

    Raises CorruptBlock if the file is damaged, cut off or not a .npy file, and for element types
    that samples cannot have, such as objects.
    """
    size = len(data) if size is None else size
    if len(data) < 10 or bytes(data[:6]) != _MAGIC or data[6] not in (1, 2, 3):
        raise CorruptBlock("is not a .npy file")
    wide = data[6] > 1
    if len(data) < 12:
        raise CorruptBlock("is not a .npy file: it is cut off")
    length = struct.unpack_from("<I" if wide else "<H", data, 8)[0]
    offset = (12 if wide else 10) + length
    if length > _MAX_HEAD or offset > len(data):
        raise CorruptBlock(f"its .npy header of {length} bytes is cut off, or too long")
    try:
        head = ast.literal_eval(bytes(data[offset - length : offset]).decode("latin-1").strip())
        descr, shape, fortran = head["descr"], head["shape"], head["fortran_order"]
        dtype = np.dtype(descr) if isinstance(descr, str) else np.dtype(object)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise CorruptBlock("its .npy header is damaged") from error
    if dtype.name not in DTYPES:
        raise CorruptBlock(f"holds {dtype.name}, which samples cannot have: convert it")
    sound = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
    if not sound or not all(isinstance(n, int) and 0 <= n < 2**48 for n in shape):
        raise CorruptBlock("its .npy header is damaged")
    parsed = NpyHead(dtype.name, dtype.str, shape, bool(fortran), offset)
    if parsed.offset + parsed.nbytes > size:
        raise CorruptBlock(f"is cut off: {size} bytes instead of {offset + parsed.nbytes}")
    return parsed
