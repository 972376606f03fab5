"""Payloads read from where a reader says that they lie: many by one call, without the interpreter's
lock."""

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import FileLocations
from dlio.image.native import pool_library
from dlio.image.native.pool_library import SAMPLE, address_of

_I64 = npt.NDArray[np.int64]


def can_read_payloads() -> bool:
    """True where the library is in use."""
    return pool_library.find() is not None


def read_payloads(
    located: FileLocations, rows: _I64, begins: _I64, memory: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
    """Read the payloads of some rows of `located` into memory, each followed by zeros up to a
    multiple of 8 bytes.

    Args:
        rows: of samples whose location is known, shape (n,).
        begins: offset of each in the memory, which has room for it and its zeros; shape (n,).

    Returns (a mask of those that were read, the xxh3_64 of each), shape (n,). The others cannot be
    read, or are not what was written there, and their memory is undefined.
    """
    samples = np.zeros(len(rows), SAMPLE)
    samples["descriptor"], samples["offset"] = located.descriptor[rows], located.offset[rows]
    samples["stored"], samples["raw"] = located.stored[rows], located.raw[rows]
    if located.digest is not None:
        samples["digest"], samples["checked"] = located.digest[rows], 1
    samples["block"], samples["slot"] = -1, begins
    library = pool_library.find()
    assert library is not None
    library.payloads(address_of(samples), len(samples), address_of(memory))
    return samples["state"] == 0, samples["digest"]
