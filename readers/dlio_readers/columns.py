"""The base class of readers of columns: row i of each array is a part of sample i.

The readers of HDF5, Zarr and NumPy files share it. It turns columns into fields, reads neighbouring
rows together, and caches a few decoded chunks for callers that read one sample at a time.

A field of variable length is stored in two or three columns, as `dlio pack` writes them: `<name>`
holds the bytes or elements of all samples concatenated, `<name>__ends` the end of each sample in
it, and `<name>__shape` the shape of each array.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import ChunkedArray
from dlio.data.index import fingerprint_of
from dlio.data.labels import LABEL_NAMES
from dlio.data.reader_contract import Abilities
from dlio.data.schema import DTYPES, Schema, Structure, Value, array_kind
from dlio.data.source import redact
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio.util.arguments import nearest
from dlio.util.forks import new_lock
from dlio.util.limits import MAX_ABSENT_ROWS
from dlio_readers.path_reader import PathReader, neighbours
from dlio_readers.slabs import Part, Select, check_select, slab_shape

ENDS: Final = "__ends"
SHAPE: Final = "__shape"
SCHEMA: Final = "dlio_schema"
KEPT_BYTES: Final = 32 << 20
"""Size of the cache of decoded chunks, for samples that are read one at a time."""
_JPEG: Final = b"\xff\xd8\xff"
_PNG: Final = b"\x89PNG"


class Column(Protocol):
    """The values of one field for all samples. Thread-safe."""

    kind: str
    """Kind of the field, as in a schema."""
    unit: int
    """Rows that are decoded together (a chunk); 1 if rows can be read separately."""

    def bodies(self) -> npt.NDArray[np.int64] | None:
        """Bytes of each value, shape (rows,); None if all have the same size."""

    def rows(self, start: int, stop: int) -> Sequence[Value] | npt.NDArray[np.generic]:
        """Read the values of rows `start` to `stop`."""


class Arrays(Protocol):
    """An array that supports slicing along its first dimension: h5py's, zarr's, numpy's."""

    shape: tuple[int, ...]
    dtype: Any

    def __getitem__(self, key: Any) -> Any: ...


class PlainColumn:
    """An array whose row i, or a part of it, belongs to sample i."""

    def __init__(self, array: Arrays, unit: int, select: Part = ()) -> None:
        self._array = array
        self._select = select
        self.unit = max(1, unit)
        self.dimensions = tuple(array.shape[1:])
        """Shape of a whole sample."""
        self.shape, self.dtype = tuple(array.shape), array.dtype
        shape = slab_shape(self.dimensions, select)
        self.kind = array_kind(array.dtype, shape)

    def bodies(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        return np.asarray(self._array[(slice(start, stop), *self._select)])


class RaggedColumn:
    """Values of variable length, concatenated in a flat array."""

    def __init__(
        self,
        flat: Arrays,
        ends: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64] | None,
        kind: str,
        where: str,
    ) -> None:
        sound = len(flat.shape) == 1 and (not len(ends) or int(ends[0]) >= 0)
        if not sound or (np.diff(ends) < 0).any() or (len(ends) and ends[-1] > flat.shape[0]):
            raise SourceError(f"{where}: its ends are inconsistent: restore the file")
        self._flat, self._ends, self._shapes = flat, ends, shapes
        self._starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        if shapes is not None and (
            len(shapes) != len(ends) or (shapes.prod(axis=1) != ends - self._starts).any()
        ):
            raise SourceError(
                f"{where}: its shapes are inconsistent: the file is damaged; restore it"
            )
        self.kind = kind
        self.unit = 1

    def bodies(self) -> npt.NDArray[np.int64]:
        sizes: npt.NDArray[np.int64] = self._ends - self._starts
        return sizes * int(np.dtype(self._flat.dtype).itemsize)

    def rows(self, start: int, stop: int) -> list[Value]:
        low, high = int(self._starts[start]), int(self._ends[stop - 1])
        data = np.ascontiguousarray(self._flat[low:high])
        values: list[Value] = []
        for row in range(start, stop):
            part = data[int(self._starts[row]) - low : int(self._ends[row]) - low]
            values.append(part.data if self._shapes is None else part.reshape(self._shapes[row]))
        return values


