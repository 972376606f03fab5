"""The reader of TFRecord files of tf.train.Example, without TensorFlow."""

import json
import os
import re
import struct
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.index import Arrays, cached_index
from dlio.data.index_memory import GrowingColumn
from dlio.data.labels import (
    LabelColumn,
    SampleLabels,
    check_label,
    field_named,
    first_labels,
    label_names,
    not_scalar,
    with_label,
)
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import Abilities, PathRules
from dlio.data.schema import MAX_FIELDS, MAX_PAYLOAD, Schema, array_kind
from dlio.data.source import (
    File,
    FilePlace,
    Source,
    expand,
    file_at,
    inside,
    own_name,
    split_fields,
)
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.limits import check_objects
from dlio.util.memory import new_memory
from dlio.util.printable import log_warning
from dlio_readers.columns import HEAD_BYTES, looks_like
from dlio_readers.path_reader import (
    PathReader,
    check_names,
    concurrently,
    neighbours,
    split_paths,
)

# Records in TFRecord files: a length, data, and masked checksums (CRC32C) of both
#
# uint64 length | uint32 masked CRC of length | data | uint32 masked CRC of data

HEAD: Final = struct.Struct("<QI")
FOOT: Final = struct.Struct("<I")
AROUND: Final = HEAD.size + FOOT.size
"""Bytes of a record that are not data."""
_SMALL_BYTES: Final = 1 << 13
_LARGE_BYTES: Final = 4 << 20
"""Bytes that are read at a time when a file is scanned: few at first of a local one, many of a
remote one."""
_TRIAL_READS: Final = 8
"""Small reads after which their speed is known."""
_SLOW_S: Final = 2e-3
"""A read that takes longer is slow."""
_GZIP: Final = b"\x1f\x8b"


class RecordBytes:
    """A record's data, in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, end: int) -> bytes:
        """Return some of its bytes."""
        return bytes(self._data[start:end])


class LazyRecord(RecordBytes):
    """A record's data in a file, of which only those parts are read that are asked for."""

    def __init__(self, window: "_Window", at: int, size: int) -> None:
        self._window, self._at, self._size = window, at, size

    def __len__(self) -> int:
        return self._size

    def part(self, start: int, end: int) -> bytes:
        return self._window.read(self._at + start, end - start)


class _Window:
    """The part of a file that a scan is at.

    What a scan needs of a record is small. Where requests are slow, reading records in between is
    faster than passing over them, unless these are large: of slow reads both are tried, and the one
    stays that got further per second.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        sizes = (_SMALL_BYTES, _LARGE_BYTES)
        self._step, self._other = sizes if file.local_path is not None else sizes[::-1]
        self._parts: deque[tuple[int, bytes]] = deque(maxlen=2)
        """(offset, bytes): a record is looked at again where it begins, after its end was."""
        self._trials: list[float] = []
        """Bytes per second that the sizes of reads got further, up to two."""
        self._begin(0)

    def read(self, at: int, count: int) -> bytes:
        """Return some bytes; fewer at the end of the file. Raises SourceError."""
        for begin, data in self._parts:
            if begin <= at and at + count <= begin + len(data):
                return data[at - begin : at - begin + count]
        if len(self._trials) < 2 and self._reads >= self._enough:
            self._judge(at)
        began = perf_counter()
        data = self._file.read(at, max(count, self._step))
        self._seconds += perf_counter() - began
        self._reads += 1
        self._parts.append((at, data))
        return data[:count]

    def _begin(self, at: int) -> None:
        self._since, self._reads, self._seconds = at, 0, 0.0
        self._enough = _TRIAL_READS if self._step == _SMALL_BYTES else 1

    def _judge(self, at: int) -> None:
        """End a trial that came as far as `at`, and begin the next one or none."""
        is_slow = self._seconds > _SLOW_S * self._reads
        self._trials.append((at - self._since) / max(self._seconds, 1e-9))
        if len(self._trials) == 1 and not is_slow:
            self._trials.append(0.0)
        elif len(self._trials) == 1 or self._trials[0] >= self._trials[1]:
            self._step, self._other = self._other, self._step
        self._begin(at)


def masked(data: bytes | memoryview) -> int:
    """Return the checksum of data as TFRecord files store it."""
    crc = int(google_crc32c.value(bytes(data)))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_framed(file: File) -> bool:
    """True if a file begins with a record's length and its checksum. Raises SourceError."""
    head = file.read(0, HEAD.size)
    return len(head) == HEAD.size and HEAD.unpack(head)[1] == masked(head[:8])


