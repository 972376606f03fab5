"""The base class of readers of Arrow tables in groups of rows: Parquet files, Arrow files.

A group is decoded as a whole, and the last few are kept, for callers that read samples one by one.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.index import Arrays, cached_index
from dlio.data.labels import (
    LabelColumn,
    check_label,
    field_named,
    first_labels,
    is_index,
    label_name,
    label_names,
    not_scalar,
    with_label,
)
from dlio.data.schema import DTYPES, Schema, array_kind, parse_kind
from dlio.data.source import File, FilePlace, ReadErrors, last_name
from dlio.errors import SourceError
from dlio.util.forks import new_rlock
from dlio.util.limits import check_claim, parsing, trusting
from dlio.util.printable import tell_once
from dlio.util.structured_text import parse_json
from dlio.util.units import counted
from dlio_readers.columns import HEAD_BYTES, looks_like
from dlio_readers.feature_columns import FEATURES, NUMBER, feature_names
from dlio_readers.path_reader import PathReader, check_names, joined_rows, split_paths
from dlio_readers.rehearsal import note_opening, rehearse

# Columns of Arrow tables as fields of samples: kinds, sizes, and values of rows
#
# Columns of `struct<bytes, path>` or binary become images or bytes, depending on their content;
# strings become text, lists of strings JSON, numbers and booleans scalars, lists of numbers arrays,
# of as many dimensions as they are deep. A number that is missing is NaN, and makes whole numbers
# floats.

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
"""A column's values: a binary array of pyarrow, an array of rows, or (flat array, ends, shapes)."""
_PROBES: Final = 8
_DIGITS: Final = 18
"""Decimal digits that a whole number of 64 bits surely holds."""
_HUDI: Final = "_hoodie_commit_time"
_NARROW: Final = 1 << 30
"""Bytes up to which offsets of 32 bits are left as they are."""


