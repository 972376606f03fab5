"""Files, connections and arrays of a user's objects, anew for another thread."""

import bz2
import gzip
import io
import lzma
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from dlio.util.limits import open_regular
from dlio.util.trusted_files import path_of

MOST_BYTES: Final = 4 << 20
"""Of an array that is copied: a buffer. Larger ones are data."""
_MOST_LOOKED_AT: Final = 1 << 20
"""Bytes of a text in which ends of lines are looked for."""
_MOST_TOGETHER: Final = 16 << 20
"""Of all arrays that are copied."""


def _opened_again(file: Any) -> Any:
    """Return a regular file that is open for reading with a place of its own; another as it is.

    Processes that share a file's place, as torch's do, read where others have sought.
    """
    try:
        if file.closed or file.writable():
            return file
        descriptor = open_regular(path_of(file.fileno()))
        again = os.fdopen(descriptor, "rb", buffering=0 if type(file) is io.FileIO else -1)
        again.seek(file.tell())
    except (OSError, ValueError):
        return file
    return again


def _unpacked_again(held: Any) -> Any:
    """Do `_opened_again` for a compressed file, at the same place of its contents."""
    try:
        packed = held.fileobj if isinstance(held, gzip.GzipFile) else held._fp
        if held.closed or held.writable() or type(packed) is not io.BufferedReader:
            return held
        again = _opened_again(packed)
        if again is packed:
            return held
        again.seek(0)
        is_gzip = isinstance(held, gzip.GzipFile)
        made: Any = gzip.GzipFile(fileobj=again) if is_gzip else type(held)(again)
        # Whoever closes it closes the file beneath, as if it had been opened by name.
        setattr(made, *(("myfileobj", again) if is_gzip else ("_closefp", True)))
        made.seek(held.tell())
    except (OSError, ValueError, EOFError, AttributeError, lzma.LZMAError):
        return held
    return made


def _lines_again(held: Any) -> Any:
    """Do `_opened_again` for a text; the same one if how it was opened decides about its lines,
    which cannot be asked."""
    try:
        if type(held.buffer) is not io.BufferedReader or held.closed:
            return held
        if b"\r" in os.pread(held.fileno(), _MOST_LOOKED_AT, 0):
            return held
        place, binary = held.tell(), _opened_again(held.buffer)
        if binary is held.buffer:
            return held
        made = io.TextIOWrapper(binary, encoding=held.encoding, errors=held.errors)
        made.seek(place)
    except (OSError, ValueError):
        return held
    return made


def _picture_again(held: Any) -> Any:
    """Return an open picture of Pillow's, at the frame of the other; the same one if its pixels are
    in memory alone."""
    from PIL import Image
    from PIL._util import DeferredError

    try:
        packed = getattr(held, "_fp", None) or held.fp
        if held.fp is None or isinstance(packed, DeferredError):
            return held
        if held.filename:
            file: Any = os.fdopen(open_regular(os.path.abspath(held.filename)), "rb")
        elif type(packed) is io.BytesIO:
            file = io.BytesIO(packed.getvalue())
        elif type(packed) is not io.BufferedReader or packed.closed:
            return held
        else:
            file = os.fdopen(open_regular(path_of(packed.fileno())), "rb")
        made = Image.open(file, formats=[held.format])
        made.filename = held.filename
        made.seek(held.tell())
    except (OSError, ValueError, EOFError):
        return held
    return made


def _in_memory_again(held: Any) -> Any:
    """Return a file in memory with a place of its own."""
    if held.closed:
        return held
    if isinstance(held, io.BytesIO):
        made: Any = io.BytesIO(held.getvalue())  # They share the bytes until one is written.
    else:
        made = io.StringIO(held.getvalue(), newline="\n")
    made.seek(held.tell())
    return made


_FILES: Final[dict[type, Callable[[Any], Any]]] = {
    io.FileIO: _opened_again,
    io.BufferedReader: _opened_again,
    io.TextIOWrapper: _lines_again,
    io.BytesIO: _in_memory_again,
    io.StringIO: _in_memory_again,
    gzip.GzipFile: _unpacked_again,
    bz2.BZ2File: _unpacked_again,
    lzma.LZMAFile: _unpacked_again,
}


def opening_again(held: object) -> Callable[[object], object] | None:
    """Return the function that opens a file or connection once more; None for other objects."""
    sqlite, pillow = sys.modules.get("sqlite3"), sys.modules.get("PIL.ImageFile")
    if sqlite is not None and type(held) is sqlite.Connection:
        return _connected_again
    if pillow is not None and isinstance(held, pillow.ImageFile):
        return _picture_again
    return _FILES.get(type(held))


def _connected_again(held: Any) -> Any:
    """Return another connection to a file of SQLite's, or to a copy of one in memory; the same
    one to any other place."""
    sqlite = sys.modules["sqlite3"]
    try:
        places = [row[2] for row in held.cursor().execute("pragma database_list")]
        if len(places) != 1 or (places[0] and held.in_transaction):
            return held
        made = sqlite.connect(
            places[0] or ":memory:", check_same_thread=False, isolation_level=held.isolation_level
        )
        if not places[0]:
            made.deserialize(held.serialize())
    except sqlite.Error:
        return held
    made.row_factory, made.text_factory = held.row_factory, held.text_factory
    return made


def buffers_of(arrays: Iterable[object]) -> dict[int, object]:
    """Return copies of the small ones among arrays, by id. Not of those that others refer to, or
    share memory with: another array's view, another process."""
    spans: list[tuple[int, int, Any]] = []
    torch = sys.modules.get("torch")
    for held in arrays:
        if isinstance(held, np.ndarray):
            root = held
            while type(root.base) is np.ndarray:
                root = root.base
            mine_alone = type(held) is np.ndarray and root.flags.owndata and held.flags.writeable
            small = mine_alone and root.nbytes <= MOST_BYTES
            spans.append((root.ctypes.data, root.nbytes, held if small else None))
        elif torch is None or not isinstance(held, torch.Tensor):
            continue
        elif held.device.type == "cpu" and held.layout is torch.strided:
            size = held.untyped_storage().nbytes()
            small = type(held) is torch.Tensor and size <= MOST_BYTES
            small = small and not held.requires_grad and not held.is_shared()
            spans.append((held.untyped_storage().data_ptr(), size, held if small else None))
    spans.sort(key=lambda span: span[0])
    alone: list[tuple[int, Any]] = []
    ends = 0
    for begin, size, held in spans:
        if begin < ends:
            alone[-1] = size, None
        else:
            alone.append((size, held))
        ends = max(ends, begin + max(1, size))
    made: dict[int, Any] = {}
    left = _MOST_TOGETHER
    for size, held in sorted(alone, key=lambda each: each[0]):
        left -= 0 if held is None else size
        if held is not None and left >= 0:
            made[id(held)] = held.copy() if isinstance(held, np.ndarray) else held.clone()
    return made