def records_of(file: File) -> Iterator[tuple[int, LazyRecord]]:
    """Yield (offset of the data, record) of a file's records, reading their lengths in order.

    Raises SourceError for files that are compressed or cut off, CorruptBlock for a length whose
    checksum is wrong.
    """
    window = _Window(file)
    if window.read(0, 2) == _GZIP:
        raise SourceError(
            f"{file.name} is compressed as a whole, so that its records cannot be read one by one: "
            "decompress it (gunzip), and compress pictures in it instead"
        )
    at, number = 0, 0
    while at < file.size:
        where = f"{file.name}, record {number},"
        head = window.read(at, HEAD.size)
        if len(head) < HEAD.size:
            raise SourceError(f"{where} is cut off: {file.size - at} bytes: restore the file")
        size, crc = HEAD.unpack(head)
        if crc != masked(head[:8]):
            what = "has a wrong checksum of its length" if number else "is not of a TFRecord file"
            raise CorruptBlock(f"{where} {what}: restore the file")
        if at + AROUND + size > file.size or size > MAX_PAYLOAD:
            raise SourceError(
                f"{where} has {size} bytes, of which the file holds "
                f"{max(0, file.size - at - AROUND)}: it is cut off; restore it"
            )
        yield at + HEAD.size, LazyRecord(window, at + HEAD.size, size)
        at += AROUND + size
        number += 1


def check_data(stored: memoryview, where: str) -> memoryview:
    """Return the data of a record that has been read with its checksums.

    Raises CorruptBlock if a checksum is wrong.
    """
    size, crc = HEAD.unpack(stored[: HEAD.size])
    data = stored[HEAD.size : -FOOT.size]
    if crc != masked(stored[:8]) or size != len(data):
        raise CorruptBlock(f"{where} has a wrong checksum of its length: restore the file")
    if FOOT.unpack(stored[-FOOT.size :])[0] != masked(data):
        raise CorruptBlock(f"{where} has a wrong checksum of its data: restore the file")
    return data


# A parser of tf.train.Example: the protocol buffer that most TFRecord files hold, bounded
#
#     message Example  { Features features = 1; }
#     message Features { map<string, Feature> feature = 1; }
#     message Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
#     `value` is field 1 in each list.
#
# A record is walked without copying its values: features are spans of bytes in it. Nothing is
# allocated because a length claims it, and nesting has the depth of these messages.
#
# Source: tensorflow/core/example/example.proto and feature.proto; protobuf.dev's encoding.

FeatureKind = Literal["bytes", "float32", "int64"]
_KINDS: Final[dict[int, FeatureKind]] = {1: "bytes", 2: "float32", 3: "int64"}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_KEY: Final = 1 << 12
"""Bytes of a feature's name."""
_VARINT_BYTES: Final = 10
_DECODED: Final = 1 << 16
"""Bytes of numbers that are decoded at a time."""
_SPANS: Final = 1 << 12
_LONG_NUMBER: Final = "has a number of over ten bytes: it is damaged; restore it"


@dataclass(frozen=True, slots=True)
class Feature:
    """Values of a feature, as spans of the record."""

    kind: FeatureKind
    spans: npt.NDArray[np.int64]
    """First byte and end, shape (n, 2): of bytes one span a value; of numbers each span holds one
    or several. Spans may be as small as two bytes."""


