"""The reader of NumPy files and text tables: `.npy`, `.npz`, `.csv`, `.tsv`; without pickle."""

import csv
import io
import json
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, cached_index
from dlio.data.source import File, expand, own_name, split_fields
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.storage.block import new_memory
from dlio_readers.columns import Column, ColumnReader, PlainColumn, Select, choose, slab
from dlio_readers.npy import NpyHead, read_npy_head

__all__ = ["TablesReader"]

_TEXTS: Final = (".csv", ".tsv")
_SUFFIXES: Final = (".npy", ".npz", *_TEXTS)
_HEAD_BYTES: Final = 1 << 12
_MAX_RAW: Final = 16 << 30
_MAX_LINE: Final = 1 << 24
_MAX_CLASSES: Final = 1 << 16


class TablesReader(ColumnReader):
    """Read the rows of NumPy arrays, or of a table whose first line names its columns.

    Arrays are read in place, some rows at a time; compressed arrays of a `.npz` are decompressed
    whole. Columns of a table are integers, floats or text. A text column `label` becomes classes in
    alphabetical order.

    Args:
        path: a file, with the names of arrays or columns after `::`: `x.npy`, `x.npz::x,y`,
            `x.csv`.
        select: part of every sample of an array to read.

    Raises SourceError for damaged files and arrays of objects, UsageError if the choice of arrays
    is ambiguous.
    """

    format = "tables"

    def __init__(self, path: str | Sequence[str], select: Select = None) -> None:
        self._given = path, select
        self.path = path if isinstance(path, str) else " ".join(path)
        paths = [path] if isinstance(path, str) else list(path)
        parts = [split_fields(each) for each in paths]
        names = next((names for _, names in reversed(parts) if names), ())
        urls = expand([url for url, _ in parts])
        if len(urls) > 1:
            raise UsageError(f"{self.path}: several tables: pack them, or name one")
        file = File(urls[0])
        stamps = [f"{file.url} {file.stamp}", repr(select)]
        lower = own_name(file.name)
        classes: list[str] = []
        columns: dict[str, Column]
        if lower.endswith(_TEXTS):
            columns, count, classes = _text_columns(file, names, lower.endswith(".tsv"))
        else:
            arrays = {"data": _npy(file)} if lower.endswith(".npy") else _npz(file)
            shapes = {name: array.shape for name, array in arrays.items()}
            chosen, count = choose(file.name, shapes, names)
            columns = {
                name: PlainColumn(arrays[name], 1, slab(select, name, arrays[name].shape[1:]))
                for name in chosen
            }
        self._setup(columns, count, stamps, classes)

    def __reduce__(self) -> tuple[Any, ...]:
        return TablesReader, self._given

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        ok = own_name(url).endswith(_SUFFIXES)
        return None if ok else f"does not end in {', '.join(_SUFFIXES)}"

    def close(self) -> None:
        pass


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


def _text_columns(
    file: File, names: Sequence[str], tabs: bool
) -> tuple[dict[str, Column], int, list[str]]:
    """Return (columns, number of rows, classes) of a table, from a cached index of its lines."""
    delimiter = "\t" if tabs else ","
    index = cached_index("table", 1, [file], lambda: _table_index(file, delimiter))
    head = json.loads(index["head"].tobytes())
    own = [name for name, _ in head["columns"]]
    for name in names:
        if name not in own:
            raise UsageError(f"{file.name} has no column {name!r}: it has {', '.join(own)}")
    columns: dict[str, Column] = {}
    for k, (name, kind) in enumerate(head["columns"]):
        if not names or name in names:
            classes = head["classes"] if name == "label" and head["classes"] else None
            columns[name] = _TextColumn(file, index, k, kind, delimiter, classes)
    return columns, len(index["starts"]) - 1, head["classes"]


class _TextColumn:
    """One column of a text table, parsed row by row when read."""

    unit = 1

    def __init__(
        self,
        file: File,
        index: Arrays,
        number: int,
        kind: str,
        delimiter: str,
        classes: list[str] | None,
    ) -> None:
        self._file, self._number, self._delimiter = file, number, delimiter
        self._starts = index["starts"]
        self._bodies = index["bodies"][:, number]
        self.kind = "int64" if classes else kind
        self._classes = {name: k for k, name in enumerate(classes)} if classes else None

    def bodies(self) -> npt.NDArray[np.int64] | None:
        return self._bodies if self.kind == "text" else None

    def rows(self, start: int, stop: int) -> Any:
        low, high = int(self._starts[start]), int(self._starts[stop])
        text = self._file.read(low, high - low).decode("utf-8")
        table = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter)
        values = [row[self._number] for row in table if row]
        if len(values) != stop - start:
            raise SourceError(f"{self._file.name} has changed since it was opened: run again")
        if self._classes is not None:
            return np.array([self._classes[value] for value in values], np.int64)
        if self.kind == "text":
            return values
        if self.kind == "float64":
            return np.array(values, np.float64)
        return np.array([int(value) for value in values], np.int64)


def _table_index(file: File, delimiter: str) -> Arrays:
    """Index the offsets of rows, the kinds of columns and the sizes of texts."""
    data = file.read()
    data = data.removeprefix(b"\xef\xbb\xbf") if data.startswith(b"\xef\xbb\xbf") else data
    shift = file.size - len(data)
    starts, rows = _rows(data, shift, delimiter, file.name)
    header, rows = rows[0], rows[1:]
    if not rows or len(set(header)) != len(header):
        raise SourceError(f"{file.name} needs a line of different names on top, and rows below")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise SourceError(
                f"{file.name}, row {number + 2}: {len(row)} values, where the first line names "
                f"{len(header)}"
            )
    columns = list(zip(*rows, strict=True))
    kinds = [_kind_of(column) for column in columns]
    classes: list[str] = []
    if "label" in header and kinds[header.index("label")] == "text":
        classes = sorted(set(columns[header.index("label")]))
        classes = classes if len(classes) <= _MAX_CLASSES else []
    head = {"columns": list(zip(header, kinds, strict=True)), "classes": classes}
    sizes = [[len(value.encode()) for value in row] for row in rows]
    return {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "starts": np.array(starts[1:], np.int64),
        "bodies": np.array(sizes, np.int64),
    }


def _rows(data: bytes, shift: int, delimiter: str, name: str) -> tuple[list[int], list[list[str]]]:
    """Return (offset of each row, followed by the end; the rows)."""
    starts, rows = [], []
    at = begin = shift
    lines = iter(data.splitlines(keepends=True))

    def feed() -> Any:
        nonlocal at
        for line in lines:
            if len(line) > _MAX_LINE:
                raise SourceError(f"{name}: a line of {len(line)} bytes is too long")
            at += len(line)
            yield line.decode("utf-8")

    try:
        for row in csv.reader(feed(), delimiter=delimiter, strict=True):
            if row:
                starts.append(begin)
                rows.append(row)
            begin = at
    except (csv.Error, UnicodeDecodeError) as error:
        raise SourceError(f"{name} at byte {begin}: {error}") from error
    if not rows:
        raise SourceError(f"{name} is empty")
    return [*starts, at], rows


def _kind_of(column: Sequence[str]) -> str:
    try:
        if all(abs(int(value)) < 2**63 for value in column):
            return "int64"
    except ValueError:
        pass
    try:
        for value in column:
            float(value)
    except ValueError:
        return "text"
    return "float64"
