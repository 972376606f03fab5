"""The base class of readers of columns: row i of each array is a part of sample i.

The readers of HDF5, Zarr and NumPy files share it. It turns columns into fields, reads neighbouring
rows together, and caches a few decoded chunks for callers that read one sample at a time.

A field of variable length is stored in two or three columns, as `dlio pack` writes them: `<name>`
holds the bytes or elements of all samples concatenated, `<name>__ends` the end of each sample in
it, and `<name>__shape` the shape of each array.
"""

import json
import math
import operator
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.chunked_array import ChunkedArray
from dlio.data.index import Arrays as IndexArrays
from dlio.data.index import cached_index, fingerprint_of
from dlio.data.labels import (
    LabelColumn,
    SampleLabels,
    check_label,
    field_named,
    label_name,
    label_names,
    not_scalar,
)
from dlio.data.reader_contract import Abilities
from dlio.data.schema import (
    DTYPES,
    MAX_FIELDS,
    Schema,
    Structure,
    Value,
    WholeNumbers,
    array_kind,
    parse_kind,
)
from dlio.data.source import File, ReadErrors, failed
from dlio.errors import CorruptBlock, DlioError, SourceError, UsageError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio.util.arguments import nearest
from dlio.util.forks import new_lock
from dlio.util.limits import MAX_ABSENT_ROWS
from dlio.util.printable import log_warning, tell_once
from dlio.util.structured_text import parse_json
from dlio.util.units import counted
from dlio_readers.array_names import fields_of_group, splits_of_arrays
from dlio_readers.path_reader import PathReader, joined_rows, neighbours
from dlio_readers.stored_rows import RowsInFile, StoredField, StoredRows

# Parts of samples: which slab of every array is read, as `select=` says

Part: TypeAlias = tuple[slice | int, ...]
"""Slices and integers over the leading dimensions of a field."""
Index: TypeAlias = slice | int | EllipsisType
Select: TypeAlias = (
    Mapping[str, Index | Sequence[Index]] | Sequence[Index] | slice | int | EllipsisType | None
)
"""Part of every sample to read, as numpy indexes it: slices, integers and an ellipsis over its own
dimensions, of which the last may be left out. By field name, or for all fields that have
dimensions."""


def slab(select: Select, name: str, shape: tuple[int, ...]) -> Part:
    """Return the part of a field's own dimensions, its `shape` in one sample, to read.

    Raises UsageError if it does not fit.
    """
    if select is None:
        return ()
    if isinstance(select, Mapping):
        return _slab(select[name], name, shape) if name in select else ()
    return _slab(select, name, shape) if shape else ()


def slab_shape(shape: tuple[int, ...], select: Part) -> tuple[int, ...]:
    """Shape of the selected part."""
    parts = (*select, *[slice(None)] * (len(shape) - len(select)))
    return tuple(
        len(range(*part.indices(size)))
        for part, size in zip(parts, shape, strict=True)
        if isinstance(part, slice)
    )


def check_select(
    select: Select, path: str, dimensions: Mapping[str, tuple[int, ...] | None]
) -> None:
    """Raise UsageError if a part of `select` would be ignored.

    `dimensions` have the shape of each field in one sample, None where a part of it cannot be read,
    as of text and of values of varying size.
    """
    if select is None:
        return
    able = [name for name, shape in dimensions.items() if shape]
    if not isinstance(select, Mapping):
        if not able and _indices(select):
            raise UsageError(
                f"select= takes a part of every sample, but no field of {path} has dimensions of a "
                "fixed size: leave it out"
            )
        return
    for name in select:
        if name not in able:
            reason = "which has no dimensions of a fixed size" if name in dimensions else "not read"
            raise UsageError(
                f"select= names {name!r}, {reason} in {path}: choose from "
                f"{', '.join(able) or 'nothing, and leave it out'}{nearest(name, able)}"
            )


def _indices(given: Index | Sequence[Index]) -> list[Index]:
    """Return the slices and integers that a user gave, with an ellipsis."""
    return list(given) if isinstance(given, Sequence) else [given]