def features_of(record: RecordBytes) -> dict[str, Feature]:
    """Return the features of an Example by name.

    Raises CorruptBlock if the record is not an Example.
    """
    features: dict[str, Feature] = {}
    size = len(record)
    for number, wire, start, end in _fields(record, 0, size):
        if number == 2 and wire == _LENGTH:
            raise CorruptBlock(
                "is a tf.train.SequenceExample, whose lists of features are not read: write its "
                "records as tf.train.Example"
            )
        if number != 1 or wire != _LENGTH:
            continue
        for inner, kind, begin, stop in _fields(record, start, end):
            if inner == 1 and kind == _LENGTH:
                name, feature = _entry(record, begin, stop)
                if feature is not None:
                    features[name] = feature
                if len(features) > MAX_FIELDS:
                    raise CorruptBlock(f"has over {MAX_FIELDS} features: write fewer")
    return features


def ints_of(record: RecordBytes, feature: Feature) -> npt.NDArray[np.int64]:
    """Return the values of an int64 feature; shape (n,). Raises CorruptBlock."""
    data = _joined(record, feature)
    if not data:
        return np.zeros(0, np.int64)
    if len(data) <= _VARINT_BYTES and data[-1] < 0x80:  # A label, as a rule.
        return _few_ints(data)
    plain = np.frombuffer(data, np.uint8)
    values = np.empty(_numbers_in(plain), np.int64)
    done = begin = 0
    while begin < len(plain):
        part = plain[begin : begin + _DECODED]
        ends = np.flatnonzero(part < 0x80)
        if not len(ends):
            raise CorruptBlock(_LONG_NUMBER)
        part = part[: int(ends[-1]) + 1]
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        places = np.arange(len(part)) - np.repeat(starts, ends - starts + 1)
        if int(places.max()) >= _VARINT_BYTES:
            raise CorruptBlock(_LONG_NUMBER)
        digits = (part & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
        values[done : done + len(starts)] = np.add.reduceat(digits, starts).view(np.int64)
        done, begin = done + len(starts), begin + len(part)
    return values


def _numbers_in(plain: npt.NDArray[np.uint8]) -> int:
    """Return how many numbers some bytes are. Raises CorruptBlock if the last is cut off."""
    if len(plain) and plain[-1] >= 0x80:
        raise CorruptBlock("has a number that is cut off: it is damaged; restore it")
    return int(np.count_nonzero(plain < 0x80))


def _joined(record: RecordBytes, feature: Feature) -> bytes | bytearray:
    """Return the bytes of all spans of a feature."""
    if len(feature.spans) == 1:
        return record.part(*feature.spans[0].tolist())
    data = bytearray()
    for begin in range(0, len(feature.spans), _SPANS):
        for start, end in feature.spans[begin : begin + _SPANS].tolist():
            data += record.part(start, end)
    return data


def _few_ints(data: bytes | bytearray) -> npt.NDArray[np.int64]:
    """Return the numbers of at most ten whole bytes, in a tenth of the time of `ints_of`."""
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number & 0xFFFF_FFFF_FFFF_FFFF)
            number = shift = 0
    return np.array(numbers, np.uint64).view(np.int64)


def floats_of(record: RecordBytes, feature: Feature) -> npt.NDArray[np.float32]:
    """Return the values of a float feature; shape (n,)."""
    return np.frombuffer(_joined(record, feature), "<f4").astype(np.float32, copy=False)


def count_of(record: RecordBytes, feature: Feature) -> int:
    """Return the number of values of a feature. Raises CorruptBlock."""
    if feature.kind == "bytes":
        return len(feature.spans)
    if feature.kind == "float32":
        return int((feature.spans[:, 1] - feature.spans[:, 0]).sum()) // 4
    return _numbers_in(np.frombuffer(_joined(record, feature), np.uint8))


def _entry(record: RecordBytes, start: int, end: int) -> tuple[str, Feature | None]:
    """Return (name, feature) of an entry of the map; None for a feature without a list."""
    name, feature = "", None
    for number, wire, begin, stop in _fields(record, start, end):
        if number == 1 and wire == _LENGTH:
            if stop - begin > _MOST_KEY:
                raise CorruptBlock(f"has a feature whose name has {stop - begin} bytes: restore it")
            try:
                name = record.part(begin, stop).decode()
            except UnicodeDecodeError:
                raise CorruptBlock("has a feature whose name is not UTF-8: restore it") from None
        elif number == 2 and wire == _LENGTH:
            feature = _feature(record, begin, stop)
    return name, feature