class ColumnFacts:
    """Kind and sizes of a column, gathered over all row groups."""

    def __init__(self, name: str, kind: ArrowType, where: str) -> None:
        import pyarrow.types as t

        self._name = name
        kind = _plain_type(kind)
        self.bodies: list[npt.NDArray[np.int64]] = []
        self._sides: list[set[int]] = []
        """Different sizes of each dimension, two of them at most."""
        self._images: set[str] = set()
        self._nulls = False
        inner, self._depth = _inner_type(kind)
        self._dtype = _dtype(inner)
        self._bytes = not self._depth and (
            _is_bytes(kind)
            or (t.is_struct(kind) and any(f.name == "bytes" and _is_bytes(f.type) for f in kind))
        )
        self.is_text = not self._depth and _is_text(kind)
        self.is_list_of_texts = self._depth > 0 and _is_text(inner)
        self.whole = bool(t.is_integer(kind))
        self.named = False
        """True if its texts are classes."""
        self.odd = ""
        """The type of values that samples cannot have; "" for others."""
        if not (self._bytes or self.is_text or self.is_list_of_texts or self._dtype):
            if t.is_struct(kind) and {"bytes", "path"} <= {each.name for each in kind}:
                raise SourceError(
                    f"{where}: its column {name!r} has paths of files and no bytes: write the "
                    "files' bytes there, or open their folder"
                )
            self.odd = str(kind)

    def add(self, column: ArrowColumn, where: str) -> None:
        """Look at the column's values in a row group, as `plain_values` returns them."""
        import pyarrow.compute as pc

        if self._bytes or self.is_text or self.is_list_of_texts:
            plain = _bytes_of(column, where, self.is_text)
            self.bodies.append(np.asarray(pc.binary_length(plain)).astype(np.int64))
            step = max(1, len(plain) // _PROBES)
            if self._bytes:
                self._images |= {
                    looks_like(plain[k].as_buffer().to_pybytes()[:HEAD_BYTES])
                    for k in range(0, len(plain), step)
                }
            return
        flat, shapes = _arrays_of(column, where)
        self._nulls = self._nulls or bool(flat.null_count)
        if self._depth:
            self._sides = self._sides or [set() for _ in range(self._depth)]
            for sides, sizes in zip(self._sides, shapes.T, strict=True):
                sides |= set(np.unique(sizes).tolist()[:2])
            self.bodies.append(shapes.prod(axis=1))

    def kind(self) -> str:
        if self.named:
            return "int64"  # Of classes, or of numbers that are written as texts.
        if self.is_text or self.is_list_of_texts:
            return "text" if self.is_text else "json"
        if self._bytes:
            if len(self._images) == 1:
                return next(iter(self._images))
            return "bytes" if "bytes" in self._images or not self._images else "image"
        assert self._dtype is not None
        dtype = np.dtype(self._dtype)
        if self._nulls and dtype.kind != "f":
            dtype = np.dtype(np.float64)  # Whose NaN stands for a missing number, as in pandas.
        sides = [next(iter(each)) if len(each) == 1 else None for each in self._sides]
        return array_kind(dtype, sides)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of all values, shape (rows,), of a kind whose values differ in size."""
        dtype = parse_kind(self.kind()).dtype
        return np.concatenate(self.bodies) * (1 if dtype is None else dtype.itemsize)


def _dtype(kind: Any) -> str | None:
    """numpy's name of an Arrow type; None if arrays of samples cannot have it."""
    try:
        name = np.dtype(kind.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        return None
    return name if name in DTYPES else None


def _is_bytes(kind: Any) -> bool:
    import pyarrow.types as t

    return bool(
        t.is_binary(kind)
        or t.is_large_binary(kind)
        or t.is_fixed_size_binary(kind)
        or t.is_binary_view(kind)
    )


def _is_text(kind: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as t

    views = (t.is_list_view, t.is_large_list_view)
    kinds = (t.is_list, t.is_large_list, t.is_fixed_size_list, *views)
    return any(is_kind(kind) for is_kind in kinds)


def _plain_type(kind: Any) -> Any:
    """Return the type of the values that a dictionary or an extension type, such as Hugging Face's
    Array2D, stands for; of numbers for decimal ones, and for a column in which all are missing."""
    import pyarrow as pa
    import pyarrow.types as t

    while _is_coded(kind):
        if isinstance(kind, pa.FixedShapeTensorType):
            if kind.permutation not in (None, list(range(len(kind.shape)))):
                return kind
            inner = kind.value_type
            for side in reversed(kind.shape):
                inner = pa.list_(inner, side)
            return inner
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    if t.is_decimal(kind) and kind.scale == 0 and kind.precision <= _DIGITS:
        return pa.int64()
    return pa.float64() if t.is_decimal(kind) or t.is_null(kind) else kind


def _is_coded(kind: Any) -> bool:
    """True for a type that stands for values of another one."""
    import pyarrow as pa
    import pyarrow.types as t

    is_extension = isinstance(kind, pa.BaseExtensionType)
    return is_extension or t.is_dictionary(kind) or t.is_run_end_encoded(kind)


def _dictionary_of_runs(array: Any) -> Any:
    """Return an array of runs with its values as a dictionary, whose size can be checked."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pa.array(np.arange(len(array.values), dtype=np.int32))
    runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, numbers)
    indices = pc.run_end_decode(runs.slice(array.offset, len(array)))
    return pa.DictionaryArray.from_arrays(indices, array.values)


def _storage(array: Any) -> Any:
    """Return the values that an array of an extension type stands for; see `_plain_type`."""
    import pyarrow as pa

    storage, kind = array.storage, array.type
    if not isinstance(kind, pa.FixedShapeTensorType) or storage.null_count:
        return storage
    values = storage.flatten()
    for side in reversed(kind.shape):
        values = pa.FixedSizeListArray.from_arrays(values, side)
    return values


def _inner_type(kind: Any) -> tuple[Any, int]:
    """Return the type of the numbers in lists, and how deep they are nested."""
    depth = 0
    while _is_list(kind):
        kind, depth = _plain_type(kind.value_type), depth + 1
    return kind, depth


def plain_values(column: ArrowColumn, stored: int, where: str) -> ArrowColumn:
    """Return a column as one array of plain values: without dictionaries, extensions and parts, and
    lists of texts as JSON.

    `stored` is the size of the column's group in the file. Raises SourceError if repeated values of
    a dictionary become implausibly many bytes.
    """
    import pyarrow as pa
    import pyarrow.types as t

    chunks, claimed = [], 0
    for chunk in column.chunks:
        plain = chunk
        while _is_coded(plain.type):
            if t.is_run_end_encoded(plain.type):
                plain = _dictionary_of_runs(plain)
            if t.is_dictionary(plain.type):
                values, size = plain.dictionary, 0
                if _is_text(values.type) or _is_bytes(values.type):
                    size = expanded_bytes(plain)
                    claimed += size
                    check_claim(claimed, stored, where)
                plain = _wide(values, size).take(plain.indices)
            else:
                plain = _storage(plain)
        if t.is_decimal(plain.type) or t.is_null(plain.type):
            plain = plain.cast(_plain_type(plain.type))
        if t.is_struct(plain.type):
            plain = plain.flatten()[plain.type.get_field_index("bytes")]
        if _is_list(plain.type) and _is_text(_inner_type(plain.type)[0]):
            claimed += expanded_bytes(plain)
            check_claim(claimed, stored, where)
            plain = _as_json(plain, where)
        chunks.append(_wide(plain, column.nbytes))
    if not chunks:
        return pa.array([], _plain_type(column.type))
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _as_json(values: ArrowColumn, where: str) -> ArrowColumn:
    """Return lists of texts, or such texts, as JSON. A missing text is empty, as in other columns.

    Raises SourceError for a missing list.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_list(values.type):
        if values.null_count:
            raise _missing(values, where, "list: write an empty one")
        sizes = np.asarray(pc.list_value_length(values)).astype(np.int64)
        inner = _as_json(values.flatten(), where)
        lists = pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(sizes)]), inner)
        comma, begin, end, nothing = (pa.scalar(each, inner.type) for each in (",", "[", "]", ""))
        return pc.binary_join_element_wise(begin, pc.binary_join(lists, comma), end, nothing)
    # Encoded once each, as values of Python are large.
    coded = _storage(values) if isinstance(values.type, pa.BaseExtensionType) else values
    coded = coded if pa.types.is_dictionary(coded.type) else coded.dictionary_encode()
    texts = [json.dumps(text or "", ensure_ascii=False) for text in coded.dictionary.to_pylist()]
    return pc.fill_null(pa.array(texts, pa.large_string()).take(coded.indices), '""')