class ConcatColumn:
    """A column of several files, concatenated.

    Args:
        parts: columns of the same kind, one of each file.
        counts: rows of each file.
    """

    def __init__(self, parts: Sequence[Column], counts: Sequence[int]) -> None:
        self._parts = parts
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.kind = parts[0].kind
        self.unit = parts[0].unit
        self.dimensions = getattr(parts[0], "dimensions", None)

    def bodies(self) -> npt.NDArray[np.int64] | None:
        bodies = [part.bodies() for part in self._parts]
        known = [body for body in bodies if body is not None]
        return np.concatenate(known) if known else None

    def rows(self, start: int, stop: int) -> Sequence[Value] | npt.NDArray[np.generic]:
        parts: list[Sequence[Value] | npt.NDArray[np.generic]] = []
        first = int(np.searchsorted(self._firsts, start, side="right")) - 1
        for k in range(first, len(self._parts)):
            low, high = int(self._firsts[k]), int(self._firsts[k + 1])
            if low >= stop:
                break
            parts.append(self._parts[k].rows(max(start, low) - low, min(stop, high) - low))
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if len(arrays) == len(parts):
            joined: npt.NDArray[np.generic] = np.concatenate(arrays)
            return joined
        return [value for part in parts for value in part]


class ColumnReader(PathReader):
    """Base class of readers of columns. A subclass opens the columns and calls `_setup`."""

    labels: npt.NDArray[np.int64]
    fingerprint: str
    _files_are_samples = _random_access = False

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            chunked=self._chunked,
            files_are_samples=self._files_are_samples,
            random_access=self._random_access,
        )

    def _chunked(self) -> Mapping[str, Sequence[ChunkedArray]]:
        """Return the arrays by field, one a file, for patches; see `dlio.data.chunks`."""
        return {}

    def _setup(
        self,
        columns: Mapping[str, Column],
        count: int,
        stamps: Sequence[str],
        classes: Sequence[str] = (),
        structure: Structure | None = None,
        select: Select = None,
    ) -> None:
        """Use the columns as fields.

        Args:
            columns: columns by field name.
            count: number of samples.
            stamps: strings that change when the data change, for the fingerprint.
            classes: names of the classes.
            structure: see Schema.
            select: the part of every sample that the user chose.

        Raises UsageError if a part of `select` is of no column.
        """
        dimensions = {name: getattr(column, "dimensions", None) for name, column in columns.items()}
        check_select(select, redact(self.path), dimensions)
        if not count:
            raise SourceError(f"{self.path} holds no samples")
        self._columns = dict(columns)
        self._count = count
        self.schema = Schema(
            tuple((name, column.kind) for name, column in columns.items()), structure
        )
        if self.schema.is_fixed and not self.schema.overhead and count > MAX_ABSENT_ROWS:
            raise SourceError(f"{self.path}: its {count} samples have no bytes: name other arrays")
        bodies = {name: column.bodies() for name, column in columns.items()}
        known = {name: body for name, body in bodies.items() if body is not None}
        self.sizes = self.schema.payload_sizes(count, known)
        if self.schema.is_fixed:
            self.sizes = np.broadcast_to(np.int64(self.schema.overhead), count)
        self.classes = list(classes)
        self.labels = self._find_labels()
        unit = max(column.unit for column in columns.values())
        units = np.arange(0, count, unit, dtype=np.int64) if unit > 1 else None
        self.layout = cut_blocks(self.sizes, Order(count, 0, shuffled=False), units)
        self._unit = unit
        self._kept: OrderedDict[int, list[bytes | memoryview]] = OrderedDict()
        self._kept_bytes = 0
        self._kept_lock = new_lock()
        self.fingerprint = fingerprint_of(
            type(self).__name__, 1, self.schema.to_json(), *stamps, self.layout.starts
        )

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        if len(samples) == 1 and self._unit > 1:
            return [self._kept_row(int(samples[0]))]
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        for low, high, slots in neighbours(samples):
            run = self._payloads(low, high)
            for slot in slots:
                payloads[slot] = run[int(samples[slot]) - low]
        return payloads

    def _kept_row(self, sample: int) -> bytes | memoryview:
        """Read one sample, and cache its whole chunk for the neighbours."""
        chunk = sample // self._unit
        with self._kept_lock:
            kept = self._kept.get(chunk)
            if kept is not None:
                self._kept.move_to_end(chunk)
                return kept[sample - chunk * self._unit]
        low = chunk * self._unit
        high = min(low + self._unit, self._count)
        size = int(self.sizes[low:high].sum())
        if size > KEPT_BYTES:
            return self._payloads(sample, sample + 1)[0]
        rows = self._payloads(low, high)
        with self._kept_lock:
            if chunk not in self._kept:
                self._kept[chunk] = rows
                self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= sum(len(row) for row in gone)
        return rows[sample - low]

    def _payloads(self, low: int, high: int) -> list[bytes | memoryview]:
        try:
            columns = {name: column.rows(low, high) for name, column in self._columns.items()}
            if self.schema.is_fixed:
                arrays = {name: np.asarray(values) for name, values in columns.items()}
                return self.schema.join_fixed(high - low, arrays)
            return [
                self.schema.join({name: values[k] for name, values in columns.items()})
                for k in range(high - low)
            ]
        except (SourceError, CorruptBlock):
            raise
        except Exception as error:  # Libraries of formats raise errors of any kind.
            raise SourceError(
                f"{self.path}, samples {low} to {high - 1} cannot be read: {error}"
            ) from error

    def _find_labels(self) -> npt.NDArray[np.int64]:
        for name in LABEL_NAMES:
            kind = self.schema.kinds.get(name)
            if kind is not None and kind.scalar and "int" in kind.text:
                try:
                    return np.asarray(self._columns[name].rows(0, self._count)).astype(np.int64)
                except Exception as error:
                    raise SourceError(f"{self.path}: {name} cannot be read: {error}") from error
        return np.broadcast_to(np.int64(0), self._count)