def _feature(record: RecordBytes, start: int, end: int) -> Feature | None:
    made = None
    for number, wire, begin, stop in _fields(record, start, end):
        kind = _KINDS.get(number)
        if kind is None or wire != _LENGTH:
            continue
        spans = array("q")
        for inner, value, low, high in _fields(record, begin, stop):
            if inner != 1:
                continue
            single = {"bytes": _LENGTH, "float32": _FIXED32, "int64": _VARINT}[kind]
            if value not in (single, _LENGTH) or (kind == "float32" and (high - low) % 4):
                raise CorruptBlock(f"has a list of {kind} that is damaged: restore it")
            spans.append(low)
            spans.append(high)
        made = Feature(kind, np.array(spans, np.int64).reshape(-1, 2))
    return made


def _fields(record: RecordBytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, first byte, end) of the fields in a part of a record.

    Raises CorruptBlock for anything that is not a message.
    """
    at = start
    while at < end:
        key, at = _varint(record, at, end)
        number, wire = key >> 3, key & 7
        if wire == _LENGTH:
            size, at = _varint(record, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = _varint(record, at, end)[1]
        elif wire in (_FIXED64, _FIXED32):
            stop = at + (8 if wire == _FIXED64 else 4)
        else:
            stop = end + 1
        if number == 0 or stop > end:
            raise CorruptBlock("is not a tf.train.Example, or is damaged: restore the file")
        yield number, wire, at, stop
        at = stop


def _varint(record: RecordBytes, at: int, end: int) -> tuple[int, int]:
    """Return (number, offset behind it). Raises CorruptBlock."""
    value = 0
    data = record.part(at, min(end, at + _VARINT_BYTES))
    for place, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise CorruptBlock("is not a tf.train.Example, or is damaged: restore the file")


# One scan over TFRecord files: where records lie, their features, the sizes of values, labels
#
# Each file is scanned on its own, over a network many of them at a time, and the results are put
# together in their order. Nothing of a file stays in memory but the numbers of its records.

_TEXT_BYTES: Final = 1 << 10
"""Bytes of the longest value that is text, if all values of its feature are."""


def scan(
    path: str, names: Sequence[str], files: Sequence[File], chosen: str | None = None
) -> Arrays:
    """Return offsets, sizes, kinds and labels of all records, with the features `names`, or all of
    the first record. The user may have `chosen` the label.

    Raises SourceError for files without records, and for records that do not fit together;
    CorruptBlock for wrong checksums; UsageError for names that the first record lacks.
    """
    wanted = _wanted(path, names, files, chosen)
    whole = _ScanPart(wanted)
    starts = []
    for part in concurrently(lambda file: _scanned(file, wanted), files, files[0].url):
        starts.append(len(whole.at))
        whole.append(part)
    fields = [(name, column.kind_of_field) for name, column in whole.columns.items()]

    def where(sample: int) -> str:
        file = bisect_right(starts, sample) - 1
        return f"{files[file].name}, record {sample - starts[file]},"

    label, labelling = _labels_of(whole.columns, where, chosen)
    is_text = label is not None and dict(fields)[label] == "text"
    if is_text:
        fields = [(name, "int64" if name == label else kind) for name, kind in fields]
    schema = Schema(tuple(fields))
    variable = [name for name, _ in fields if not schema.kinds[name].fixed]
    bodies = [whole.columns[name].bodies.spread() for name in variable]
    count = len(whole.at)
    head = {
        "fields": fields,
        "variable": variable,
        "classes": labelling.classes,
        "named": label if is_text else None,
        "unlabelled": labelling.reason,
    }
    return {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "at": whole.at.spread().astype(np.int64),
        "stored": whole.stored.spread(),
        "starts": np.array(starts, np.int64),
        "bodies": np.stack(bodies, 1) if bodies else np.zeros((count, 0), np.int64),
        "labels": np.zeros(count, np.int64) if labelling.numbers is None else labelling.numbers,
    }


@dataclass(frozen=True, slots=True)
class _FeatureRequest:
    path: str
    names: tuple[str, ...]
    all: bool
    """True if these are all features of the first record, beyond which no record may have any."""
    label: str | None
    """The one that the user chose as the label."""


def _wanted(
    path: str, names: Sequence[str], files: Sequence[File], label: str | None
) -> _FeatureRequest:
    """Return the features to read, from the first record."""
    for file in files:
        for _, record in records_of(file):
            where = f"{file.name}, record 0,"
            try:
                features = features_of(record)
            except CorruptBlock as error:
                raise SourceError(f"{where} {error}") from error
            check_names(where, names, sorted(features), "feature")
            if not features:
                raise SourceError(f"{where} has no features")
            wanted = tuple(names) or tuple(sorted(features))
            check_label(where, wanted, label)
            return _FeatureRequest(path, wanted, not names, label)
    raise SourceError(f"{path} holds no records")


@dataclass(slots=True)
class _Column:
    """Values of a feature over records."""

    kind: FeatureKind | None = None
    """None as long as the feature has no values."""
    where: str = ""
    """The first record that has any."""
    counts: set[int] = field(default_factory=set)
    """Numbers of values that occur, the first few."""
    bodies: GrowingColumn = field(default_factory=GrowingColumn)
    """Bytes of the values of each record."""
    whole: GrowingColumn = field(default_factory=partial(GrowingColumn, signed=True))
    """The values, as long as each is a single whole number."""
    keeps: bool = False
    """True for a feature that may be the label, by its name."""
    values: list[bytes | float] = field(default_factory=list)
    """Its values, as long as each is a text or a single float; of none an empty text."""
    texts: dict[bytes, bytes] = field(default_factory=dict)
    """Those of the values, each once."""
    images: set[str] = field(default_factory=set)
    is_text: bool = True

    def add(self, record: LazyRecord, feature: Feature | None, where: str, name: str) -> None:
        """Add a record's values."""
        count = 0 if feature is None else count_of(record, feature)
        if len(self.counts) < 3:
            self.counts.add(count)
        if feature is None or not count:
            self.bodies.append(0)
            self.values += [b""] * self.keeps
            return
        self._agree(feature.kind, where, name)
        if feature.kind != "bytes":
            self.bodies.append(count * (8 if feature.kind == "int64" else 4))
            if feature.kind == "int64" and self.counts == {1}:
                self.whole.append(int(ints_of(record, feature)[0]))
            if self.keeps and feature.kind == "float32" and count == 1:
                self.values.append(float(floats_of(record, feature)[0]))
            return
        if count > 1:
            raise SourceError(
                f"{where} has {count} byte strings in {name!r}, which samples cannot have: name "
                "the features to read, as in x.tfrecord::image,label"
            )
        start, end = feature.spans[0].tolist()
        self.bodies.append(end - start)
        self.images.add(looks_like(record.part(start, min(end, start + HEAD_BYTES))))
        if self.is_text:
            self.is_text = end - start <= _TEXT_BYTES and _is_text(record.part(start, end))
        if self.keeps and self.is_text:
            text = record.part(start, end)
            self.values.append(self.texts.setdefault(text, text))

    def append(self, later: "_Column", name: str) -> None:
        """Add the values of the next file's records."""
        if later.kind is not None:
            self._agree(later.kind, later.where, name)
        self.counts |= later.counts
        self.bodies.extend(later.bodies.spread())
        self.whole.extend(later.whole.spread())
        self.values += later.values
        self.images |= later.images
        self.is_text = self.is_text and later.is_text

    def _agree(self, kind: FeatureKind, where: str, name: str) -> None:
        if self.kind is None:
            self.kind, self.where = kind, where
        elif kind != self.kind:
            raise SourceError(f"{where} has {name!r} as {kind}, others as {self.kind}")

    @property
    def kind_of_field(self) -> str:
        """Kind of the field that samples have."""
        if self.kind == "bytes":
            if self.is_text and self.images <= {"bytes"}:
                return "text"
            if len(self.images) == 1 and 0 not in self.counts:
                return next(iter(self.images))
            return "bytes" if "bytes" in self.images or 0 in self.counts else "image"
        kind = self.kind or "float32"
        if self.counts == {1}:
            return kind
        return array_kind(kind, (next(iter(self.counts)) if len(self.counts) == 1 else None,))