def _slab(given: Index | Sequence[Index], name: str, shape: tuple[int, ...]) -> Part:
    indices = _indices(given)
    places = [place for place, index in enumerate(indices) if index is Ellipsis]
    if len(places) > 1:
        raise UsageError(f"select= has {len(places)} ellipses for {name!r}: give one at most")
    if indices and not shape:
        raise UsageError(f"select= names {name!r}, whose samples are single values: leave it out")
    if len(indices) - len(places) > len(shape):
        raise UsageError(
            f"select= has {counted(len(indices) - len(places), 'dimension')}, and samples of "
            f"{name!r} have shape {shape}: give {len(shape)} at most, or a part by field, as in "
            f"select={{{name!r}: (...,)}}"
        )
    if places:
        rest = [slice(None)] * (len(shape) - len(indices) + 1)
        indices[places[0] : places[0] + 1] = rest
    return tuple(
        _bounded(index, size, name, shape) for index, size in zip(indices, shape, strict=False)
    )


def _bounded(index: Index, size: int, name: str, shape: tuple[int, ...]) -> slice | int:
    """Return an index within a dimension of `size`. Raises UsageError for others."""
    wrong = UsageError(f"select= takes slices and integers within {shape} for {name!r}: {index!r}")
    try:
        if isinstance(index, slice):
            bounds = index.indices(size)
        else:
            if isinstance(index, bool | EllipsisType):
                raise wrong
            number = operator.index(index)
            if not -size <= number < size:
                raise wrong
            return number % size
    except (TypeError, ValueError):
        raise wrong from None
    if bounds[2] < 1:
        raise UsageError(f"select= goes backwards for {name!r}: give a step of 1 or more")
    if not len(range(*bounds)):
        raise UsageError(f"select= is empty for {name!r}, which has shape {shape}: {index!r}")
    return slice(*bounds)


# Columns

ENDS: Final = "__ends"
"""Suffix of the array with the end of each value in a flat array."""
SHAPE: Final = "__shape"
"""Suffix of the array with the shape of each value."""
SCHEMA: Final = "dlio_schema"
"""Attribute with schema and classes, as `dlio pack` writes it."""
KEPT_BYTES: Final = 32 << 20
"""Size of the cache of decoded chunks, for samples that are read one at a time."""
_TEXTS_AT_ONCE: Final = 1024
_LABELS_AT_ONCE: Final = 1 << 16
_JPEG: Final = b"\xff\xd8\xff"
_PNG: Final = b"\x89PNG"


TextCodes: TypeAlias = tuple[list[str], npt.NDArray[np.int64]]
"""Different texts, and the number of the text in each row."""


class Column(Protocol):
    """The values of one field for all samples. Thread-safe."""

    kind: str
    """Kind of the field, as in a schema."""
    unit: int
    """Rows that are decoded together (a chunk); 1 if rows can be read separately."""

    def bodies(self) -> WholeNumbers | None:
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

    def stored(self) -> StoredField | None:
        """Return where the rows lie in a file; None if they are not there as payloads have them."""
        place: tuple[File, int] | None = getattr(self._array, "place", None)
        if place is None or self._select:
            return None
        row_bytes = math.prod(self.dimensions) * self.dtype.itemsize
        return [RowsInFile(place[0], place[1], row_bytes, self.shape[0])]


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


class TextArrayColumn:
    """Texts in an array of shape (rows,), or (rows, 1) and so on, of one length or not."""

    unit = 1
    kind = "text"

    def __init__(self, array: Arrays) -> None:
        self._array = array
        self.shape = tuple(array.shape)

    def bodies(self) -> npt.NDArray[np.int64]:
        count = self.shape[0]
        spans = [(k, min(k + _TEXTS_AT_ONCE, count)) for k in range(0, count, _TEXTS_AT_ONCE)]
        return np.array([len(text) for span in spans for text in self.rows(*span)], np.int64)

    def rows(self, start: int, stop: int) -> list[bytes]:
        texts = np.asarray(self._array[start:stop]).reshape(-1).tolist()
        return [text if isinstance(text, bytes) else str(text).encode() for text in texts]


