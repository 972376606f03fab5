"""The reader of Parquet files, as Hugging Face data sets use them; decodes whole row groups."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, cached_index, fingerprint_of
from dlio.data.labels import LABEL_NAMES
from dlio.data.reader import reopening
from dlio.data.schema import DTYPES, Schema, array_kind
from dlio.data.source import File, Source, expand, files_below, own_name, split_fields
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio.util.arguments import nearest
from dlio.util.limits import check_claim, is_plausible, parsing
from dlio_readers.columns import looks_like
from dlio_readers.rehearsal import note_opening, rehearse

__all__ = ["ParquetReader"]

_SUFFIXES: Final = (".parquet", ".parq")
_VERSION: Final = 1
_KEPT_BYTES: Final = 64 << 20
_PROBES: Final = 8


class ParquetReader:
    """Read Parquet files. Samples are numbered in the order of files, row groups and rows.

    Columns of `struct<bytes, path>` or binary become images or bytes, depending on their content;
    strings become text, numbers and booleans scalars, lists of numbers arrays.

    Args:
        path: a file, a folder, a pattern or a list, with the names of columns after `::`.

    Raises SourceError for damaged files, nulls, and column types that samples cannot have.
    """

    format = "parquet"
    objects = False

    def __init__(self, path: str | Sequence[str]) -> None:
        self._again = reopening(ParquetReader, path)
        self.path = path if isinstance(path, str) else " ".join(path)
        paths = [path] if isinstance(path, str) else list(path)
        parts = [split_fields(each) for each in paths]
        names = next((names for _, names in reversed(parts) if names), ())
        self._files = [File(url) for url in files_below([url for url, _ in parts], _SUFFIXES)]
        rehearse("parquet", "pyarrow", path, self._files)
        self._opened: dict[int, Any] = {}
        self._lock = threading.RLock()
        self._kept: OrderedDict[tuple[int, int], tuple[dict[str, Any], int]] = OrderedDict()
        kind = "parquet-" + ("-".join(names)[:64].replace("/", "_") or "all")
        index = cached_index(kind, _VERSION, self._files, lambda: self._build(names))
        head = json.loads(index["head"].tobytes())
        self.schema = Schema(tuple((name, kind) for name, kind in head["fields"]))
        self.classes: Sequence[str] = head["classes"]
        self._groups = index["groups"]
        self._starts = index["starts"]
        total = int(self._starts[-1])
        variable = [n for n, _ in self.schema.fields if not self.schema.kinds[n].fixed]
        bodies = {name: index["bodies"][:, k] for k, name in enumerate(variable)}
        self.sizes = self.schema.payload_sizes(total, bodies)
        self.labels = index["labels"]
        units = self._starts[:-1]
        self.layout = cut_blocks(self.sizes, Order(total, 0, shuffled=False), units)
        stamps = [f"{file.url} {file.stamp}" for file in self._files]
        self.fingerprint = fingerprint_of(
            "parquet", _VERSION, self.schema.to_json(), *stamps, self.layout.starts
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        if own_name(url).endswith(_SUFFIXES):
            return None
        source = Source(url)
        if source.is_folder():
            names = [name for name, _ in source.names()]
            if any(name.lower().endswith(_SUFFIXES) for name in names):
                return None
        return "is neither a .parquet nor a folder of them"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def name(self, sample: int) -> str:
        return f"{sample:09d}"

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
                picked = {name: _take(column, rows) for name, column in columns.items()}
                if self.schema.is_fixed:
                    joined = self.schema.join_fixed(len(rows), picked)
                else:
                    joined = [
                        self.schema.join({name: values[k] for name, values in picked.items()})
                        for k in range(len(rows))
                    ]
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
                name: _decoded(table.column(name), kind, self._where(file, group, name))
                for name, kind in self.schema.fields
            }
            self._kept[file, group] = columns, table.nbytes
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return columns

    def _read_group(self, file: int, group: int, names: Sequence[str]) -> Any:
        try:
            return self._open(file).read_row_group(group, columns=list(names), use_threads=False)
        except Exception as error:
            raise SourceError(
                f"{self._files[file].name}, row group {group}, cannot be read: {error}"
            ) from error

    def _open(self, number: int) -> Any:
        with self._lock:
            if number not in self._opened:
                import pyarrow.parquet as pq

                file = self._files[number]
                note_opening(file.name)
                try:
                    self._opened[number] = pq.ParquetFile(file.local_path or file.open())
                except Exception as error:
                    raise SourceError(
                        f"{file.name} is not a Parquet file, or is damaged: {error}"
                    ) from error
            return self._opened[number]

    def _check_group(self, number: int, group: int, names: Sequence[str]) -> int:
        """Return the rows of a row group, which may take some memory for its stored bytes.

        Raises SourceError if the metadata are implausible.
        """
        metadata = self._open(number).metadata
        facts = metadata.row_group(group)
        columns = [facts.column(k) for k in range(facts.num_columns)]
        widths = {
            each.path_in_schema: max(_width(each), metadata.schema.column(k).length)
            for k, each in enumerate(columns)
        }
        columns = [each for each in columns if each.path_in_schema.split(".")[0] in names]
        declared = sum(
            max(each.num_values * widths[each.path_in_schema], each.total_uncompressed_size)
            for each in columns
        )
        if facts.num_rows < 0 or any(each.num_values < 0 for each in columns):
            raise SourceError(f"{self._files[number].name}: its metadata are damaged: restore it")
        stored = sum(max(0, each.total_compressed_size) for each in columns)
        stored = min(stored, self._files[number].size)
        check_claim(declared, stored, f"{self._files[number].name}, row group {group},")
        self._check_repeats(number, group, columns, stored)
        return int(facts.num_rows)

    def _check_repeats(self, number: int, group: int, columns: Sequence[Any], stored: int) -> None:
        """Check the texts and bytes of a row group that are stored once and stand in many rows.

        They are measured as indices into their dictionary, which take no memory for their repeats.

        Raises SourceError if they become implausibly many bytes.
        """
        where = f"{self._files[number].name}, row group {group},"
        paths = [
            each.path_in_schema
            for each in columns
            if each.physical_type == "BYTE_ARRAY"
            and any("DICTIONARY" in encoding for encoding in each.encodings)
            and not is_plausible(each.num_values * each.total_uncompressed_size, stored)
        ]
        if not paths:
            return
        import pyarrow.parquet as pq

        file = self._files[number]
        with (
            parsing(where),
            pq.ParquetFile(file.local_path or file.open(), read_dictionary=paths) as opened,
        ):
            for path in paths:
                column = opened.read_row_group(group, columns=[path], use_threads=False).column(0)
                check_claim(sum(map(_expanded, column.chunks)), stored, where)

    def _where(self, file: int, group: int, name: str) -> str:
        return f"{self._files[file].name}, row group {group}, column {name!r}"

    def _build(self, names: Sequence[str]) -> Arrays:
        """Index sizes and labels of all rows; reads all chosen columns once."""
        first = self._open(0).schema_arrow
        chosen = list(names) or first.names
        for name in chosen:
            if name not in first.names:
                raise UsageError(
                    f"{self._files[0].name} has no column {name!r}: it has {', '.join(first.names)}"
                    f"{nearest(name, first.names)}"
                )
        groups, counts = [], []
        for number in range(len(self._files)):
            opened = self._open(number)
            if not opened.schema_arrow.equals(first, check_metadata=False):
                raise SourceError(
                    f"{self._files[number].name} has other columns than {self._files[0].name}"
                )
            for group in range(opened.metadata.num_row_groups):
                groups.append((number, group))
                counts.append(self._check_group(number, group, chosen))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Equal values take next to nothing in a file, and their sizes and labels do in memory.
        stored = sum(file.size for file in self._files)
        check_claim(8 * int(starts[-1]), stored, self.path)
        if not starts[-1]:
            raise SourceError(f"{self.path} holds no rows")
        facts = {name: _ColumnFacts(name, first.field(name).type) for name in chosen}
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
        head = {"fields": fields, "classes": _class_names(first, label)}
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "groups": np.array(groups, np.int64),
            "starts": starts,
            "bodies": np.stack(bodies, 1) if bodies else np.zeros((total, 0), np.int64),
            "labels": np.concatenate(labels) if labels else np.zeros(total, np.int64),
        }


def _width(column: Any) -> int:
    """Return the bytes that a value takes in memory at least."""
    return {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}.get(column.physical_type, 8)


def _expanded(values: Any) -> int:
    """Return the bytes of texts or bytes, perhaps in structs, without those of a dictionary."""
    import pyarrow.compute as pc
    import pyarrow.types as t

    while t.is_struct(values.type):
        values = values.field(0)
    if not t.is_dictionary(values.type):
        return int(values.nbytes)
    lengths = pc.fill_null(pc.binary_length(values.dictionary), 0)
    counts = np.bincount(
        np.asarray(values.indices.drop_null()).astype(np.int64), minlength=len(lengths)
    )
    # Whole numbers of Python, which do not overflow.
    return sum(n * size for n, size in zip(counts.tolist(), lengths.to_pylist(), strict=True))


class _ColumnFacts:
    """Kind and sizes of a column, gathered over all row groups."""

    def __init__(self, name: str, kind: Any) -> None:
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

    def add(self, column: Any, where: str) -> None:
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


def _decoded(column: Any, kind: str, where: str) -> Any:
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


def _take(column: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Pick rows of a column that `_decoded` returned."""
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, tuple):
        flat, offsets = column
        return [flat[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    return [memoryview(column[row].as_buffer()) for row in rows.tolist()]


def _class_names(schema: Any, label: str | None) -> list[str]:
    """Read the names of classes from Hugging Face's metadata."""
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