_CHECKED: Final = 1 << 10
"""Records after which the memory that they take is compared with their bytes."""
_CELL_BYTES: Final = 40
"""Memory for a value of a record, in lists."""


class _ScanPart:
    def __init__(self, wanted: _FeatureRequest) -> None:
        self._wanted = wanted
        self.at = GrowingColumn()
        """Offset of each record's data in its file."""
        self.stored = GrowingColumn()
        """Bytes of it."""
        likely = _likely_labels(wanted.names, wanted.label)
        self.columns = {name: _Column(keeps=name in likely) for name in wanted.names}

    def add(self, offset: int, record: LazyRecord, where: str) -> None:
        """Add a record. Raises SourceError if it does not fit to the others."""
        try:
            features = features_of(record)
            for name, column in self.columns.items():
                column.add(record, features.get(name), where, name)
        except CorruptBlock as error:
            raise SourceError(f"{where} {error}") from error
        extra = features.keys() - self.columns.keys()
        if extra and self._wanted.all:
            path, first = self._wanted.path.partition("::")[0], self._wanted.names[0]
            raise SourceError(
                f"{where} has a feature {min(extra)!r}, which the first record lacks: name the "
                f"features to read, as in {path}::{first}"
            )
        self.at.append(offset)
        self.stored.append(len(record))
        if len(self.at) % _CHECKED == 0:
            cells = len(self.at) * (2 + len(self.columns))
            check_objects(_CELL_BYTES * cells, offset + len(record), where)

    def append(self, later: "_ScanPart") -> None:
        """Add the next file's records."""
        self.at.extend(later.at.spread())
        self.stored.extend(later.stored.spread())
        for name, column in self.columns.items():
            column.append(later.columns[name], name)