def choose(
    path: str, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]
) -> tuple[list[str], int]:
    """Choose the arrays that become fields; return (names, number of samples).

    Args:
        path: path of the data set, for error messages.
        shapes: shapes of all arrays, by name.
        names: names that the user chose; if empty, all arrays.

    Raises UsageError for unknown names, and if the arrays differ in their number of rows.
    """
    own = [
        name
        for name in shapes
        if not name.endswith((ENDS, SHAPE)) and (len(shapes[name]) or name in names)
    ]
    for name in names:
        if name not in own:
            raise UsageError(
                f"{path} holds no {name!r}: it has {', '.join(own[:20]) or 'no arrays'}"
                f"{nearest(name, own)}"
            )
    chosen = list(names) or own
    counts = {
        name: shapes[name + ENDS][0] if name + ENDS in shapes else (*shapes[name], 0)[0]
        for name in chosen
    }
    if not chosen:
        raise SourceError(f"{path} holds no arrays")
    if len(set(counts.values())) > 1:
        rows = ", ".join(f"{name} has {count}" for name, count in list(counts.items())[:20])
        raise UsageError(
            f"{path}: its arrays differ in rows ({rows}): name those that make up samples, as in "
            f"{path}::{chosen[0]}"
        )
    return chosen, counts[chosen[0]]


def parse_schema(text: str | bytes | None, path: str) -> tuple[Schema, list[str]] | None:
    """Parse (schema, classes) from the attribute that `dlio pack` writes; None without one.

    Raises SourceError if it is damaged.
    """
    if text is None:
        return None
    try:
        packed = json.loads(text)
        return Schema.from_rows(packed["schema"]), [str(name) for name in packed["classes"]]
    except (ValueError, KeyError, TypeError, RecursionError, CorruptBlock) as error:
        raise SourceError(
            f"{path}: its attribute {SCHEMA} is damaged: {error}; restore the file"
        ) from error


def storable(dtype: object) -> bool:
    """True if arrays of this numpy dtype can be fields."""
    return getattr(dtype, "name", "") in DTYPES


def looks_like(first: bytes) -> str:
    """Return the kind of an encoded value by its first bytes; `bytes` if unknown."""
    if first.startswith(_JPEG):
        return "jpeg"
    if first.startswith(_PNG):
        return "png"
    return "webp" if first[:4] == b"RIFF" and first[8:12] == b"WEBP" else "bytes"