def _wide(array: Any, total: int) -> Any:
    """Return texts or bytes with offsets of 64 bits if they are `total` bytes together, and 32 bits
    do not reach."""
    import pyarrow as pa
    import pyarrow.types as t

    views = t.is_string_view(array.type) or t.is_binary_view(array.type)
    if views or (total > _NARROW and (t.is_string(array.type) or t.is_binary(array.type))):
        return array.cast(pa.large_binary())
    return array


def expanded_bytes(values: ArrowColumn) -> int:
    """Return the bytes of texts or bytes, perhaps in structs or lists, without those of a
    dictionary."""
    import pyarrow.compute as pc
    import pyarrow.types as t

    while t.is_struct(values.type) or _is_list(values.type):
        values = values.field(0) if t.is_struct(values.type) else values.flatten()
    if not t.is_dictionary(values.type):
        return int(values.nbytes)
    # Views have no lengths of their own.
    lengths = pc.fill_null(pc.binary_length(_wide(values.dictionary, 0)), 0)
    counts = np.bincount(
        np.asarray(values.indices.drop_null()).astype(np.int64), minlength=len(lengths)
    )
    # Whole numbers of Python, which do not overflow.
    return sum(n * size for n, size in zip(counts.tolist(), lengths.to_pylist(), strict=True))


