"""The base class of readers of Arrow tables in groups of rows: Parquet files, Arrow files.

A group is decoded as a whole, and the last few are kept, for callers that read samples one by one.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, cached_index
from dlio.data.labels import LABEL_NAMES
from dlio.data.schema import DTYPES, Schema, array_kind
from dlio.data.source import File, ReadErrors
from dlio.errors import SourceError
from dlio.util.forks import new_rlock
from dlio.util.limits import check_claim, parsing
from dlio_readers.columns import looks_like
from dlio_readers.path_reader import PathReader, check_names, joined_rows, split_paths
from dlio_readers.rehearsal import note_opening, rehearse

# Columns of Arrow tables as fields of samples: kinds, sizes, and values of rows
#
# Columns of `struct<bytes, path>` or binary become images or bytes, depending on their content;
# strings become text, numbers and booleans scalars, lists of numbers arrays.

# pyarrow publishes no types.
ArrowType: TypeAlias = Any
"""A pyarrow.DataType."""
ArrowColumn: TypeAlias = Any
"""A pyarrow.ChunkedArray, or one of its chunks."""
ArrowTable: TypeAlias = Any
"""A pyarrow.Table."""
ArrowSchema: TypeAlias = Any
"""A pyarrow.Schema."""
Decoded: TypeAlias = Any
"""A column's values: a binary array of pyarrow, an array of rows, or (flat array, offsets)."""
_PROBES: Final = 8


