"""The library of native threads: its calls, and the structures of pool.h that Python shares.

Checksums and LZ4 are those of the packages xxhash and lz4: its C code calls the functions in these
packages' own libraries, which are compared with the Python ones first.
"""

import ctypes
import functools
import importlib
import os
import sys
from typing import Any, Final

import lz4.block
import numpy as np
import numpy.typing as npt
import xxhash

from dlio.image.native import LIBRARY
from dlio.util.settings import settings

# Structures of pool.h

SAMPLE: Final = np.dtype(
    [
        *((name, np.int64) for name in ("descriptor", "block", "regular", "kept", "offset")),
        *((name, np.int64) for name in ("stored", "raw")),
        ("digest", np.uint64),
        *((name, np.int64) for name in ("checked", "height", "width", "slot", "state")),
    ]
)
"""`Sample` of pool.h."""
DIMENSIONS: Final = 6
"""Of a piece: volumes over time with channels have five, and an element has bytes."""
PIECE: Final = np.dtype(
    [
        ("at", np.int64),
        ("to", np.int64),
        *((name, np.int64, DIMENSIONS) for name in ("count", "from_step", "to_step")),
        ("payload", np.int64),
    ]
)
"""A part of a chunk that goes into a patch: first byte in the chunk, and address in the batch's
array, then for each dimension the number of elements, and bytes from one to the next in the chunk
and in the array; the last dimension is that of single bytes; then the number of the chunk. `Piece`
of pool.h."""


class _Structure(ctypes.Structure):
    """A structure of pool.h, whose members all have eight bytes."""


class FieldColumn(_Structure):
    """A field of fixed size: `Column` of pool.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("at", "bytes", "cast", "stride")]


class FieldLayout(_Structure):
    """The arrays of one field of patches: `Field` of pool.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dimensions", "element", "by_row", "bytes", "axes")),
        *((name, ctypes.c_int64 * DIMENSIONS) for name in ("axis", "side", "to_step")),
        *((name, ctypes.c_void_p) for name in ("shapes", "chunks", "grids", "firsts")),
    ]


class CropRule(_Structure):
    """The rule of crops: `CropRule` of pool.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "train", "resize", "most_pixels")),
        *((name, ctypes.c_double * 2) for name in ("scale", "log_ratio", "ratio")),
        *((name, ctypes.c_double) for name in ("flip", "upend")),
    ]


class RecipeRow(_Structure):
    """How payloads become samples: `Recipe` of pool.h."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("column", ctypes.POINTER(FieldColumn)),
        *((name, ctypes.c_int64) for name in ("least", "fixed", "direct", "crops")),
        ("rule", CropRule),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("wide", "sleep_ns")),
    ]


class JobSums(_Structure):
    """Sums over the rows of a job: bytes that go into the batch; the first one's tier; 1 if others
    differ; slots."""

    _fields_ = [(name, ctypes.c_int64) for name in ("raw", "tier", "mixed", "slots")]


