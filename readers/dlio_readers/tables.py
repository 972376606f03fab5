"""The reader of NumPy files and text tables (`.npy`, `.npz`, `.csv`, `.tsv`), without pickle."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from dlio.data.chunked_array import ChunkedArray
from dlio.data.interpretation import named_files
from dlio.data.labels import field_named, is_number, label_names, with_label
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import PathRules
from dlio.data.source import (
    File,
    FilePlace,
    Source,
    expand,
    file_at,
    files_below,
    last_name,
    own_name,
    split_fields,
)
from dlio.data.splits import WHOLE, no_splits
from dlio.errors import UsageError
from dlio.util.printable import tell_once
from dlio_readers.array_names import check_groups, chosen_arrays, joined_parts, side_by_side
from dlio_readers.columns import (
    Arrays,
    Column,
    ColumnReader,
    ConcatColumn,
    PlainColumn,
    Samples,
    Select,
    SingleValue,
    TextArrayColumn,
    choose,
    slab,
    volumes_of,
)
from dlio_readers.compressed_files import SUFFIXES as COMPRESSED
from dlio_readers.label_tables import named_in
from dlio_readers.npyfile import chunked_array, numpy_arrays
from dlio_readers.path_reader import concurrently, split_paths
from dlio_readers.ranges import StoredArray
from dlio_readers.texttable import open_text_tables

_TEXTS: Final = tuple(text + packed for packed in ("", *COMPRESSED) for text in (".csv", ".tsv"))
_ARRAYS: Final = (".npy", ".npz")
_PROBED: Final = 64
_LOOKED_AT: Final = 1 << 13
_SUFFIXES: Final = (*_ARRAYS, *_TEXTS)
_DOCUMENTS: Final = (".md", ".txt", ".json", ".pdf", ".html", ".yaml", "license", "readme")
"""Ends of the names of files about a data set."""


class TablesReader(ColumnReader):
    """Read the rows of NumPy arrays, or of tables whose first line names their columns.

    Arrays are read in place, some rows at a time; compressed arrays of a `.npz` are decompressed
    whole, and tables that are compressed (`x.csv.gz`). Columns of a table are integers, floats
    or text; where a number is missing, the column's numbers are floats, and that one is NaN. A
    label that is text becomes classes in alphabetical order.

    Args:
        path: one or several files of one kind, with the names of arrays or columns after `::`:
            `x.npy`, `x.npz::x,y`, `x.csv`, `part-*.csv`.
        select: part of every sample of an array to read.
        columns: columns of a table to read as one float32 array, `features`, next to the label;
            "*" for all that are numbers.
        separator: character between the values of a table; found by the first line for None.
        samples: `rows`, or `files` if each file of arrays is one sample; None: files if there are
            several whose arrays are volumes of different shapes.
        split: which of several splits that names of arrays say, as `train_images` and `x_test` do,
            or `all`.
        label: the column or array that is the label, whatever its name; the field is called
            `label`.

    Files such as `X_train.npy` and `y_train.npy` are the parts of the same samples.

    Raises SourceError for damaged files and arrays of objects, UsageError if the choice of arrays
    is ambiguous.
    """

    format = "tables"
    path_rules = PathRules(owns=lambda name: name.endswith(_SUFFIXES))

    def __init__(
        self,
        path: str | Sequence[str],
        select: Select = None,
        columns: Sequence[str] | str | None = None,
        separator: str | None = None,
        samples: Samples | None = None,
        split: str | None = None,
        label: str | None = None,
    ) -> None:
        self._names: list[str] = []
        self._stored: list[dict[str, StoredArray]] = []
        self._arrays: dict[str, list[ChunkedArray]] = {}
        paths, names = split_paths(path)
        names = with_label(names, label)
        is_folder = any(Source(each).is_folder() for each in paths)
        if is_folder:
            places = files_below(paths, _ARRAYS)
            texts_beside = files_below(paths, _TEXTS)
            if places and texts_beside:
                hint = _hint_of_files(texts_beside[0], places) if samples is None else ""
                tell_once(
                    f"{self.path}: read as arrays; left out: "
                    f"{named_files([each.name for each in texts_beside])}, whose labels "
                    f"would be read out of an array, such as y.npy{hint}"
                )
            places = places or texts_beside
        else:
            places = list(map(file_at, expand(paths)))
        urls = [each.url for each in places]
        files = concurrently(_opened, places, urls[0])
        concurrently(lambda file: file.stamp, files, urls[0])  # Kept by the files.
        stamps = [f"{file.url} {file.stamp}" for file in files]
        stamps += [repr(select), repr(columns), repr(separator)]
        texts = [file.own_name.endswith(_TEXTS) for file in files]
        if any(texts) != all(texts):
            raise UsageError(f"{self.path}: arrays and tables of text: open them one by one")
        if texts[0]:
            if split not in (None, WHOLE):
                raise no_splits(split, self.path)
            table, rows = open_text_tables(files, names, separator, columns, label)
            if columns is None and not names and not label_names(table, label):
                _tell_of_one_hot(files[0].name, table, rows)
                _tell_of_spaces(files[0].name, table, rows)
            self._setup(table, rows, stamps, select=select, files=files, label=label)
            return
        if columns is not None or separator is not None:
            raise UsageError(f"columns= and separator= are for tables of text, not for {self.path}")
        opened = concurrently(partial(numpy_arrays, names=names), files, urls[0])
        files, opened = _parts(self.path, files, opened, names, split)
        arrays, count, volumes = _array_columns(
            self.path, files, opened, names, select, samples, label
        )
        self._files_are_samples = volumes
        if volumes and select is None and not any(map(_is_single, arrays.values())):
            self._stored = [
                {field_named(n, label): a for n in arrays if isinstance(a := each[n], StoredArray)}
                for each in opened
            ]
            # Not those that are compressed, which are in memory already.
            self._random_access = all(len(each) == len(arrays) for each in self._stored)
        if select is None:
            self._arrays = {
                name: [
                    chunked_array(each[name], f"{file.name}::{name}")
                    for file, each in zip(files, opened, strict=True)
                ]
                for name, column in arrays.items()
                if column.kind != "text" and not _is_single(column)
            }
        if count == len(files) > 1:
            self._names = [file.name.rsplit("/", 1)[-1] for file in files]
        self._setup(arrays, count, stamps, select=select, label=label)

    def name(self, sample: int) -> str:
        return self._names[sample] if self._names else super().name(sample)

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        ok = own_name(url).endswith(_SUFFIXES)
        source = Source(url)
        if not ok and source.is_folder():
            here: set[str] = set()
            for name in map(str.lower, source.files()):
                if not name.endswith(_DOCUMENTS):
                    here.add(next((s for s in _SUFFIXES if name.endswith(s)), ""))
                if "" in here:
                    break  # A file of another kind.
            if here and "" not in here:
                arrays = here.intersection(_ARRAYS)
                if len(arrays) > 1:
                    return "holds .npy and .npz files: open one kind, as in folder/*.npy"
                if arrays or not any(folder for _, folder in source.names()):
                    return None
                return "holds tables next to folders: open them by their names, as in folder/*.csv"
        return None if ok else f"does not end in {', '.join(_SUFFIXES)}"

    def ranges_of(self, sample: int) -> list[tuple[File, int, int]]:
        """Return the ranges of a sample that is a file; none of samples that are rows."""
        return [each.range for each in self._stored[sample].values()] if self._random_access else []

    def payload_of(self, sample: int, parts: Sequence[memoryview]) -> bytes | memoryview:
        """Return the payload out of the bytes of the sample's ranges. Raises SourceError."""
        arrays = self._stored[sample].items()
        return self.schema.join(
            {name: each.rows_of(data) for (name, each), data in zip(arrays, parts, strict=True)}
        )

    def _chunked(self) -> dict[str, list[ChunkedArray]]:
        return self._arrays


