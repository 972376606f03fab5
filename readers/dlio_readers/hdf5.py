"""The reader of HDF5 files: data sets whose row i is sample i, or files that are one sample each.

`dlio_readers.hdf5file` reads a file.
"""

from collections.abc import Sequence
from typing import Final

from dlio.data.chunked_array import ChunkedArray
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import PathRules
from dlio.data.source import File, Source, expand, files_below, split_fields
from dlio.errors import SourceError
from dlio_readers.columns import (
    Column,
    ColumnReader,
    ConcatColumn,
    Samples,
    Select,
    volumes_of,
)
from dlio_readers.hdf5file import HDF5_SUFFIXES, Hdf5File
from dlio_readers.path_reader import lie_at, split_paths
from dlio_readers.rehearsal import rehearse

_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_STARTS: Final = (0, 512, 1024, 2048)
"""Bytes that a block of the user's own, such as MATLAB's, may take before."""


class Hdf5Reader(ColumnReader):
    """Read `file.h5::images,labels`, or several files as one data set.

    Args:
        path: a file, a pattern or a list, with the names of data sets after `::`; by default all
            data sets, which then need the same number of rows.
        select: part of every sample to read, as `{"volume": (slice(0, 64),)}`.
        samples: `rows`, or `files` if each file is one sample, such as a scan; None: files if
            there are several whose arrays are volumes of different shapes.

    Raises SourceError for damaged files and references to other files, UsageError if the choice of
    data sets is ambiguous.
    """

    format = "hdf5"
    path_rules = PathRules(owns=lambda name: name.endswith(HDF5_SUFFIXES))

    def __init__(
        self,
        path: str | Sequence[str],
        select: Select = None,
        samples: Samples | None = None,
    ) -> None:
        urls, names = split_paths(path)
        files = [PersistentFile(url) for url in files_below(urls, HDF5_SUFFIXES)]
        rehearse("hdf5", "h5py", path, files, {"select": select, "samples": samples})
        self._files = [Hdf5File(file) for file in files]
        tables = [file.columns(names, select) for file in self._files]
        first = tables[0]
        packed = self._files[0].packed_schema
        volumes = volumes_of(self.path, tables, "rows" if packed is not None else samples)
        self._files_are_samples = volumes is not None
        for file, table in zip(self._files, tables, strict=True):
            kinds = {name: column.kind for name, column in table.items()}
            if not volumes and kinds != {name: column.kind for name, column in first.items()}:
                raise SourceError(f"{file.file.name} and {urls[0]} hold different data sets")
        counts = [1 if volumes else file.count for file in self._files]
        columns: dict[str, Column] = volumes or {
            name: first[name]
            if len(tables) == 1
            else ConcatColumn([table[name] for table in tables], counts)
            for name in first
        }
        stamps = [f"{file.file.url} {file.file.stamp}" for file in self._files]
        self._setup(
            columns,
            sum(counts),
            [*stamps, repr(select)],
            self._files[0].classes,
            packed.structure if packed is not None and len(packed.fields) == len(columns) else None,
            select,
        )

    def name(self, sample: int) -> str:
        if self._files_are_samples:
            return self._files[sample].file.name.rsplit("/", 1)[-1]
        return super().name(sample)

    @staticmethod
    def recognises(path: str) -> str | None:
        if lie_at(path, HDF5_SUFFIXES):
            return None
        url = split_fields(expand(path)[0])[0]
        if Source(url).is_folder():
            return "holds no .h5 file"
        try:
            file = File(url)
            begins = any(file.read(at, 8) == _MAGIC for at in _STARTS)
            return None if begins else "does not begin like an HDF5 file"
        except SourceError:
            return "is not a file"

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _chunked(self) -> dict[str, list[ChunkedArray]]:
        names = [name for name in self._columns if name in self._files[0].chunked]
        return {name: [f.chunked[name] for f in self._files] for name in names}
