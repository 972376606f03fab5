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
from dlio.data.labels import LABEL_NAMES, MAX_CLASSES, encode_labels, whole_labels
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

        kind = kind.value_type if t.is_dictionary(kind) else kind
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
        self.named = False
        """True if its texts are classes."""
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
        if self.named:
            return "int64"
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

_VERSION: Final = 2
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
        self._named: str | None = head["named"]
        """The field whose texts are classes."""
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
                if self._named is not None:
                    picked[self._named] = self.labels[samples[slots]]
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
            fields = [field for field in self.schema.fields if field[0] != self._named]
            table = self._read_group(
                file, group, [name for name, _ in fields or self.schema.fields]
            )
            columns = {
                name: decoded(table.column(name), kind, self._where(file, group, name))
                for name, kind in fields
            }
            self._kept[file, group] = columns, table.nbytes
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return columns

    def _read_group(self, file: int, group: int, names: Sequence[str]) -> Any:
        with ReadErrors(f"{self._files[file].name}, row group {group},"):
            return _without_dictionaries(self._open(file).table(group, list(names)))

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
        label = _LabelColumn(next((name for name in LABEL_NAMES if name in facts), None))
        for number, group in groups:
            table = self._read_group(number, group, chosen)
            for name, each in facts.items():
                each.add(table.column(name), self._where(number, group, name))
            if label.name is not None:
                label.add(table.column(label.name), self._where(number, group, label.name))
        numbers, classes = label.numbered()
        if label.name is not None and classes:
            facts[label.name].named = True
        fields = [(name, each.kind()) for name, each in facts.items()]
        bodies = [
            np.concatenate(each.bodies)
            for each in facts.values()
            if not Schema((("x", each.kind()),)).is_fixed
        ]
        total = int(starts[-1])
        head = {
            "fields": fields,
            "classes": classes or class_names(first, label.name),
            "named": label.name if classes else None,
        }
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "groups": np.array(groups, np.int64),
            "starts": starts,
            "bodies": np.stack(bodies, 1) if bodies else np.zeros((total, 0), np.int64),
            "labels": np.zeros(total, np.int64) if numbers is None else numbers,
        }


class _LabelColumn:
    """The labels of all rows, gathered over groups; `name` is None for tables without a label."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._numbers: list[npt.NDArray[np.int64]] = []
        self._texts: dict[str, int] = {}
        self._able = True

    def add(self, column: ArrowColumn, where: str) -> None:
        """Add a group's values. Raises SourceError for an empty text among names of classes."""
        import pyarrow.types as t

        if not self._able:
            return
        if t.is_string(column.type) or t.is_large_string(column.type):
            import pyarrow.compute as pc

            coded = pc.dictionary_encode(column.combine_chunks())
            coded = coded.chunk(0) if hasattr(coded, "num_chunks") else coded
            own = coded.dictionary.to_pylist()
            codes = np.array([self._texts.setdefault(x, len(self._texts)) for x in own], np.int64)
            self._able = len(self._texts) <= MAX_CLASSES
            rows = np.asarray(coded.indices).astype(np.int64)
            blank = np.flatnonzero(np.array([not x.strip() for x in own], bool)[rows])
            if self._able and len(blank):
                raise SourceError(
                    f"{where}, row {blank[0]}: its label is empty: fill it or drop the row, or "
                    "name the columns to read, as in x.parquet::a,b"
                )
            self._numbers.append(codes[rows] if len(own) else rows)
            return
        values = None
        if t.is_fixed_size_list(column.type) or t.is_list(column.type):
            plain = column.combine_chunks()
            plain = plain.chunk(0) if hasattr(plain, "num_chunks") else plain
            flat = plain.flatten()
            if len(flat) == len(plain) and not flat.null_count and _dtype(flat.type) is not None:
                values = whole_labels(np.asarray(flat))
        elif not column.null_count and _dtype(column.type) is not None:
            values = whole_labels(np.asarray(column))
        self._able = values is not None
        if values is not None:
            self._numbers.append(values)

    def numbered(self) -> tuple[npt.NDArray[np.int64] | None, list[str]]:
        """Return (labels, shape (rows,), or None without any; names of classes of texts)."""
        if not self._able or not self._numbers:
            return None, []
        numbers = np.concatenate(self._numbers)
        if not self._texts:
            return numbers, []
        encoding = encode_labels(self._texts)
        if encoding.missing:
            return None, []
        new = np.array([encoding.numbers[text] for text in self._texts], np.int64)
        return new[numbers], encoding.classes


def _without_dictionaries(table: ArrowTable) -> ArrowTable:
    """Return a table whose categories are their values."""
    import pyarrow.types as t

    for k, field in enumerate(table.schema):
        if t.is_dictionary(field.type):
            plain = table.column(k).cast(field.type.value_type)
            table = table.set_column(k, field.name, plain)
    return table
