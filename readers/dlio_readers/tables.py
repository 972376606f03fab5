"""The reader of NumPy files and text tables: `.npy`, `.npz`, `.csv`, `.tsv`; without pickle."""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunks import ChunkedArray, plain_chunks
from dlio.data.reader import reopening
from dlio.data.source import File, Source, expand, files_below, own_name, split_fields
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.storage.block import new_memory
from dlio.util.limits import check_claim
from dlio_readers.columns import Column, ColumnReader, PlainColumn, choose
from dlio_readers.joined import JoinedColumn
from dlio_readers.npy import NpyHead, read_npy_head
from dlio_readers.ranges import ranged_array
from dlio_readers.slabs import Select, slab
from dlio_readers.texttable import open_text_tables
from dlio_readers.volumes import Samples, volumes_of

__all__ = ["TablesReader"]

_TEXTS: Final = (".csv", ".tsv")
_ARRAYS: Final = (".npy", ".npz")
_SUFFIXES: Final = (*_ARRAYS, *_TEXTS)
_HEAD_BYTES: Final = 1 << 12
_MAX_RAW: Final = 16 << 30


class TablesReader(ColumnReader):
    """Read the rows of NumPy arrays, or of tables whose first line names their columns.

    Arrays are read in place, some rows at a time; compressed arrays of a `.npz` are decompressed
    whole. Columns of a table are integers, floats or text; where a number is missing, the column's
    numbers are floats, and that one is NaN. A label that is text becomes classes in alphabetical
    order.

    Args:
        path: one or several files of one kind, with the names of arrays or columns after `::`:
            `x.npy`, `x.npz::x,y`, `x.csv`, `part-*.csv`.
        select: part of every sample of an array to read.
        columns: columns of a table to read as one float32 array, `features`, next to the label;
            "*" for all that are numbers.
        separator: character between the values of a table; found by the first line for None.
        samples: `rows`, or `files` if each file of arrays is one sample; None: files if there are
            several whose arrays are volumes of different shapes.

    Raises SourceError for damaged files and arrays of objects, UsageError if the choice of arrays
    is ambiguous.
    """

    format = "tables"

    def __init__(
        self,
        path: str | Sequence[str],
        select: Select = None,
        columns: Sequence[str] | str | None = None,
        separator: str | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._again = reopening(TablesReader, path, select, columns, separator, samples)
        self.path = path if isinstance(path, str) else " ".join(path)
        self._names: list[str] = []
        self._chunked: dict[str, list[ChunkedArray]] = {}
        paths = [path] if isinstance(path, str) else list(path)
        parts = [split_fields(each) for each in paths]
        names = next((names for _, names in reversed(parts) if names), ())
        files = [File(url) for url in _files_of([url for url, _ in parts])]
        stamps = [f"{file.url} {file.stamp}" for file in files]
        stamps += [repr(select), repr(columns), repr(separator)]
        texts = [own_name(file.name).endswith(_TEXTS) for file in files]
        if any(texts) != all(texts):
            raise UsageError(f"{self.path}: arrays and tables of text: open them one by one")
        if texts[0]:
            table = open_text_tables(files, names, separator, columns)
            self._setup(table.columns, table.count, stamps, table.classes, select=select)
            return
        if columns is not None or separator is not None:
            raise UsageError(f"columns= and separator= are for tables of text, not for {self.path}")
        opened = [_arrays_of(file) for file in files]
        arrays, count, volumes = _array_columns(self.path, files, opened, names, select, samples)
        self.files_are_samples = volumes
        if select is None:
            self._chunked = {
                name: [
                    _chunked(each[name], f"{file.name}::{name}")
                    for file, each in zip(files, opened, strict=True)
                ]
                for name in arrays
            }
        if count == len(files) > 1:
            self._names = [file.name.rsplit("/", 1)[-1] for file in files]
        self._setup(arrays, count, stamps, select=select)

    def name(self, sample: int) -> str:
        return self._names[sample] if self._names else super().name(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        ok = own_name(url).endswith(_SUFFIXES)
        source = Source(url)
        if not ok and source.is_folder():
            names = [name.lower() for name, folder in source.names() if not folder]
            here = {suffix for suffix in _SUFFIXES if any(n.endswith(suffix) for n in names)}
            if here and all(name.endswith(_SUFFIXES) for name in names):
                return None if here <= {".npy"} or here <= {".npz"} else "holds tables"
        return None if ok else f"does not end in {', '.join(_SUFFIXES)}"

    def close(self) -> None:
        pass

    def chunked(self) -> dict[str, list[ChunkedArray]]:
        """Return the arrays by field, one a file, for patches; see `dlio.data.chunks`."""
        return self._chunked


def _files_of(urls: Sequence[str]) -> list[str]:
    """Expand patterns; a folder becomes its arrays."""
    return files_below(urls, _ARRAYS) if any(Source(u).is_folder() for u in urls) else expand(urls)


def _array_columns(
    path: str,
    files: Sequence[File],
    opened: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    select: Select,
    samples: Samples | None,
) -> tuple[dict[str, Column], int, bool]:
    """Return (arrays of some files as columns, their rows, True if each file is one row).

    Raises UsageError.
    """
    tables: list[dict[str, Column]] = []
    counts = []
    for file, arrays in zip(files, opened, strict=True):
        shapes = {name: array.shape for name, array in arrays.items()}
        chosen, count = choose(file.name, shapes, names)
        counts.append(count)
        tables.append(
            {
                name: PlainColumn(arrays[name], 1, slab(select, name, arrays[name].shape[1:]))
                for name in chosen
            }
        )
    volumes = volumes_of(path, tables, samples)
    if volumes is not None:
        return volumes, len(files), True
    for file, table in zip(files, tables, strict=True):
        if _kinds(table) != _kinds(tables[0]):
            raise UsageError(
                f"{file.name} and {files[0].name} hold arrays of different names, types or shapes: "
                "open them one by one"
            )
    if len(files) == 1:
        return tables[0], counts[0], False
    joined = {name: JoinedColumn([table[name] for table in tables], counts) for name in tables[0]}
    return dict(joined), sum(counts), False


def _kinds(table: Mapping[str, Column]) -> dict[str, str]:
    return {name: column.kind for name, column in table.items()}


def _arrays_of(file: File) -> Mapping[str, Any]:
    """Return the arrays of a file by name."""
    return {"data": _npy(file)} if own_name(file.name).endswith(".npy") else _npz(file)


def _chunked(array: Any, where: str) -> ChunkedArray:
    """Return an array with parts of it in place of chunks."""
    if isinstance(array, _Stored):
        return array.chunked(where)
    sides = plain_chunks(array.shape, array.dtype.itemsize)
    return ChunkedArray(where, tuple(array.shape), array.dtype, sides, array.__getitem__)


class _Stored:
    """An uncompressed array in a file, read in place."""

    def __init__(self, file: File, head: NpyHead, start: int) -> None:
        if head.fortran and len(head.shape) > 1:
            raise SourceError(f"{file.name} is in Fortran order: write it in C order")
        self._file, self._start = file, start + head.offset
        self.shape = head.shape
        self.dtype = np.dtype(head.dtype)
        self._stored = np.dtype(head.descr)
        self._row = head.nbytes // max(1, head.shape[0]) if head.shape else head.nbytes

    def chunked(self, where: str) -> ChunkedArray:
        """Return the array with parts of it in place of chunks."""
        return ranged_array(self._file, where, self._start, self.shape, self._stored)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        parts = key if isinstance(key, tuple) else (key,)
        first, last, _ = parts[0].indices(self.shape[0])
        memory = new_memory(max(0, last - first) * self._row)
        self._file.read_into(self._start + first * self._row, memory)
        rows = np.frombuffer(memory, self._stored).reshape(last - first, *self.shape[1:])
        return rows[(slice(None), *parts[1:])].astype(self.dtype, copy=False)


def _npy(file: File) -> _Stored:
    return _Stored(file, _head(file.read(0, _HEAD_BYTES), file.size, file.name), 0)


def _head(data: bytes, size: int, name: str) -> NpyHead:
    try:
        return read_npy_head(memoryview(data), size)
    except CorruptBlock as error:
        raise SourceError(f"{name} {error}") from error


def _npz(file: File) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    try:
        with file.open() as stream, zipfile.ZipFile(stream) as archive:
            for member in archive.infolist():
                name = f"{file.name}::{member.filename}"
                if not member.filename.endswith(".npy"):
                    continue
                key = member.filename.removesuffix(".npy")
                if member.compress_type == zipfile.ZIP_STORED:
                    start = _data_start(file, member)
                    head = _head(file.read(start, _HEAD_BYTES), member.file_size, name)
                    arrays[key] = _Stored(file, head, start)
                    continue
                if member.file_size > _MAX_RAW:
                    raise SourceError(f"{name} of {member.file_size} bytes is too large")
                check_claim(member.file_size, member.compress_size, name)
                data = memoryview(archive.read(member))
                arrays[key] = _head(bytes(data[:_HEAD_BYTES]), len(data), name).array(data)
    except SourceError:
        raise
    except Exception as error:  # zipfile raises many kinds of errors for damaged files.
        raise SourceError(f"{file.name} is not a .npz file, or is damaged: {error}") from error
    return arrays


def _data_start(file: File, member: zipfile.ZipInfo) -> int:
    """Offset of an uncompressed member's data."""
    head = file.read(member.header_offset, 30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise SourceError(f"{file.name} is damaged at byte {member.header_offset}: restore it")
    name, extra = struct.unpack_from("<HH", head, 26)
    start = member.header_offset + 30 + int(name) + int(extra)
    if start + member.file_size > file.size:
        raise SourceError(f"{file.name} is cut off: restore it")
    return start