def _scanned(file: File, wanted: _FeatureRequest) -> _ScanPart:
    part = _ScanPart(wanted)
    for number, (offset, record) in enumerate(records_of(file)):
        part.add(offset, record, f"{file.name}, record {number},")
    return part


def _likely_labels(names: Sequence[str], chosen: str | None) -> list[str]:
    """Return the features that may be the label, in the order of preference; the `chosen` one
    alone."""
    known = label_names(names, chosen)
    if chosen is not None:
        return known
    for ending in ("/label", "/class", "/class/text"):
        known += [name for name in names if name.endswith(ending) and name not in known]
    return known


def _labels_of(
    columns: Mapping[str, _Column], where: Callable[[int], str], chosen: str | None
) -> tuple[str | None, SampleLabels]:
    """Return (the label's feature, its labels): of features that may be it the first that gives
    labels, or the only whole number.

    Raises SourceError for a missing text.
    """
    labels = {name: LabelColumn() for name in _likely_labels(list(columns), chosen)}
    for name, own in labels.items():
        column = columns[name]
        kind = column.kind_of_field
        if kind == "int64":
            own.add_numbers(column.whole.spread().astype(np.int64))
        elif kind == "float32":
            own.add_numbers(np.array(column.values, np.float32))
        elif kind == "text":
            own.add_texts([each for each in column.values if isinstance(each, bytes)])
        else:
            own.refuse(not_scalar(kind))
    label, labelling = first_labels(labels, where)
    whole = [name for name, column in columns.items() if column.kind_of_field == "int64"]
    if label is None and chosen is None and len(whole) == 1:
        return whole[0], SampleLabels(columns[whole[0]].whole.spread().astype(np.int64), [])
    return label, labelling


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(each.isprintable() or each in "\n\r\t" for each in text)