class JobRow(_Structure):
    """A batch, or a part of it: `Job` of pool.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("order", "count", "chunk")),
        *((name, ctypes.c_void_p) for name in ("samples", "recipe", "columns", "images")),
        ("uniforms", ctypes.c_void_p),
        ("draws", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("pieces", "rows", "intact")),
        *((name, ctypes.c_int64) for name in ("next", "left", "refused", "read_ns", "make_ns")),
        ("given_up", ctypes.c_int64),
        ("after", ctypes.c_void_p),
    ]


# The library


class PoolLibrary:
    """The calls of pool.c. Raises OSError or AttributeError if something is missing."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pool, job, number = ctypes.c_void_p, ctypes.POINTER(JobRow), ctypes.c_int64
        for name, result, arguments in (
            ("open", pool, (number, pool)),
            ("threads", number, (pool,)),
            ("submit", None, (pool, job)),
            ("wait", number, (pool, job, number, ctypes.POINTER(number))),
            ("left", number, (pool, job)),
            ("wake", None, (pool,)),
            ("cancel", number, (pool, job, number)),
            ("close", number, (pool, number)),
        ):
            call = getattr(library, f"dlio_pool_{name}")
            call.restype, call.argtypes = result, arguments
            setattr(self, name, call)
        self.files_open, self.files_close = library.dlio_files_open, library.dlio_files_close
        self.files_open.restype, self.files_open.argtypes = pool, (number, number)
        self.files_close.restype, self.files_close.argtypes = None, (pool,)
        self.payloads = library.dlio_payloads
        self.payloads.restype, self.payloads.argtypes = None, (pool, number, pool)
        self.files_rest = library.dlio_files_rest
        self.files_rest.restype, self.files_rest.argtypes = None, (pool,)
        # These never wait: giving the interpreter's lock away, and taking it again behind all
        # others, would take longer than the call.
        held = ctypes.PyDLL(path)
        self.rows = held.dlio_pool_rows
        self.rows.restype = number
        self.rows.argtypes = (
            *(pool, number, pool, pool, number, pool, pool, pool),
            ctypes.POINTER(JobSums),
        )
        self.pieces = held.dlio_pieces
        self.pieces.restype = number
        self.pieces.argtypes = (
            *(ctypes.POINTER(FieldLayout), number, pool, pool, pool, pool),
            *(number, number, pool, pool, pool, pool),
        )
        for name in ("submit", "left", "wake"):
            call = getattr(held, f"dlio_pool_{name}")
            call.restype, call.argtypes = getattr(self, name).restype, getattr(self, name).argtypes
            setattr(self, name, call)
        functions = _hash_functions()
        addresses = (number * len(functions))(
            *(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)
        )
        library.dlio_pool_use(addresses)
        self._held = functions

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _hash_functions() -> list[Any]:
    """Return the C functions of xxhash and lz4 that make.c calls. Raises AttributeError or OSError
    where the packages' libraries do not offer them, or give other results."""
    sums = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    packed = ctypes.CDLL(importlib.import_module("lz4.block._block").__file__)
    names = ("64bits", "createState", "freeState", "64bits_reset", "64bits_update", "64bits_digest")
    functions = [getattr(sums, f"XXH3_{name}") for name in names]
    digest, expand = functions[0], packed.LZ4_decompress_safe
    digest.restype, digest.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    expand.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    data = bytes(range(256)) * 5
    out = ctypes.create_string_buffer(len(data))
    small = lz4.block.compress(data, store_size=False)
    agree = expand(small, out, len(small), len(data)) == len(data) and out.raw == data
    for count in (0, 3, 8, 16, 100, 200, 1000):
        agree &= digest(data[:count], count) == xxhash.xxh3_64_intdigest(data[:count])
    if not agree:
        raise AttributeError("its checksums differ from those of xxhash, or its data from lz4's")
    return [*functions, expand]


def find() -> PoolLibrary | None:
    """Return the library of native threads; None where batches are made by Python's threads."""
    return _load()[0]


def name() -> str:
    """Name the threads that make batches, for reports."""
    library, text = _load()
    return text if library is not None else f"Python's ({text})"


@functools.cache
def _load() -> tuple[PoolLibrary | None, str]:
    """Return (the library, its name), or (None, why it is not in use)."""
    if not settings().native:
        return None, "DLIO_NATIVE=0"
    if not os.path.exists(LIBRARY):
        return None, "dlio was installed without a C compiler"
    if sys.byteorder != "little":
        return None, "numbers of this processor begin with their highest byte"
    try:
        return PoolLibrary(LIBRARY), "native"
    except (OSError, AttributeError, ImportError) as error:
        return None, f"{LIBRARY} cannot be used: {error}"


_Byte: Final = ctypes.c_byte


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of a contiguous array."""
    if array.dtype.names is not None:
        # Otherwise each field of the structure would be described: 25 µs.
        array = array.view((np.void, array.itemsize))
    try:
        memory: Any = array
        return ctypes.addressof(_Byte.from_buffer(memory))  # In a third of the time below.
    except (TypeError, ValueError, BufferError):  # It is empty, read-only, or has gaps.
        address: int = array.__array_interface__["data"][0]
        return address