class NumberedColumn:
    """Labels that are known: of texts, the numbers of their classes. Shape (rows,)."""

    unit = 1
    kind = "int64"

    def __init__(self, labels: npt.NDArray[np.int64]) -> None:
        self._labels = labels

    def bodies(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._labels[start:stop]

    def stored(self) -> StoredField:
        """Return the labels."""
        return self._labels


class SingleValue:
    """The label of a file that is one sample: an array without dimensions, as one row."""

    unit = 1

    def __init__(self, value: object, where: str) -> None:
        self._rows = np.asarray(value).reshape(1)
        if self._rows.dtype.hasobject:  # A text of h5py.
            self._rows = np.asarray([_text(self._rows[0])])
        is_text = self._rows.dtype.kind in "US"
        if not is_text and not storable(self._rows.dtype):
            raise UsageError(
                f"{where} is {self._rows.dtype}, which samples cannot have: convert it"
            )
        self.kind = "text" if is_text else array_kind(self._rows.dtype)

    def bodies(self) -> npt.NDArray[np.int64] | None:
        return np.array([len(self.rows(0, 1)[0])]) if self.kind == "text" else None

    def rows(self, start: int, stop: int) -> Sequence[Value] | npt.NDArray[np.generic]:
        if self.kind != "text":
            return self._rows
        return [_text(self._rows[0]).encode()]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class ConcatColumn:
    """A column of several files, concatenated: columns of the same kind, with the rows of each."""

    def __init__(self, parts: Sequence[Column], counts: Sequence[int]) -> None:
        self._parts = parts
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.kind = parts[0].kind
        self.unit = parts[0].unit
        self.dimensions = getattr(parts[0], "dimensions", None)
        self.is_single = isinstance(parts[0], SingleValue)

    def bodies(self) -> WholeNumbers | None:
        bodies = [part.bodies() for part in self._parts]
        known = [body for body in bodies if body is not None]
        return np.concatenate(known) if known else None

    def stored(self) -> StoredField | None:
        """Return where the rows lie in the files; None if some are not there as payloads have
        them."""
        parts = [_stored(part) for part in self._parts]
        if any(part is None or isinstance(part, np.ndarray) for part in parts):
            return None
        return [rows for part in parts if part is not None for rows in part]

    def codes(self, start: int, stop: int) -> TextCodes | None:
        """Return (different texts, number of the text in each row); None if a part has none."""
        texts: list[str] = []
        numbers = []
        for part, low, high in self._spans(start, stop):
            own = _codes(part, low, high)
            if own is None:
                return None
            numbers.append(own[1] + len(texts))
            texts += own[0]
        return texts, np.concatenate(numbers)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Column, int, int]]:
        """Yield (part, its first row, the one after its last) of the parts that rows are in."""
        first = int(np.searchsorted(self._firsts, start, side="right")) - 1
        for k in range(first, len(self._parts)):
            low, high = int(self._firsts[k]), int(self._firsts[k + 1])
            if low >= stop:
                break
            yield self._parts[k], max(start, low) - low, min(stop, high) - low

    def rows(self, start: int, stop: int) -> Sequence[Value] | npt.NDArray[np.generic]:
        parts = [part.rows(low, high) for part, low, high in self._spans(start, stop)]
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
    _stored_rows: StoredRows | None = None
    _label: str | None = None
    _sources: Mapping[str, str]
    """Name of each field's array or column in the source."""

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            chunked=self._chunked_fields,
            files_are_samples=self._files_are_samples,
            random_access=self._random_access,
            locate=None if self._stored_rows is None else self._stored_rows.locate,
        )

    def _chunked(self) -> Mapping[str, Sequence[ChunkedArray]]:
        """Return the arrays by their names, one a file, for patches; see `dlio.data.chunks`."""
        return {}

    def _chunked_fields(self) -> Mapping[str, Sequence[ChunkedArray]]:
        arrays = self._chunked()
        return {field: arrays[own] for field, own in self._sources.items() if own in arrays}

    def _setup(
        self,
        columns: Mapping[str, Column],
        count: int,
        stamps: Sequence[str],
        classes: Sequence[str] = (),
        structure: Structure | None = None,
        select: Select = None,
        files: Sequence[File] = (),
        label: str | None = None,
    ) -> None:
        """Use the columns as fields; the one that the user chose by `label` is called so.

        The fingerprint is made of `stamps`, strings that change when the data change; `select` is
        the part of every sample that the user chose. Of all `files` of the data set, if they are
        given, sizes and labels are kept in the cache; `stamps` begins with those of the files then.

        Raises UsageError if a part of `select` is of no column, or `label` is none.
        """
        check_label(self.path, columns, label)
        if label is not None and structure is not None:
            raise UsageError(
                f"label=: the samples of {self.path} are tuples or nested: leave it out"
            )
        dimensions = {name: getattr(column, "dimensions", None) for name, column in columns.items()}
        check_select(select, self.path, dimensions)
        self._label = label
        self._sources = {field_named(name, label): name for name in columns}
        columns = {field: columns[name] for field, name in self._sources.items()}
        if len(columns) > MAX_FIELDS:
            raise UsageError(
                f"{self.path} has {counted(len(columns), 'column')}, more than "
                f"{MAX_FIELDS}: name those to read, as in x::a,b; of a table of text, columns= "
                "joins numbers to one"
            )
        if not count:
            raise SourceError(f"{self.path} holds no samples")
        self._count = count

        def build() -> IndexArrays:
            name, labelling, reason = self._labelling(columns, classes)
            own = _numbered(columns, name, labelling.numbers)
            fields = tuple((field, column.kind) for field, column in own.items())
            head = json.dumps([name, labelling.classes, reason]).encode()
            numbers = labelling.numbers
            return {
                "head": np.frombuffer(head, np.uint8),
                "labels": np.zeros(0, np.int64) if numbers is None else numbers,
                "sizes": _payload_sizes(Schema(fields, structure), count, own),
            }

        if files:
            # The state of the files is compared anyway.
            own = list(stamps[len(files) :])
            about = repr((own, [(name, column.kind) for name, column in columns.items()]))
            kind = xxhash.xxh3_64_hexdigest(about.encode("utf-8", "surrogateescape"))
            made = cached_index(f"{self.format}-{kind}", 1, files, build)
        else:
            made = build()
        name, own_classes, self.unlabelled = json.loads(made["head"].tobytes())
        columns = _numbered(columns, name, made["labels"])
        self._columns = dict(columns)
        self.schema = Schema(
            tuple((name, column.kind) for name, column in columns.items()), structure
        )
        if self.schema.is_fixed and not self.schema.overhead and count > MAX_ABSENT_ROWS:
            raise SourceError(
                f"{self.path}: no bytes in its {counted(count, 'sample')}: name other arrays"
            )
        self.sizes = made["sizes"]
        if self.schema.is_fixed:
            self.sizes = np.broadcast_to(np.int64(self.schema.overhead), count)
        self.classes = list(classes) if name is None else own_classes
        none = np.broadcast_to(np.int64(0), count)
        self.labels = none if name is None else made["labels"]
        unit = max(column.unit for column in columns.values())
        units = np.arange(0, count, unit, dtype=np.int64) if unit > 1 else None
        self.layout = cut_blocks(self.sizes, Order(count, 0, shuffled=False), units)
        self._unit = unit
        self._stored_rows = StoredRows.of(
            self.schema, {name: _stored(column) for name, column in columns.items()}
        )
        self._kept: OrderedDict[int, list[bytes | memoryview]] = OrderedDict()
        self._kept_bytes = 0
        self._kept_lock = new_lock()
        self.fingerprint = fingerprint_of(
            type(self).__name__, 1, self.schema.to_json(), *stamps, self.layout.starts
        )

    def __len__(self) -> int:
        return self._count

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        if len(samples) == 1:
            one = int(samples[0])
            return [self._kept_row(one)] if self._unit > 1 else self._payloads(one, one + 1)
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
        try:  # Not `with`, which takes longer: samples are read one by one.
            columns = {name: column.rows(low, high) for name, column in self._columns.items()}
            return joined_rows(self.schema, high - low, columns)
        except DlioError:
            raise
        except Exception as error:
            raise failed(f"{self.path}, samples {low} to {high - 1}", error) from error

    def _labelling(
        self, columns: Mapping[str, Column], classes: Sequence[str]
    ) -> tuple[str | None, SampleLabels, str]:
        """Return (label field, its labels, why a field with a label's name gives none)."""
        labelling, reason = SampleLabels(None, []), ""
        chosen = None if self._label is None else field_named(self._label, self._label)
        named = splits_of_arrays(list(columns))
        # `train_labels` of `x.npz::train_images,train_labels`, and `data/labels` of one group.
        fields = next(iter(named.values())) if len(named) == 1 else fields_of_group(list(columns))
        for field in label_names(fields or columns, chosen):
            name = fields.get(field, field) if chosen is None else field
            labelling = self._labels_of(name, columns[name], classes)
            if labelling.numbers is not None:
                return name, labelling, ""
            reason = reason or f"its {self._sources[name]} {labelling.reason}"
        return None, labelling, reason

    def _labels_of(self, name: str, column: Column, classes: Sequence[str]) -> SampleLabels:
        """Return the labels that a column gives; `classes` are those that the source names.

        Raises SourceError for a missing one.
        """
        kind = parse_kind(column.kind)
        labels = LabelColumn(classes)
        for start in range(0, self._count, _LABELS_AT_ONCE):
            stop = min(start + _LABELS_AT_ONCE, self._count)
            if labels.is_refused:
                break
            with ReadErrors(f"{self.path}: {name}"):
                if kind.text == "text" and (coded := _codes(column, start, stop)) is not None:
                    labels.add_codes(*coded)
                elif kind.text == "text":
                    labels.add_texts(list(column.rows(start, stop)))
                elif kind.fixed and not set(kind.shape) - {1}:
                    labels.add_numbers(np.asarray(column.rows(start, stop)))
                else:
                    return SampleLabels(None, [], not_scalar(kind.text))
        return labels.labels(self._sources[name], lambda row: f"{self.path}, sample {row}")


