"""The reader of HDF5 files: data sets whose row i is sample i, or files that are one sample each.

`dlio_readers.hdf5file` reads a file.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from dlio.data.chunked_array import ChunkedArray
from dlio.data.interpretation import named_files
from dlio.data.labels import with_label
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import Fit, PathRules
from dlio.data.source import Source, expand, file_at, files_below, split_fields
from dlio.errors import SourceError
from dlio_readers.array_names import joined_parts, side_by_side
from dlio_readers.columns import (
    Column,
    ColumnReader,
    ConcatColumn,
    Samples,
    Select,
    volumes_of,
)
from dlio_readers.hdf5file import HDF5_SUFFIXES, Hdf5File, is_old_matlab
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
        split: which of several splits that names of data sets and groups say, as `train/images`
            and `x_test` do, or `all`.
        label: the data set that is the label, whatever its name; the field is called `label`.

    Files such as `train_x.h5` and `train_y.h5` are the parts of the same samples.

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
        split: str | None = None,
        label: str | None = None,
    ) -> None:
        urls, names = split_paths(path)
        names = with_label(names, label)
        files = [each.opened_as(PersistentFile) for each in files_below(urls, HDF5_SUFFIXES)]
        options = {"select": select, "samples": samples, "split": split}
        options |= {} if label is None else {"label": label}
        rehearse("hdf5", "h5py", path, files, options)
        runs = [] if split or names else side_by_side([file.name for file in files])
        self._files: list[Hdf5File] = []
        for file in files:
            one = Hdf5File(file, label=label)
            splits = [None] if runs else one.splits(names, split)
            one.split = splits[0]
            self._files += [one, *(Hdf5File(file, each, label) for each in splits[1:])]
        tables = [file.columns(names, select) for file in self._files]
        self._runs = runs or [[("", k)] for k in range(len(self._files))]
        if runs:
            tables = [self._joined(run, tables) for run in runs]
        first = tables[0]
        packed = self._files[0].packed_schema
        volumes = volumes_of(self.path, tables, "rows" if packed is not None else samples)
        self._files_are_samples = volumes is not None
        heads = [self._files[run[0][1]] for run in self._runs]
        for head, table in zip(heads, tables, strict=True):
            kinds = {name: column.kind for name, column in table.items()}
            if not volumes and kinds != {name: column.kind for name, column in first.items()}:
                raise SourceError(
                    f"{head.file.name} and {heads[0].file.name} hold arrays of different names, "
                    "types or shapes: open them one by one, or with samples='files' if each is "
                    "one sample"
                )
        counts = [1 if volumes else file.count for file in heads]
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
            [*stamps, repr((select, split)) if split else repr(select)],
            self._files[0].classes,
            packed.structure if packed is not None and len(packed.fields) == len(columns) else None,
            select,
            label=label,
        )

    def _joined(
        self, run: Sequence[tuple[str, int]], tables: Sequence[Mapping[str, Column]]
    ) -> dict[str, Column]:
        """Return the columns of files that hold parts of the same samples. Raises SourceError."""
        rows = {self._files[k].file.name: self._files[k].count for _, k in run}
        if len(set(rows.values())) > 1:
            shown = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise SourceError(f"{self.path}: parts of the same samples differ in rows: {shown}")
        return joined_parts(self.path, [(part, tables[k]) for part, k in run])

    def name(self, sample: int) -> str:
        if self._files_are_samples:
            return self._files[self._runs[sample][0][1]].file.name.rsplit("/", 1)[-1]
        return super().name(sample)

    @staticmethod
    def recognises(path: str) -> str | None:
        if lie_at(path, HDF5_SUFFIXES):
            return None
        url = split_fields(expand(path)[0])[0]
        if Source(url).is_folder():
            return "holds no .h5 file"
        try:
            file = file_at(url).opened()
            begins = any(file.read(at, 8) == _MAGIC for at in _STARTS)
            return None if begins else "does not begin like an HDF5 file"
        except SourceError:
            return "is not a file"

    @staticmethod
    def fit(path: str, _: Mapping[str, object]) -> Fit | None:
        """Return how well a folder fits; files of MATLAB before 7.3 do not count."""
        source = Source(path)
        own = source.files()
        own = [name for name in own if name.lower().endswith(HDF5_SUFFIXES)]
        own = [n for n in own if not (n.lower().endswith(".mat") and is_old_matlab(source, n))]
        return Fit(f"{named_files(own)} of hdf5", len(own)) if own else None

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _chunked(self) -> dict[str, list[ChunkedArray]]:
        arrays = [
            joined_parts(self.path, [(part, self._files[k].chunked) for part, k in run])
            for run in self._runs
        ]
        return {name: [each[name] for each in arrays] for name in arrays[0]}