def _tell_of_one_hot(where: str, table: Mapping[str, Column], rows: int) -> None:
    """Warn once of columns of which one is 1 in each of the first rows, and the others are 0."""
    whole = {name: column for name, column in table.items() if column.kind == "int64"}
    values = {name: np.asarray(each.rows(0, min(rows, _PROBED))) for name, each in whole.items()}
    marks = {name: own for name, own in values.items() if set(own.tolist()) == {0, 1}}
    if len(marks) > 1 and (np.sum(list(marks.values()), 0) == 1).all():
        tell_once(
            f"{where}: its columns {', '.join(marks)} are one-hot; if they are the label, write "
            "its name or number into one column label (`targets` are 0)"
        )


def _tell_of_spaces(where: str, table: Mapping[str, Column], rows: int) -> None:
    """Warn once of a lone column of texts that are as many words as its name, and some of them
    numbers in each of the first rows."""
    (name, column), *others = table.items()
    words = name.split()
    if others or column.kind != "text" or len(words) < 2:
        return
    texts = column.rows(0, min(rows, _PROBED))
    values = [(each if isinstance(each, str) else bytes(each).decode()).split() for each in texts]
    if {len(each) for each in values} == {len(words)} and any(
        all(map(is_number, each)) for each in zip(*values, strict=True)
    ):
        tell_once(
            f"{where}: its lines are {len(words)} values with spaces between, and are read as one "
            "text: give separator=' ', or write commas if there are several spaces in a row"
        )


