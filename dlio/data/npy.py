"""Parse headers of .npy files from untrusted sources: bounded, without pickle or eval."""

import math
import re
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import DTYPES, MAX_DIMENSIONS
from dlio.errors import CorruptBlock

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEAD: Final = 1 << 16
# A header is a dict literal of Python. It is read without Python's own parser, which untrusted
# text may exhaust, and which in CPython 3.11 fails now and then if several threads parse at once.
_ENTRY: Final = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>\w+)(?P=quote)\s*:\s*"""
    r"""(?P<value>'[^'\\]*'|"[^"\\]*"|True|False|\([\dL,\s]*\)|\[)\s*(?P<comma>,?)""",
    re.ASCII,
)
_DESCR: Final = re.compile(r"[<>|=]?[a-zA-Z?]\d{0,9}(\[\w{1,9}\])?", re.ASCII)
_DIMENSIONS: Final = re.compile(r"\s*|(\s*\d{1,15}L?\s*,)+(\s*\d{1,15}L?)?\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class NpyHead:
    """The parsed header of a .npy file."""

    dtype: str
    """numpy's name of the type, without byte order; of texts with it."""
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
        """Return the array of a whole file in memory, as a view if possible. `data` has all bytes
        of the file, header included."""
        shape = self.shape[::-1] if self.fortran else self.shape
        stored: npt.NDArray[Any] = np.ndarray(shape, self.descr, data, self.offset)
        stored = stored.T if self.fortran else stored
        return np.asarray(stored, np.dtype(self.dtype).newbyteorder("<"), order="C")


def read_npy_head(data: memoryview, size: int | None = None, *, texts: bool = False) -> NpyHead:
    """Parse the beginning of a .npy file. `data` has the header at least, and `size` is that of the
    whole file; by default len(data). With `texts`, its elements may also be texts or bytes of one
    length.

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
    descr, fortran, shape = _entries(bytes(data[offset - length : offset]).decode("latin-1"))
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError) as error:
        raise CorruptBlock("its .npy header is damaged") from error
    is_text = texts and dtype.kind in "US" and dtype.itemsize > 0
    if dtype.hasobject:
        raise CorruptBlock(
            "holds Python objects, which numpy reads with pickle alone: refused; store texts as "
            "np.array(texts, 'U'), and numbers as numbers"
        )
    if dtype.name not in DTYPES and not is_text:
        raise CorruptBlock(f"holds {dtype.name}, which samples cannot have: convert it")
    if len(shape) > MAX_DIMENSIONS or any(n >= 2**48 for n in shape):
        raise CorruptBlock("its .npy header is damaged")
    parsed = NpyHead(dtype.str if is_text else dtype.name, dtype.str, shape, fortran, offset)
    if parsed.offset + parsed.nbytes > size:
        raise CorruptBlock(f"is cut off: {size} bytes instead of {offset + parsed.nbytes}")
    return parsed


def _entries(text: str) -> tuple[str, bool, tuple[int, ...]]:
    """Return the type, whether the order is Fortran's, and the shape of a header's text."""
    text = text.strip()
    values: dict[str, str] = {}
    at, comma = 1, ","
    while comma and (entry := _ENTRY.match(text, at)) is not None:
        if entry["key"] in values:
            break
        values[entry["key"]], comma, at = entry["value"], entry["comma"], entry.end()
        if entry["value"] == "[":
            raise CorruptBlock("holds records, which samples cannot have: convert it")
    descr, shape = values.get("descr", "")[1:-1], values.get("shape", "")[1:-1]
    sound = (
        text.startswith("{")
        and text[at:].strip() == "}"
        and values.keys() == {"descr", "fortran_order", "shape"}
        and values["fortran_order"] in ("True", "False")
        and values["shape"].startswith("(")
        and _DESCR.fullmatch(descr)
        and _DIMENSIONS.fullmatch(shape)
    )
    if not sound:
        raise CorruptBlock("its .npy header is damaged")
    return descr, values["fortran_order"] == "True", tuple(map(int, re.findall(r"\d+", shape)))