def _stored(column: Column) -> StoredField | None:
    """Return where the values of a column lie, where it knows it."""
    stored = getattr(column, "stored", None)
    known: StoredField | None = stored and stored()
    return known


def _codes(column: Column, start: int, stop: int) -> TextCodes | None:
    """Return (different texts, number of the text in each row) where a column knows them."""
    codes = getattr(column, "codes", None)
    known: TextCodes | None = codes and codes(start, stop)
    return known


def _numbered(
    columns: Mapping[str, Column], name: str | None, labels: npt.NDArray[np.int64] | None
) -> Mapping[str, Column]:
    """Return columns with the numbers of classes in place of texts that are labels."""
    if name is None or labels is None or columns[name].kind != "text":
        return columns
    return {**columns, name: NumberedColumn(labels)}


def _payload_sizes(
    schema: Schema, count: int, columns: Mapping[str, Column]
) -> npt.NDArray[np.int64]:
    """Return the payload bytes of samples, shape (count,), or (0,) if all have the same."""
    if schema.is_fixed:
        return np.zeros(0, np.int64)
    bodies = {name: column.bodies() for name, column in columns.items()}
    known = {name: body for name, body in bodies.items() if body is not None}
    return schema.payload_sizes(count, known)


def choose(
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    *,
    by_file: bool = True,
    label: str | None = None,
) -> tuple[list[str], int]:
    """Choose the arrays that become fields, all unless the user chose `names`; return (names,
    number of samples).

    A label without dimensions is that of a file that is one sample, in formats of which files may
    be samples (`by_file`). The user may have chosen the `label`.

    Raises UsageError for unknown names, and if the arrays differ in their number of rows.
    """
    label = label_name(shapes, label if label in shapes else None)
    single = label is not None and not shapes[label] and (not names or label in names)
    if single and not by_file:
        raise UsageError(
            f"{path}: its {label} is a single value, where rows of arrays are samples: give it a "
            "value for each row, or name the other arrays to read"
        )
    own = [
        name
        for name in shapes
        if not name.endswith((ENDS, SHAPE))
        and (len(shapes[name]) or name in names or (single and name == label))
    ]
    for name in names:
        if name not in own:
            raise UsageError(
                f"{path} holds no {name!r}: it has {', '.join(own[:20]) or 'no arrays'}"
                f"{nearest(name, own)}"
            )
    chosen = list(names) or own
    for name in chosen:
        if not shapes[name] and not (single and name == label):
            raise UsageError(f"{path}: {name} is a single value: name arrays with a row a sample")
    counts = {
        name: shapes[name + ENDS][0] if name + ENDS in shapes else (*shapes[name], 0)[0]
        for name in chosen
    }
    if not chosen:
        raise SourceError(f"{path} holds no arrays")
    if single:
        return chosen, 1
    if len(set(counts.values())) > 1:
        rows = ", ".join(f"{name} has {count}" for name, count in list(counts.items())[:20])
        most = counts[max(counts, key=lambda name: math.prod(shapes[name]))]
        alike = [name for name, count in counts.items() if count == most]
        sides = {shapes[name][1:] for name in chosen}
        classes = (
            "; if each is a class, store all rows in one array and their classes in another, label"
            if len(sides) == 1 and any(sides)
            else ""
        )
        raise UsageError(
            f"{path}: its arrays differ in rows ({rows}): name those that make up samples, as in "
            f"{path}::{','.join(alike[:4])}{classes}"
        )
    return chosen, counts[chosen[0]]


