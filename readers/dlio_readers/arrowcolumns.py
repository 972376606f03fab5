"""Columns of Arrow tables as fields of samples: kinds, sizes, and values of rows.

Columns of `struct<bytes, path>` or binary become images or bytes, depending on their content;
strings become text, numbers and booleans scalars, lists of numbers arrays.
"""

import json
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dlio.data.schema import DTYPES, array_kind
from dlio.errors import SourceError
from dlio_readers.columns import looks_like

# pyarrow publishes no types.
ArrowType: TypeAlias = Any
"""A pyarrow.DataType."""
ArrowColumn: TypeAlias = Any
"""A pyarrow.ChunkedArray, or one of its chunks."""
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