def _opened(place: FilePlace) -> File:
    """Return a table as a file that is read once, an array as one that stays open."""
    is_text = place.name.lower().endswith(_TEXTS)
    return place.opened() if is_text else place.opened_as(PersistentFile)


def _hint_of_files(table: FilePlace, arrays: Sequence[FilePlace]) -> str:
    """Return the words about a table whose first rows name files of arrays, which are its samples
    then, and not their rows; "" otherwise."""
    text = table.opened().read(0, _LOOKED_AT)
    known = named_in(text, [each.name for each in arrays])
    if not known:
        return ""
    return (
        f"; it names {known[0]} and {known[1]}: table={last_name(table.url)!r} reads each file as "
        "one sample with its label (label= chooses the column)"
    )


def _parts(
    path: str,
    files: Sequence[File],
    opened: Sequence[Mapping[str, Arrays]],
    names: Sequence[str],
    split: str | None,
) -> tuple[list[File], list[Mapping[str, Arrays]]]:
    """Return (file, its arrays by field) of each split that is read, and of files that lie side by
    side the arrays of all. Raises UsageError."""
    runs = [] if split or names else side_by_side([file.name for file in files])
    if runs:
        return (
            [files[run[0][1]] for run in runs],
            [joined_parts(path, [(part, opened[k]) for part, k in run]) for run in runs],
        )
    parts: list[tuple[File, Mapping[str, Arrays]]] = []
    for file, arrays in zip(files, opened, strict=True):
        parts += [(file, each) for each in chosen_arrays(file.name, arrays, split, names)]
    return [file for file, _ in parts], [arrays for _, arrays in parts]


def _array_columns(
    path: str,
    files: Sequence[File],
    opened: Sequence[Mapping[str, Arrays]],
    names: Sequence[str],
    select: Select,
    samples: Samples | None,
    label: str | None,
) -> tuple[dict[str, Column], int, bool]:
    """Return (arrays of some files as columns, their rows, True if each file is one row).

    Raises UsageError.
    """
    tables: list[dict[str, Column]] = []
    counts = []
    for file, arrays in zip(files, opened, strict=True):
        shapes = {name: array.shape for name, array in arrays.items()}
        chosen, count = choose(
            file.name, shapes, [name for name in names if name in shapes], label=label
        )
        counts.append(count)
        tables.append({name: _column_of(file, name, arrays[name], select) for name in chosen})
    volumes = volumes_of(path, tables, samples)
    if volumes is not None:
        return volumes, len(files), True
    if not names:
        shapes = {name: array.shape for name, array in opened[0].items()}
        check_groups(files[0].name, shapes)
    for file, table in zip(files, tables, strict=True):
        if _kinds(table) != _kinds(tables[0]):
            raise UsageError(
                f"{file.name} and {files[0].name} hold arrays of different names, types or shapes: "
                "open them one by one, or with samples='files' if each is one sample"
            )
    if len(files) == 1:
        return tables[0], counts[0], False
    joined = {name: ConcatColumn([table[name] for table in tables], counts) for name in tables[0]}
    return dict(joined), sum(counts), False


def _is_single(column: Column) -> bool:
    """True for single values, one a file, which have no chunks."""
    return isinstance(column, ConcatColumn) and column.is_single


def _column_of(file: File, name: str, array: Arrays, select: Select) -> Column:
    """Return an array as a column. Raises UsageError for several texts in a sample."""
    sides = tuple(array.shape[1:])
    if not array.shape:
        value = array.read(()) if isinstance(array, StoredArray) else array[()]
        return SingleValue(value, f"{file.name}::{name}")
    if array.dtype.kind not in "US":
        return PlainColumn(array, getattr(array, "unit", 1), slab(select, name, sides))
    if set(sides) - {1}:
        raise UsageError(
            f"{file.name}::{name} has texts of shape {tuple(array.shape)}, and a sample can have "
            "one: leave it out, by naming the others, as in x.npz::image,label"
        )
    return TextArrayColumn(array)


def _kinds(table: Mapping[str, Column]) -> dict[str, str]:
    return {name: column.kind for name, column in table.items()}