def parse_schema(text: str | bytes | None, path: str) -> tuple[Schema, list[str]] | None:
    """Parse (schema, classes) from the attribute that `dlio pack` writes; None without one.

    Raises SourceError if it is damaged.
    """
    if text is None:
        return None
    try:
        packed = parse_json(text, path)
        return Schema.from_rows(packed["schema"]), [str(name) for name in packed["classes"]]
    except (ValueError, KeyError, TypeError, RecursionError, CorruptBlock) as error:
        raise SourceError(
            f"{path}: its attribute {SCHEMA} is damaged: {error}; restore the file"
        ) from error


def storable(dtype: object) -> bool:
    """True if arrays of this numpy dtype can be fields."""
    return getattr(dtype, "name", "") in DTYPES


HEAD_BYTES: Final = 32
"""First bytes of a value by which `looks_like` tells its kind."""
_BMP_HEADS: Final = (12, 40, 52, 56, 64, 108, 124)
_OTHER_PICTURES: Final = re.compile(rb"GIF8[79]a|II[*+]\0|MM\0[*+]|P[1-6]\s+[0-9#]")


def looks_like(first: bytes) -> str:
    """Return the kind of an encoded value by its first bytes; `bytes` if unknown."""
    if first.startswith(_JPEG):
        return "jpeg"
    if first.startswith(_PNG):
        return "png"
    if first[:4] == b"RIFF" and first[8:12] == b"WEBP":
        return "webp"
    is_bmp = first[:2] == b"BM" and int.from_bytes(first[14:18], "little") in _BMP_HEADS
    return "image" if is_bmp or _OTHER_PICTURES.match(first) else "bytes"


