"""A parser of tf.train.Example: the protocol buffer that most TFRecord files hold, bounded.

    message Example  { Features features = 1; }
    message Features { map<string, Feature> feature = 1; }
    message Feature  { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }   value = 1 in each

A record is walked without copying its values: features are spans of bytes in it. Nothing is
allocated because a length claims it, and nesting has the depth of these messages.

Source: tensorflow/core/example/example.proto and feature.proto; protobuf.dev's encoding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dlio.data.schema import MAX_FIELDS
from dlio.errors import CorruptBlock

FeatureKind = Literal["bytes", "float32", "int64"]
_KINDS: Final[dict[int, FeatureKind]] = {1: "bytes", 2: "float32", 3: "int64"}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_KEY: Final = 1 << 12
"""Bytes of a feature's name."""
_VARINT_BYTES: Final = 10


class RecordBytes(Protocol):
    """The bytes of a record: a memoryview, or one that reads them when they are asked for."""

    def __len__(self) -> int: ...

    def part(self, start: int, end: int) -> bytes:
        """Return some of its bytes."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Values of a feature, as spans of the record."""

    kind: FeatureKind
    spans: tuple[tuple[int, int], ...]
    """Of bytes one span a value; of numbers each span holds one or several."""


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
    data = b"".join(record.part(start, end) for start, end in feature.spans)
    if not data:
        return np.zeros(0, np.int64)
    if len(data) <= _VARINT_BYTES and data[-1] < 0x80:  # A label, as a rule.
        return _few_ints(data)
    plain = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(plain < 0x80)
    if not len(ends) or ends[-1] != len(plain) - 1:
        raise CorruptBlock("has a number that is cut off: it is damaged; restore it")
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    places = np.arange(len(plain)) - np.repeat(starts, ends - starts + 1)
    if int(places.max()) >= _VARINT_BYTES:
        raise CorruptBlock("has a number of over ten bytes: it is damaged; restore it")
    digits = (plain & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(digits, starts).view(np.int64)


def _few_ints(data: bytes) -> npt.NDArray[np.int64]:
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
    data = b"".join(record.part(start, end) for start, end in feature.spans)
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def count_of(record: RecordBytes, feature: Feature) -> int:
    """Return the number of values of a feature. Raises CorruptBlock."""
    if feature.kind == "bytes":
        return len(feature.spans)
    if feature.kind == "float32":
        return sum(end - start for start, end in feature.spans) // 4
    return len(ints_of(record, feature))


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
        spans = []
        for inner, value, low, high in _fields(record, begin, stop):
            if inner != 1:
                continue
            single = {"bytes": _LENGTH, "float32": _FIXED32, "int64": _VARINT}[kind]
            if value not in (single, _LENGTH) or (kind == "float32" and (high - low) % 4):
                raise CorruptBlock(f"has a list of {kind} that is damaged: restore it")
            spans.append((low, high))
        made = Feature(kind, tuple(spans))
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