def _bytes_of(plain: Any, where: str, text: bool) -> Any:
    """Return texts or bytes as binary values; a missing text is empty, as in tables of text.

    Raises SourceError for missing bytes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as t

    if plain.null_count and text:
        plain = pc.fill_null(plain, "")
    if plain.null_count:
        raise _missing(plain, where, "bytes: embed the files")
    if t.is_binary(plain.type) or t.is_large_binary(plain.type):
        return plain
    wide = t.is_large_string(plain.type) or plain.nbytes > _NARROW
    return plain.cast(pa.large_binary() if wide else pa.binary())


def _missing(values: Any, where: str, lacking: str) -> SourceError:
    first = int(np.flatnonzero(np.asarray(values.is_null()))[0])
    return SourceError(
        f"{where}: {counted(values.null_count, 'row')}, the first of them row {first}, without "
        f"{lacking}, or drop those rows"
    )


def _arrays_of(plain: Any, where: str) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return the numbers of nested lists one after another, and the shape of each row's array.

    The shapes are of shape (rows, depth). Raises SourceError for lists of lists of different
    lengths.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(plain.type, pa.BaseExtensionType):
        plain = _storage(plain)
    if not _is_list(plain.type):
        return plain, np.zeros((len(plain), 0), np.int64)
    if plain.null_count:
        raise _missing(plain, where, "list: write an empty one")
    sizes = np.asarray(pc.list_value_length(plain)).astype(np.int64)
    flat, inner = _arrays_of(plain.flatten(), where)
    shapes = np.zeros((len(sizes), 1 + inner.shape[1]), np.int64)
    shapes[:, 0] = sizes
    if inner.shape[1] and len(inner):
        full = np.flatnonzero(sizes)
        starts = (np.cumsum(sizes) - sizes)[full]
        shapes[full, 1:] = np.maximum.reduceat(inner, starts)
        if (np.minimum.reduceat(inner, starts) != shapes[full, 1:]).any():
            raise SourceError(
                f"{where}: its lists of lists differ in length within a row, which arrays cannot: "
                "pad them, or name the other columns to read, as in x.parquet::image,label"
            )
    return flat, shapes


def decoded(plain: ArrowColumn, kind: str, where: str) -> Decoded:
    """Decode plain values: binary, an array of rows, or (flat array, ends, shapes)."""
    import pyarrow as pa

    if "[" not in kind and kind not in DTYPES:
        return _bytes_of(plain, where, kind == "text")
    flat, shapes = _arrays_of(plain, where)
    parsed = parse_kind(kind)
    if flat.null_count and pa.types.is_boolean(flat.type):
        flat = flat.cast(pa.float64())
    numbers = np.asarray(flat).astype(parsed.dtype, copy=False)
    if parsed.fixed:
        return numbers.reshape(len(plain), *[size or 0 for size in parsed.shape])
    return numbers, np.concatenate([[0], np.cumsum(shapes.prod(axis=1))]), shapes


def take(column: Decoded, rows: npt.NDArray[np.int64]) -> Decoded:
    """Pick rows of a column that `decoded` returned."""
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, tuple):
        flat, ends, shapes = column
        return [flat[ends[row] : ends[row + 1]].reshape(shapes[row]) for row in rows.tolist()]
    return [memoryview(column[row].as_buffer()) for row in rows.tolist()]


def class_names(schema: ArrowSchema) -> dict[str, list[str]]:
    """Read the names of classes, by column, from Hugging Face's metadata."""
    try:
        about = parse_json((schema.metadata or {})[b"huggingface"], "its metadata of Hugging Face")
        features = about["info"]["features"]
        named = {
            str(column): feature["names"]
            for column, feature in features.items()
            if isinstance(feature, dict) and isinstance(feature.get("names"), list)
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {column: [str(name) for name in names] for column, names in named.items()}


# Samples in groups of rows

PARTITION: Final = re.compile(r"([A-Za-z_]\w*)=([^?&=]*)", re.ASCII)
_VERSION: Final = 4
_KEPT_BYTES: Final = 64 << 20
_LONGEST_LABEL: Final = 1 << 12
"""Bytes of the longest bytes that may be a label's text."""
_MATRIX: Final = "float32"
_LISTS: Final = "is a list, of several labels or one-hot"


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
        files: Sequence[FilePlace],
        open_file: Callable[[File], GroupedFile],
        added: Sequence[str] = (),
        partitions: Collection[str] = (),
        label: str | None = None,
        features: Sequence[str] | str | None = None,
    ) -> None:
        """Index the files that a path stands for, or take their index from the cache; `open_file`
        opens one of them with the library, with the columns `added` of folders `partitions`. The
        column that the user chose by `label` becomes the field of that name. Columns `features`
        become one array, and of the others the label and those that the path names are read.
        """
        self._open_file = open_file
        names = with_label(split_paths(path)[1], label)
        parts = {part for each in files for part in each.url.split("/")[:-1]}
        if parts := {part for part in parts if PARTITION.fullmatch(part)} - {*partitions}:
            tell_once(
                f"{min(parts)} and the like are columns in names of folders (Hive's partitions), "
                "which are not read: write them into the files"
            )
        self._files = [each.opened() for each in files]
        rehearse(
            self.format,
            "pyarrow",
            path,
            self._files,
            {k: v for k, v in (("label", label), ("columns", features)) if v is not None} or None,
        )
        self._opened: dict[int, GroupedFile] = {}
        self._lock = new_rlock()
        self._kept: OrderedDict[tuple[int, int], tuple[dict[str, Any], int]] = OrderedDict()
        about = repr((names, list(added), label, *([] if features is None else [features])))
        kind = f"{self.format}-{xxhash.xxh3_64_hexdigest(about.encode('utf-8', 'surrogateescape'))}"
        build = partial(self._build, names, label, features)
        index = cached_index(kind, _VERSION, self._files, build)
        head = json.loads(index["head"].tobytes())
        self._columns = [(name, kind) for name, kind in head["fields"]]
        self._matrix: list[str] = head["matrix"]
        self._label = label
        self.schema = Schema(
            tuple((field_named(name, label), kind) for name, kind in self._columns)
        )
        if any(name == _HUDI for name, _ in self._columns):
            tell_once(
                f"{self.path}: {_HUDI} is a column of Hudi's tables, in whose folder rows of "
                "earlier versions lie as well: write the last one by Spark or hudi's own reader"
            )
        self.classes: Sequence[str] = head["classes"]
        self._groups = index["groups"]
        self._starts = index["starts"]
        total = int(self._starts[-1])
        variable = [n for n, _ in self.schema.fields if not self.schema.kinds[n].fixed]
        bodies = {name: index["bodies"][:, k] for k, name in enumerate(variable)}
        self.labels = index["labels"]
        self._named: str | None = head["named"]
        """The label's field, if it is text in the file."""
        self.unlabelled = head["unlabelled"]
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
                picked = {field_named(name, self._label): each for name, each in picked.items()}
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
            fields = [column for column in self._columns if column[0] != self._named]
            read = [name for name, _ in fields or self._columns]
            if self._matrix:  # Otherwise it is a column of the table.
                read.remove(FEATURES)
                read += [name for name in self._matrix if name not in read]
            table = self._read_group(file, group, read)
            where = partial(self._where, file, group)

            def values(name: str, kind: str) -> Any:
                return decoded(self._plain(table, file, group, name), kind, where(name))

            columns = {
                name: np.stack([values(each, _MATRIX) for each in self._matrix], 1)
                if self._matrix and name == FEATURES
                else values(name, kind)
                for name, kind in fields
            }
            self._kept[file, group] = columns, table.nbytes
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return columns

    def _read_group(self, file: int, group: int, names: Sequence[str]) -> Any:
        where = f"{self._files[file].name}, row group {group},"
        self._files[file].check()
        with ReadErrors(where), trusting(self.trusted):
            return self._open(file).table(group, list(names))

    def _plain(self, table: ArrowTable, file: int, group: int, name: str) -> Any:
        where, stored = self._where(file, group, name), self._files[file].size
        return plain_values(table.column(name), stored, where)

    def _open(self, number: int) -> GroupedFile:
        with self._lock:
            if number not in self._opened:
                file = self._files[number]
                note_opening(file.name)
                with trusting(self.trusted):
                    self._opened[number] = self._open_file(file)
            return self._opened[number]

    def _where(self, file: int, group: int, name: str) -> str:
        return f"{self._files[file].name}, row group {group}, column {name!r}"

    def _check_columns(self, number: int, first: ArrowSchema, chosen: Sequence[str]) -> None:
        """Raise SourceError if a file has other columns than the first one, of the chosen ones if
        some are; their order does not count."""
        own, theirs = (
            {field.name: field.type for field in schema}
            for schema in (self._open(number).schema, first)
        )
        if len(own) < len(self._open(number).schema.names):
            names = Counter(self._open(number).schema.names).most_common(1)
            raise SourceError(
                f"{self._files[number].name} has several columns {names[0][0]!r}: give each a name "
                "of its own"
            )
        for name in chosen or {**theirs, **own}:
            kinds = [each.get(name, "missing") for each in (own, theirs)]
            if kinds[0] != kinds[1]:
                raise SourceError(
                    f"{self._files[number].name} has other columns than {self._files[0].name}: "
                    f"{name} is {kinds[0]} in it, and {kinds[1]} there; make them alike"
                )

    def _build(
        self, names: Sequence[str], label: str | None, features: Sequence[str] | str | None
    ) -> Arrays:
        """Index sizes and labels of all rows; reads all chosen columns once."""
        first = self._open(0).schema
        chosen = list(names) or first.names
        matrix: list[str] = []
        if features is not None:
            own = label_name(first.names, label) or next(iter(class_names(first)), None)
            chosen = [name for name in first.names if name in names or name == own]
            kinds = {each.name: _matrix_kind(each.type) for each in first}
            matrix = feature_names(self._files[0].name, kinds, own, features, chosen)
        check_names(self._files[0].name, list(names) or chosen, first.names, "column")
        check_label(self._files[0].name, chosen, label)
        groups, counts = [], []
        for number in range(len(self._files)):
            opened = self._open(number)
            self._check_columns(number, first, [*chosen, *matrix] if names or matrix else ())
            for group in range(opened.count):
                groups.append((number, group))
                counts.append(opened.check(group, [*chosen, *matrix]))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Equal values take next to nothing in a file, and their sizes and labels do in memory.
        stored = sum(file.size for file in self._files)
        check_claim(8 * int(starts[-1]), stored, self.path)
        if not starts[-1]:
            raise SourceError(f"{self.path} holds no rows")
        where = self._files[0].name
        facts = {name: ColumnFacts(name, first.field(name).type, where) for name in chosen}
        if odd := [f"{name} ({each.odd})" for name, each in facts.items() if each.odd]:
            others = [name for name, each in facts.items() if not each.odd and not is_index(name)]
            shown = f"{last_name(where)}::{','.join(others)}"
            remedy = f"name the others, as in {shown}" if others else "store numbers or texts"
            raise SourceError(
                f"{where}: samples cannot have the values of its columns {', '.join(odd)}: {remedy}"
            )
        known = {name: names for name, names in class_names(first).items() if name in facts}
        likely = label_names(facts, label) or (list(known) if len(known) == 1 else [])
        labels = {name: LabelColumn(known.get(name, [])) for name in likely}
        for number, group in groups if facts else ():
            table = self._read_group(number, group, chosen)
            for name, each in facts.items():
                plain = self._plain(table, number, group, name)
                where = self._where(number, group, name)
                if name in labels:
                    if plain.null_count and name == likely[0] and (each.whole or each.is_text):
                        raise _missing(plain, where, "label: fill it")
                    if each.is_list_of_texts:
                        labels[name].refuse(_LISTS)
                    else:
                        _add_labels(labels[name], plain)
                each.add(plain, where)

        def row_of(row: int) -> str:
            k = int(np.searchsorted(starts, row, side="right")) - 1
            file, group = groups[k]
            name = self._files[file].name
            return f"{name}, row group {group}, row {row - int(starts[k])}"

        field, labelling = first_labels(labels, row_of)
        if field is not None:
            facts[field].named = (
                facts[field].is_text or parse_kind(facts[field].kind()).dtype is None
            )
        fields = [(FEATURES, f"float32[{len(matrix)}]")] if matrix else []
        fields += [(name, each.kind()) for name, each in facts.items()]
        bodies = [each.sizes() for each in facts.values() if not parse_kind(each.kind()).fixed]
        total = int(starts[-1])
        reason = labelling.reason
        if not likely and known:
            first_one = next(iter(known))
            reason = (
                f"its columns {', '.join(known)} are all class labels, and none is called label: "
                f"choose one with label={first_one!r}"
            )
        head = {
            "fields": fields,
            "matrix": matrix,
            "classes": labelling.classes,
            "named": field if field is not None and facts[field].named else None,
            "unlabelled": reason,
        }
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "groups": np.array(groups, np.int64),
            "starts": starts,
            "bodies": np.stack(bodies, 1) if bodies else np.zeros((total, 0), np.int64),
            "labels": np.zeros(total, np.int64) if labelling.numbers is None else labelling.numbers,
        }