# Files of which each is one sample: volumes, such as scans, whose shapes differ

Samples = Literal["rows", "files"]
"""Samples are the rows of the files' arrays, or each file is one."""
_VOLUME_DIMENSIONS: Final = 3
_CHANNELS: Final = (1, 3, 4)
_LEAST_SIDE: Final = 8
"""Rows and columns of a table that are as many by chance, at most."""


class VolumeColumn:
    """A field whose value in sample i is the whole array of file i."""

    def __init__(self, parts: Sequence[PlainColumn]) -> None:
        self._parts = parts
        shape = parts[0].shape
        self.kind = array_kind(parts[0].dtype, [None] * len(shape))
        self.unit = 1

    def bodies(self) -> npt.NDArray[np.int64]:
        sizes = [int(np.prod(part.shape, dtype=np.int64)) for part in self._parts]
        return np.array(sizes, np.int64) * int(np.dtype(self._parts[0].dtype).itemsize)

    def rows(self, start: int, stop: int) -> list[npt.NDArray[np.generic]]:
        return [part.rows(0, part.shape[0]) for part in self._parts[start:stop]]


def volumes_of(
    path: str, tables: Sequence[Mapping[str, Column]], samples: Samples | None
) -> dict[str, Column] | None:
    """Return the fields of files of which each is one sample; None if samples are their rows.

    By default these are several files whose arrays, without labels, have three dimensions or more
    and other shapes than in other files, or two, and rows of several lengths. If only the number of
    rows differs, the files could hold pictures as well: arrays of three dimensions that are not all
    bytes are taken for volumes then. Both are told where it may be a mistake.

    Raises UsageError if the user's choice, `samples`, is not possible.
    """
    if samples not in (None, "rows", "files"):
        raise UsageError(f"samples={samples!r}: choose rows or files")
    names = list(tables[0])
    single = [name for name, each in tables[0].items() if isinstance(each, SingleValue)]
    able = all(
        list(table) == names
        and all(isinstance(column, PlainColumn | SingleValue) for column in table.values())
        for table in tables
    )
    plain = [{n: c for n, c in table.items() if isinstance(c, PlainColumn)} for table in tables]
    able = able and all(
        (part[name].dtype, len(part[name].shape))
        == (plain[0][name].dtype, len(plain[0][name].shape))
        for part in plain
        for name in plain[0]
    )
    if single:
        kinds = {tuple(table[name].kind for name in single if name in table) for table in tables}
        able = able and len(kinds) == 1
        if not able or samples == "rows":
            raise UsageError(
                f"{path}: its {single[0]} is a single value, so that each file is one sample, and "
                "not its rows: give all files arrays of the same names, types and dimensions"
            )
        samples = "files"
    if samples == "rows" or not able:
        if samples == "files":
            raise UsageError(
                f"samples='files': the files of {path} hold arrays of different names or types, "
                "or values of varying length: leave it out"
            )
        return None
    if samples is None and not _are_volumes(plain):
        if _are_pictures(plain):
            log_warning(
                "%s: the rows of its %d files are samples, though each file may be one picture, by "
                "its shape: for one sample a file give samples='files'",
                path,
                len(plain),
            )
        return None
    if samples is None and _same_rows(plain):
        log_warning(
            "%s: each of its %d files is read as one sample, a volume; for the rows of their "
            "arrays give samples='rows'",
            path,
            len(plain),
        )
    elif samples is None and _dimensions(plain[0]) < _VOLUME_DIMENSIONS:
        tell_once(
            f"{path}: each of its {counted(len(plain), 'file')} is read as one sample, as the rows "
            "of their arrays have several lengths"
        )
    if any(0 in column.shape for part in plain for column in part.values()):
        raise SourceError(f"{path}: a file holds no rows: remove it")
    return {
        name: ConcatColumn([table[name] for table in tables], [1] * len(tables))
        if name in single
        else VolumeColumn([part[name] for part in plain])
        for name in names
    }


