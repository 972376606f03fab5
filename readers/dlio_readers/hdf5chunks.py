"""Chunks of HDF5 data sets, checked before the HDF5 library takes memory for them."""

import math
from typing import Any, Final, Protocol

import numpy as np

from dlio.errors import SourceError
from dlio.util.decompression_limits import exceeds
from dlio.util.limits import MAX_ABSENT_ROWS, check_claim

_DEFLATE: Final = 1
"""H5Z_FILTER_DEFLATE."""
_MAX_INFLATION: Final = 1032
"""Bytes that one byte of deflate can become at most."""
_FREE_BYTES: Final = 256 << 20
_SLACK: Final = 1 << 14


class Hdf5Dataset(Protocol):
    """Attributes of h5py's data sets that are read here."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    dtype: np.dtype[Any]
    id: Any
    """Its low-level interface."""


class Chunks:
    """Declared and stored sizes of a data set's chunks.

    HDF5 inflates all that a chunk holds, also if that is more than a chunk. Those that might become
    256 MiB more than they should are inflated once without keeping the result, to count.

    Args:
        dataset: of h5py.
        where: path and name for messages.

    Raises SourceError if the data set declares rows that are not stored, or a chunk is larger than
    declared.
    """

    def __init__(self, dataset: Hdf5Dataset, where: str) -> None:
        self._where = where
        self._suspects: dict[int, list[tuple[int, ...]]] = {}
        """Offsets of chunks that have to be counted, by their first row."""
        rows = dataset.shape[0] if dataset.shape else 0
        self._rows = rows
        self._rows_per_chunk = dataset.chunks[0] if dataset.chunks else 1
        if dataset.chunks is None:
            absent = rows if not dataset.id.get_storage_size() else 0
        else:
            self._chunk = dataset.dtype.itemsize * math.prod(dataset.chunks)
            check_claim(self._chunk, dataset.id.get_storage_size(), f"{where}: a chunk")
            self._look_at_stored(dataset)
            counts = zip(dataset.shape, dataset.chunks, strict=True)
            chunks = math.prod(-(-n // c) for n, c in counts)
            here = dataset.id.get_num_chunks() if chunks else 0
            absent = rows * (chunks - here) // chunks if chunks else 0
        if absent > MAX_ABSENT_ROWS:
            raise SourceError(
                f"{where}: {absent} of its {rows} rows are not stored in the file: write them, or "
                "declare fewer"
            )

    def _look_at_stored(self, dataset: Hdf5Dataset) -> None:
        made = dataset.id.get_create_plist()
        filters = [made.get_filter(k)[0] for k in range(made.get_nfilters())]
        if not filters:
            return
        if filters.count(_DEFLATE) > 1:
            raise SourceError(f"{self._where} is deflated twice: store it with one deflate filter")
        largest = 0

        def look(info: Any) -> None:
            nonlocal largest
            largest = max(largest, info.size)
            if _DEFLATE in filters and info.size * _MAX_INFLATION > self._chunk + _FREE_BYTES:
                offset = tuple(info.chunk_offset)
                self._suspects.setdefault(offset[0], []).append(offset)

        dataset.id.chunk_iter(look)
        if largest > self._chunk + self._chunk // 64 + _SLACK:
            raise SourceError(
                f"{self._where}: a chunk has {largest} bytes, over {self._chunk}: restore it"
            )

    def check(self, dataset: Hdf5Dataset, key: object) -> None:
        """Count what the chunks of some rows become, before they are read.

        Args:
            dataset: of h5py, open.
            key: that it is about to be indexed with.

        Raises SourceError if a chunk becomes more than it should.
        """
        if not self._suspects:
            return
        part = key[0] if isinstance(key, tuple) else key
        first, last = 0, self._rows
        if isinstance(part, slice):
            first, last, _ = part.indices(self._rows)
        inside = [k for k in self._suspects if k < last and first < k + self._rows_per_chunk]
        for start in inside:
            for offset in self._suspects[start]:
                _, stored = dataset.id.read_direct_chunk(offset)
                if exceeds("zlib", stored, self._chunk + _SLACK):
                    raise SourceError(
                        f"{self._where}: the chunk at row {start} becomes more than its "
                        f"{self._chunk} bytes: it is damaged, or was made to take all memory; "
                        "restore it"
                    )
            del self._suspects[start]
