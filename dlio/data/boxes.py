"""Boxes as fields of samples, in any format, and how many of them each class has."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader, abilities_of, data_bytes
from dlio.data.schema import Buffer, Schema

_LABELS: Final = "box_labels"
_FIELDS: Final = {"boxes": "float32[?,4]", _LABELS: "int64[?]"}
_MOST_READ: Final = 64 << 20
"""Bytes of a data set that is read to count its boxes, at most."""
_MOST_CLASSES: Final = 1 << 16
_TOGETHER: Final = 256


def has_boxes(schema: Schema) -> bool:
    """True if samples have boxes and their classes."""
    known = dict(schema.fields)
    return all(known.get(name) == kind for name, kind in _FIELDS.items())


class BoxCounts:
    """Boxes of each class, by its number, added up over payloads."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Boxes of each class up to the last one that has some; shape (classes,)."""
        self.is_known = has_boxes(schema)
        """False without boxes, and for labels other than numbers of classes."""

    def add(self, payloads: Iterable[Buffer]) -> None:
        """Count the boxes of some payloads. Raises CorruptBlock for one that has other fields."""
        if not self.is_known:
            return
        labels = [np.asarray(self._schema.split(payload)[_LABELS]) for payload in payloads]
        every = np.concatenate(labels) if labels else np.zeros(0, np.int64)
        if len(every) and (every.min() < 0 or every.max() >= _MOST_CLASSES):
            self.is_known = False
            return
        self.counts = _sum(self.counts, np.bincount(every).astype(np.int64))


def total_of(parts: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the boxes of each class in several parts of a data set."""
    made = np.zeros(0, np.int64)
    for part in parts:
        made = _sum(made, np.array(part, np.int64))
    return made


def by_name(classes: Sequence[str], counts: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return the boxes of each class that has some, by its name, or its number without one."""
    rows = enumerate(counts.tolist())
    return {classes[k] if k < len(classes) else str(k): count for k, count in rows if count}


def boxes_by_class(reader: Reader) -> dict[str, int] | None:
    """Return the boxes of each class that has some; {} if that would take long to find out, None
    for data sets without boxes. Raises SourceError or CorruptBlock."""
    known = abilities_of(reader).box_counts
    if known is not None:
        return known()
    if not has_boxes(reader.schema):
        return None
    if data_bytes(reader) > _MOST_READ:
        return {}
    counts = BoxCounts(reader.schema)
    for first in range(0, len(reader), _TOGETHER):
        samples = np.arange(first, min(first + _TOGETHER, len(reader)), dtype=np.int64)
        counts.add(reader.read(samples))
    return by_name(reader.classes, counts.counts) if counts.is_known else {}


def _sum(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    made = np.zeros(max(len(left), len(right)), np.int64)
    made[: len(left)] += left
    made[: len(right)] += right
    return made