def _same_rows(tables: Sequence[Mapping[str, PlainColumn]]) -> bool:
    """True if the rows of all files have one shape."""
    first = tables[0]
    return all(table[name].shape[1:] == first[name].shape[1:] for table in tables for name in first)


def _dimensions(table: Mapping[str, PlainColumn]) -> int:
    """Return the dimensions of the array that has the fewest."""
    return min(len(column.shape) for column in table.values())


def _are_volumes(tables: Sequence[Mapping[str, PlainColumn]]) -> bool:
    first = tables[0]
    dimensions = [len(column.shape) for column in first.values()]
    if len(tables) < 2 or _dimensions(first) < _VOLUME_DIMENSIONS - 1:
        return False
    if _dimensions(first) < _VOLUME_DIMENSIONS:
        # One file of other rows may be a stray, unless each has pairs, such as image and mask.
        shapes = [{column.shape for column in table.values()} for table in tables]
        are_pairs = len(first) > 1 and all(len(own) == 1 for own in shapes)
        several = {column.shape[1:] for table in tables for column in table.values()}
        return len(several) > 1 and (are_pairs or 2 * len(several) > len(tables))
    if not _same_rows(tables):
        return True
    rows = {table[name].shape[0] for table in tables for name in first}
    bytes_only = all(np.dtype(column.dtype) == np.uint8 for column in first.values())
    return len(rows) > 1 and max(dimensions) == _VOLUME_DIMENSIONS and not bytes_only


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] > _LEAST_SIDE


def _are_pictures(tables: Sequence[Mapping[str, PlainColumn]]) -> bool:
    """True for several files of one array each, which may be a picture: bytes, or with two sides
    alike, and up to four channels; or of arrays of as many rows as columns, such as a slice and its
    mask."""
    arrays = [column for table in tables for column in table.values()]
    if len(tables) < 2:
        return False
    if arrays and all(_is_square(each.shape) for each in arrays):
        return True
    return len(tables[0]) == 1 and all(
        len(each.shape) == _VOLUME_DIMENSIONS
        and each.shape[2] in _CHANNELS
        and (np.dtype(each.dtype) == np.uint8 or each.shape[0] == each.shape[1])
        for each in arrays
    )
