"""One scan over TFRecord files: where records lie, their features, the sizes of values, labels.

Each file is scanned on its own, over a network many of them at a time, and the results are put
together in their order. Nothing of a file stays in memory but the numbers of its records.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dlio.data.index import Arrays
from dlio.data.labels import LABEL_NAMES
from dlio.data.schema import Schema, array_kind
from dlio.data.source import File
from dlio.errors import CorruptBlock, SourceError, UsageError
from dlio.util.arguments import nearest
from dlio_readers.columns import looks_like
from dlio_readers.concurrency import concurrently
from dlio_readers.tfexample import Feature, FeatureKind, count_of, features_of, ints_of
from dlio_readers.tfframes import LazyRecord, records_of

_TEXT_BYTES: Final = 1 << 10
"""Bytes of the longest value that is text, if all values of its feature are."""
_HEAD_BYTES: Final = 16


def scan(path: str, names: Sequence[str], files: Sequence[File]) -> Arrays:
    """Return offsets, sizes, kinds and labels of all records.

    Args:
        path: of the data set, for errors.
        names: features to read; all of the first record if empty.

    Raises SourceError for files without records, and for records that do not fit together;
    CorruptBlock for wrong checksums; UsageError for names that the first record lacks.
    """
    wanted = _wanted(path, names, files)
    whole = _ScanPart(wanted)
    starts = []
    for part in concurrently(lambda file: _scanned(file, wanted), files, files[0].url):
        starts.append(len(whole.at))
        whole.append(part)
    fields = [(name, column.kind_of_field) for name, column in whole.columns.items()]
    schema = Schema(tuple(fields))
    variable = [name for name, _ in fields if not schema.kinds[name].fixed]
    bodies = [np.array(whole.columns[name].bodies, np.int64) for name in variable]
    label = _label_of([name for name, kind in fields if kind == "int64"])
    count = len(whole.at)
    return {
        "head": np.frombuffer(
            json.dumps({"fields": fields, "variable": variable}).encode(), np.uint8
        ),
        "at": np.array(whole.at, np.int64),
        "stored": np.array(whole.stored, np.int64),
        "starts": np.array(starts, np.int64),
        "bodies": np.stack(bodies, 1) if bodies else np.zeros((count, 0), np.int64),
        "labels": np.array(whole.columns[label].whole, np.int64)
        if label
        else np.zeros(count, np.int64),
    }


@dataclass(frozen=True, slots=True)
class _FeatureRequest:
    """Features to read."""

    path: str
    names: tuple[str, ...]
    all: bool
    """True if these are all features of the first record, beyond which no record may have any."""


def _wanted(path: str, names: Sequence[str], files: Sequence[File]) -> _FeatureRequest:
    """Return the features to read, from the first record."""
    for file in files:
        for _, record in records_of(file):
            where = f"{file.name}, record 0,"
            try:
                features = features_of(record)
            except CorruptBlock as error:
                raise SourceError(f"{where} {error}") from error
            for name in names:
                if name not in features:
                    raise UsageError(
                        f"{where} has no feature {name!r}: it has {', '.join(sorted(features))}"
                        f"{nearest(name, features)}"
                    )
            if not features:
                raise SourceError(f"{where} has no features")
            return _FeatureRequest(path, tuple(names) or tuple(sorted(features)), not names)
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
    bodies: list[int] = field(default_factory=list)
    """Bytes of the values of each record."""
    whole: list[int] = field(default_factory=list)
    """The values, as long as each is a single whole number."""
    images: set[str] = field(default_factory=set)
    is_text: bool = True

    def add(self, record: LazyRecord, feature: Feature | None, where: str, name: str) -> None:
        """Add a record's values."""
        count = 0 if feature is None else count_of(record, feature)
        if len(self.counts) < 3:
            self.counts.add(count)
        if feature is None or not count:
            self.bodies.append(0)
            return
        self._agree(feature.kind, where, name)
        if feature.kind != "bytes":
            self.bodies.append(count * (8 if feature.kind == "int64" else 4))
            if feature.kind == "int64" and self.counts == {1}:
                self.whole.append(int(ints_of(record, feature)[0]))
            return
        if count > 1:
            raise SourceError(
                f"{where} has {count} byte strings in {name!r}, which samples cannot have: name "
                "the features to read, as in x.tfrecord::image,label"
            )
        start, end = feature.spans[0]
        self.bodies.append(end - start)
        self.images.add(looks_like(record.part(start, min(end, start + _HEAD_BYTES))))
        if self.is_text:
            self.is_text = end - start <= _TEXT_BYTES and _is_text(record.part(start, end))

    def append(self, later: "_Column", name: str) -> None:
        """Add the values of the next file's records."""
        if later.kind is not None:
            self._agree(later.kind, later.where, name)
        self.counts |= later.counts
        self.bodies += later.bodies
        self.whole += later.whole
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


class _ScanPart:
    """Facts about some records."""

    def __init__(self, wanted: _FeatureRequest) -> None:
        self._wanted = wanted
        self.at: list[int] = []
        """Offset of each record's data in its file."""
        self.stored: list[int] = []
        """Bytes of it."""
        self.columns = {name: _Column() for name in wanted.names}

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

    def append(self, later: "_ScanPart") -> None:
        """Add the next file's records."""
        self.at += later.at
        self.stored += later.stored
        for name, column in self.columns.items():
            column.append(later.columns[name], name)


def _scanned(file: File, wanted: _FeatureRequest) -> _ScanPart:
    part = _ScanPart(wanted)
    for number, (offset, record) in enumerate(records_of(file)):
        part.add(offset, record, f"{file.name}, record {number},")
    return part


def _label_of(whole: Sequence[str]) -> str:
    """Return the label among the fields that are whole numbers; empty without one."""
    known: list[str] = [name for name in LABEL_NAMES if name in whole]
    known += [name for name in whole if name.endswith("/label")]
    known += whole if len(whole) == 1 else []
    return known[0] if known else ""


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(each.isprintable() or each in "\n\r\t" for each in text)