class ColumnFacts:
    """Kind and sizes of a column, gathered over all row groups."""

    def __init__(self, name: str, kind: ArrowType) -> None:
        import pyarrow.types as t

        self._name = name
        self._type = kind
        self.bodies: list[npt.NDArray[np.int64]] = []
        self._lengths: set[int] = set()
        self._images: set[str] = set()
        inner = getattr(kind, "value_type", None)
        lists = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
        self._list = lists and _dtype(inner) is not None
        self._bytes = _is_bytes(kind) or (
            t.is_struct(kind) and any(f.name == "bytes" and _is_bytes(f.type) for f in kind)
        )
        self._text = t.is_string(kind) or t.is_large_string(kind)
        self.whole = bool(t.is_integer(kind))
        if not (self._list or self._bytes or self._text or _dtype(kind)):
            raise SourceError(
                f"column {name!r} is {kind}, which samples cannot have: name those to read, as in "
                "x.parquet::image,label"
            )

    def add(self, column: ArrowColumn, where: str) -> None:
        import pyarrow.compute as pc

        if self._bytes or self._text:
            plain = _bytes_of(column, where)
            self.bodies.append(np.asarray(pc.binary_length(plain)).astype(np.int64))
            step = max(1, len(plain) // _PROBES)
            if self._bytes:
                self._images |= {
                    looks_like(plain[k].as_buffer().to_pybytes()[:16])
                    for k in range(0, len(plain), step)
                }
            return
        _no_nulls(column, where)
        if self._list:
            lengths = np.asarray(pc.list_value_length(column)).astype(np.int64)
            self._lengths |= set(np.unique(lengths).tolist()[:2])
            width = np.dtype(_dtype(self._type.value_type)).itemsize
            self.bodies.append(lengths * width)

    def kind(self) -> str:
        if self._text:
            return "text"
        if self._bytes:
            if len(self._images) == 1:
                return next(iter(self._images))
            return "bytes" if "bytes" in self._images or not self._images else "image"
        if self._list:
            fixed = len(self._lengths) == 1
            size = next(iter(self._lengths)) if fixed else None
            return array_kind(str(_dtype(self._type.value_type)), (size,))
        return array_kind(str(_dtype(self._type)))


def _dtype(kind: Any) -> str | None:
    """numpy's name of an Arrow type; None if arrays of samples cannot have it."""
    try:
        name = np.dtype(kind.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        return None
    return name if name in DTYPES else None


def _is_bytes(kind: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind))


def _bytes_of(column: Any, where: str) -> Any:
    """Return a binary column; takes `bytes` out of a struct. Raises SourceError for nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as t

    plain = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(plain, pa.ChunkedArray):
        plain = plain.chunk(0) if plain.num_chunks else pa.array([], plain.type)
    if t.is_struct(plain.type):
        plain = pc.struct_field(plain, "bytes")
        if plain.null_count:
            raise SourceError(
                f"{where}: {plain.null_count} rows have a path and no bytes: embed the files"
            )
    _no_nulls(plain, where)
    if t.is_string(plain.type) or t.is_fixed_size_binary(plain.type):
        plain = plain.cast(pa.binary())
    elif t.is_large_string(plain.type):
        plain = plain.cast(pa.large_binary())
    return plain


def _no_nulls(column: Any, where: str) -> None:
    if column.null_count:
        raise SourceError(f"{where}: {column.null_count} values are null: fill or drop those rows")


def decoded(column: ArrowColumn, kind: str, where: str) -> Decoded:
    """Decode a column: binary, an array of rows, or (flat array, offsets)."""
    if "[" not in kind and kind not in DTYPES:
        return _bytes_of(column, where)
    _no_nulls(column, where)
    if "[" in kind:
        plain = column.combine_chunks()
        plain = plain.chunk(0) if hasattr(plain, "num_chunks") else plain
        flat = np.asarray(plain.flatten())
        if kind.endswith("[?]"):
            offsets = np.asarray(plain.offsets).astype(np.int64)
            return flat, offsets - offsets[0]
        return flat.reshape(len(column), -1)
    return np.asarray(column)


def take(column: Decoded, rows: npt.NDArray[np.int64]) -> Decoded:
    """Pick rows of a column that `decoded` returned."""
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, tuple):
        flat, offsets = column
        return [flat[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    return [memoryview(column[row].as_buffer()) for row in rows.tolist()]


def class_names(schema: ArrowSchema, label: str | None) -> list[str]:
    """Read the names of classes from Hugging Face's metadata."""
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


# Samples in groups of rows

_VERSION: Final = 1
_KEPT_BYTES: Final = 64 << 20


class GroupedFile(Protocol):
    """A file of groups of rows, open."""

    schema: ArrowSchema
    count: int
    """Number of groups."""

    def check(self, group: int, names: Sequence[str]) -> int:
        """Return the rows of a group, if its columns take plausible memory. Raises SourceError."""

    def table(self, group: int, names: Sequence[str]) -> ArrowTable:
        """Read columns of a group as an Arrow table. Any error names no file."""

    def close(self) -> None:
        """Close the file."""


class RowGroupReader(PathReader):
    """Base class: samples are numbered in the order of files, groups and rows.

    A subclass calls `_setup`.
    """

    format: str
    labels: npt.NDArray[np.int64]

    def _setup(
        self,
        path: str | Sequence[str],
        files: Sequence[str],
        open_file: Callable[[File], GroupedFile],
    ) -> None:
        """Index the files that a path stands for, or take their index from the cache; `open_file`
        opens one of them with the library.
        """
        self._open_file = open_file
        names = split_paths(path)[1]
        self._files = [File(url) for url in files]
        rehearse(self.format, "pyarrow", path, self._files)
        self._opened: dict[int, GroupedFile] = {}
        self._lock = new_rlock()
        self._kept: OrderedDict[tuple[int, int], tuple[dict[str, Any], int]] = OrderedDict()
        kind = f"{self.format}-" + ("-".join(names)[:64].replace("/", "_") or "all")
        index = cached_index(kind, _VERSION, self._files, lambda: self._build(names))
        head = json.loads(index["head"].tobytes())
        self.schema = Schema(tuple((name, kind) for name, kind in head["fields"]))
        self.classes: Sequence[str] = head["classes"]
        self._groups = index["groups"]
        self._starts = index["starts"]
        total = int(self._starts[-1])
        variable = [n for n, _ in self.schema.fields if not self.schema.kinds[n].fixed]
        bodies = {name: index["bodies"][:, k] for k, name in enumerate(variable)}
        self.labels = index["labels"]
        self.sizes = self.schema.payload_sizes(total, bodies)
        self._lay_out(_VERSION, self._files, self.sizes, self._starts[:-1])

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        groups = np.searchsorted(self._starts, samples, side="right") - 1
        for group in np.unique(groups).tolist():
            slots = np.flatnonzero(groups == group)
            rows = samples[slots] - self._starts[group]
            file = self._files[int(self._groups[group][0])]
            with parsing(f"{file.name}, row group {group},"):
                columns = self._group(group)
                picked = {name: take(column, rows) for name, column in columns.items()}
                joined = joined_rows(self.schema, len(rows), picked)
            for slot, payload in zip(slots.tolist(), joined, strict=True):
                payloads[slot] = payload
        return payloads

    def close(self) -> None:
        with self._lock:
            for file in self._opened.values():
                file.close()
            self._opened.clear()
            self._kept.clear()

    def _group(self, number: int) -> dict[str, Any]:
        """Return the decoded columns of a row group, from a cache of the last few.

        Only one thread decodes a row group; others wait for it.
        """
        file, group = (int(part) for part in self._groups[number])
        with self._lock:
            kept = self._kept.get((file, group))
            if kept is not None:
                self._kept.move_to_end((file, group))
                return kept[0]
            table = self._read_group(file, group, [name for name, _ in self.schema.fields])
            columns = {
                name: decoded(table.column(name), kind, self._where(file, group, name))
                for name, kind in self.schema.fields
            }
            self._kept[file, group] = columns, table.nbytes
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return columns

    def _read_group(self, file: int, group: int, names: Sequence[str]) -> Any:
        with ReadErrors(f"{self._files[file].name}, row group {group},"):
            return self._open(file).table(group, list(names))

    def _open(self, number: int) -> GroupedFile:
        with self._lock:
            if number not in self._opened:
                file = self._files[number]
                note_opening(file.name)
                self._opened[number] = self._open_file(file)
            return self._opened[number]

    def _where(self, file: int, group: int, name: str) -> str:
        return f"{self._files[file].name}, row group {group}, column {name!r}"

    def _build(self, names: Sequence[str]) -> Arrays:
        """Index sizes and labels of all rows; reads all chosen columns once."""
        first = self._open(0).schema
        chosen = list(names) or first.names
        check_names(self._files[0].name, chosen, first.names, "column")
        groups, counts = [], []
        for number in range(len(self._files)):
            opened = self._open(number)
            if not opened.schema.equals(first, check_metadata=False):
                raise SourceError(
                    f"{self._files[number].name} has other columns than {self._files[0].name}"
                )
            for group in range(opened.count):
                groups.append((number, group))
                counts.append(opened.check(group, chosen))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Equal values take next to nothing in a file, and their sizes and labels do in memory.
        stored = sum(file.size for file in self._files)
        check_claim(8 * int(starts[-1]), stored, self.path)
        if not starts[-1]:
            raise SourceError(f"{self.path} holds no rows")
        facts = {name: ColumnFacts(name, first.field(name).type) for name in chosen}
        label = next((name for name in LABEL_NAMES if name in facts and facts[name].whole), None)
        labels = []
        for number, group in groups:
            table = self._read_group(number, group, chosen)
            for name, each in facts.items():
                each.add(table.column(name), self._where(number, group, name))
            if label is not None:
                labels.append(np.asarray(table.column(label)).astype(np.int64))
        fields = [(name, each.kind()) for name, each in facts.items()]
        bodies = [
            np.concatenate(each.bodies)
            for each in facts.values()
            if not Schema((("x", each.kind()),)).is_fixed
        ]
        total = int(starts[-1])
        head = {"fields": fields, "classes": class_names(first, label)}
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "groups": np.array(groups, np.int64),
            "starts": starts,
            "bodies": np.stack(bodies, 1) if bodies else np.zeros((total, 0), np.int64),
            "labels": np.concatenate(labels) if labels else np.zeros(total, np.int64),
        }