def _matrix_kind(kind: ArrowType) -> str:
    """Return `NUMBER` for a type whose values can be numbers of an array, else its own name."""
    inner, depth = _inner_type(_plain_type(kind))
    return str(kind) if depth or _dtype(inner) is None else NUMBER


def _add_labels(labels: LabelColumn, column: ArrowColumn) -> None:
    """Add a group's values, as `plain_values` returns them."""
    import pyarrow.compute as pc

    if _is_text(column.type) or _is_bytes(column.type):
        longest = pc.max(pc.binary_length(column)).as_py() or 0
        if _is_bytes(column.type) and longest > _LONGEST_LABEL:
            labels.refuse(not_scalar(str(column.type)))
            return
        if column.null_count:
            column = pc.fill_null(column, "" if _is_text(column.type) else b"")
        coded = pc.dictionary_encode(column)
        try:
            own = [x.decode() if isinstance(x, bytes) else x for x in coded.dictionary.to_pylist()]
        except UnicodeDecodeError:
            labels.refuse(not_scalar(str(column.type)))
            return
        labels.add_codes(own, np.asarray(coded.indices).astype(np.int64))
        return
    kind, depth = _inner_type(column.type)
    values, is_single = column, True
    while _is_list(values.type):
        # As many values as rows may also be two of one row and none of the next.
        lengths = pc.list_value_length(values)
        is_single = is_single and lengths.null_count == 0 and pc.all(pc.equal(lengths, 1)).as_py()
        values = values.flatten()
    if not is_single or _dtype(kind) is None:
        labels.refuse(not_scalar(str(column.type)) if depth == 0 else _LISTS)
    elif values.null_count:
        labels.add_numbers(np.asarray(values.cast("float64")))
    else:
        labels.add_numbers(np.asarray(values))