# Samples

_SUFFIXES: Final = (".tfrecord", ".tfrecords", ".tfrec", ".tfr", ".record")
_PACKED: Final = tuple(f"{suffix}.gz" for suffix in _SUFFIXES)
_SHARD: Final = re.compile(r"(.+)-(\d{3,6})-of-(\d{3,6})")
_VERSION: Final = 2
_INDEX_VERSION: Final = 3
_RUN_BYTES: Final = 8 << 20
"""Bytes of a file's stretches, of which records that are neighbours are read together."""
_CHANGED: Final = "has changed since it was indexed: open it again"


class TfRecordReader(PathReader):
    """Read TFRecord files whose records are tf.train.Example: `train-*`, `x.tfrecord::image,label`.

    Features are fields: whole numbers int64, floats float32, single values as numbers, lists as
    arrays; bytes are images, text or bytes, depending on all values. One scan indexes a file, which
    of a local one skips over large values. Checksums are verified whenever a record is read.

    Args:
        path: a file, a folder, a pattern or a list, with the names of features after `::`; by
            default all features of the first record.
        label: the feature that is the label, whatever its name; the field is called `label`.

    Raises SourceError for compressed and cut off files, lists of several byte strings, and records
    that are not of tf.train.Example; CorruptBlock for wrong checksums; UsageError for a folder of
    several data sets.
    """

    format = "tfrecord"
    path_rules = PathRules(owns=lambda name: _named(name) or bool(_SHARD.fullmatch(name)))
    abilities = Abilities(random_access=True)

    def __init__(self, path: str | Sequence[str], label: str | None = None) -> None:
        paths, names = split_paths(path)
        names = with_label(names, label)
        files = _files_of(paths)
        self._files = concurrently(lambda each: each.opened_as(PersistentFile), files, files[0].url)
        concurrently(lambda file: file.stamp, self._files, files[0].url)  # Kept by the files.
        about = repr((names, label)).encode("utf-8", "surrogateescape")
        index = cached_index(
            f"tfrecord-{xxhash.xxh3_64_hexdigest(about)}",
            _INDEX_VERSION,
            self._files,
            lambda: scan(self.path, names, self._files, label),
        )
        head = json.loads(index["head"].tobytes())
        self._features = [(name, kind) for name, kind in head["fields"]]
        self._label = label
        self.schema = Schema(
            tuple((field_named(name, label), kind) for name, kind in self._features)
        )
        self.classes: Sequence[str] = head["classes"]
        self.labels = index["labels"]
        self._named, self.unlabelled = head["named"], head["unlabelled"]
        self._at, self._stored = index["at"], index["stored"]
        self._starts: list[int] = index["starts"].tolist()
        cuts = np.flatnonzero(np.diff(self._at // _RUN_BYTES)) + 1
        self._cuts = np.union1d(index["starts"], cuts)
        """First samples of the stretches of a file that are read at a time, at most."""
        bodies = {
            field_named(name, label): index["bodies"][:, k]
            for k, name in enumerate(head["variable"])
        }
        self.sizes = self.schema.payload_sizes(len(self._at), bodies)
        self._lay_out(_VERSION, self._files, self.sizes)
        bases = [os.path.basename(file.name) for file in self._files]
        full = [file.name for file in self._files]
        self._names = bases if len(set(bases)) == len(bases) else full

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_fields(expand(path)[0])[0]
        if _named(own_name(url)):
            return None
        source, file = Source(url), file_at(url)
        if source.is_folder():
            names = source.files()
            if any(_named(name.lower()) for name in names):
                return None
            shard = next((name for name in names if _SHARD.fullmatch(name)), None)
            if shard is None:
                return "holds no .tfrecord file"
            file = source.file_at(shard)
        elif not _SHARD.fullmatch(url.rsplit("/", 1)[-1]):
            return "is neither a .tfrecord nor a folder of them"
        try:
            return None if is_framed(file.opened()) else "does not begin like a TFRecord file"
        except SourceError:
            return "is not a file"

    def name(self, sample: int) -> str:
        file, number = self._locate(sample)
        return f"{self._names[file]}:{number}"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        for first, stop, slots in neighbours(samples, self._cuts):
            begin = int(self._at[first]) - HEAD.size
            end = int(self._at[stop - 1] + self._stored[stop - 1]) + FOOT.size
            memory = new_memory(end - begin)
            self._files[self._locate(first)[0]].read_into(begin, memory)
            for slot in slots:
                sample = int(samples[slot])
                at = int(self._at[sample]) - HEAD.size - begin
                stored = memory[at : at + int(self._stored[sample]) + AROUND]
                payloads[slot] = self._payload(sample, stored)
        return payloads

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _locate(self, sample: int) -> tuple[int, int]:
        """Return (number of the file, number of the record in it)."""
        file = bisect_right(self._starts, sample) - 1
        return file, sample - self._starts[file]

    def _payload(self, sample: int, stored: memoryview) -> bytes | memoryview:
        file, number = self._locate(sample)
        where = f"{self._files[file].name}, record {number},"
        record = RecordBytes(check_data(stored, where))
        try:
            features = features_of(record)
            values = {
                field_named(name, self._label): _value(record, features.get(name), kind)
                for name, kind in self._features
                if name != self._named
            }
            if self._named is not None:
                values[field_named(self._named, self._label)] = int(self.labels[sample])
            return self.schema.join(values)
        except (ValueError, CorruptBlock) as error:
            raise SourceError(f"{where} {error}") from error


def _value(record: RecordBytes, feature: Feature | None, kind: str) -> Any:
    """Return the value of a field of a kind. Raises ValueError if the feature has another."""
    wanted = kind.partition("[")[0]
    numeric = wanted in ("int64", "float32")
    if feature is None or feature.kind != (wanted if numeric else "bytes"):
        if feature is not None and count_of(record, feature):
            raise ValueError(_CHANGED)
        feature = None
    if not numeric:
        if feature is not None and len(feature.spans) > 1:
            raise ValueError(_CHANGED)
        if feature is None or not len(feature.spans):
            return b""
        return record.part(*feature.spans[0].tolist())
    values: npt.NDArray[Any] = np.zeros(0, wanted)
    if feature is not None:
        values = (ints_of if wanted == "int64" else floats_of)(record, feature)
    if "[" in kind:
        return values
    if len(values) != 1:
        raise ValueError(_CHANGED)
    return values[0].item()


def _named(name: str) -> bool:
    """True for the name of a TFRecord file, in lower case."""
    shard = _SHARD.fullmatch(name)
    return (shard[1] if shard else name).endswith((*_SUFFIXES, *_PACKED))


def _files_of(urls: Sequence[str]) -> list[FilePlace]:
    """Expand patterns; a folder becomes its TFRecord files.

    Raises UsageError if these are of several data sets.
    """
    files: list[FilePlace] = []
    for url in expand(list(urls)):
        source = Source(url)
        if not source.is_folder():
            files.append(file_at(url))
            continue
        names = source.files()
        named = [name for name in names if _named(name.lower())]
        named = named or [name for name in names if _SHARD.fullmatch(name)]
        sets = sorted({match[1] for name in named if (match := _SHARD.fullmatch(name))})
        if len(sets) > 1:
            raise UsageError(
                f"{url} holds the files of {len(sets)} data sets, {', '.join(sets[:8])}: name one, "
                f"as in {inside(url, sets[0])}-*"
            )
        files += [source.file_at(name) for name in named]
    _warn_of_missing(files)
    return files


def _warn_of_missing(files: Sequence[FilePlace]) -> None:
    """Warn if the names of shards say that there are more of them."""
    matches = [match for each in files if (match := _SHARD.fullmatch(each.name))]
    totals = {int(match[3]) for match in matches}
    if len(totals) == 1 and len(matches) == len(files) < max(totals):
        log_warning("%d of %d files are read, by their names", len(files), max(totals))
