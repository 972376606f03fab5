"""Statistics of a table's columns, which all ranks compute together in one pass over it.

The rows are cut into chunks whose size depends on the number of rows alone; each rank reads some of
them, and all ranks merge the results in the order of chunks (Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979). So mean and variance are
the same, bit for bit, on any number of ranks.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.data.reader_contract import Reader, SampleName
from dlio.data.schema import Buffer, Kind
from dlio.errors import CorruptBlock, SourceError
from dlio.train.tasks.table_columns import is_missing

MOST_VALUES: Final = 1000
"""Different values of a column from which on they are no longer listed."""
_PIECE: Final = 4096
"""Rows that are read together."""
_MOST_CHUNKS: Final = 1024
_LARGEST: Final = 2.0**480
"""Values from here on, such as those that stand for missing ones in some programs, count as
missing: sums of their squares would overflow."""
_UNKNOWN: Final = "?"
"""A missing value that readers of tables do not take for a number's, unlike the others."""
_THOUSANDS: Final = re.compile(r"\s*[+-]?\d{1,3}([,.' ]\d{3})+([.,]\d+)?\s*")
"""Matches a number with separators of thousands."""


@dataclass(slots=True)
class ColumnMoments:
    """Mean and sum of squared differences from it, of the finite values of a column."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    missing: int = 0

    def merge(self, other: "ColumnMoments") -> None:
        """Add the values of other rows."""
        self.missing += other.missing
        if not other.count:
            return
        total = self.count + other.count
        step = other.mean - self.mean
        self.squares += other.squares + step * step * (self.count * other.count / total)
        self.mean += step * (other.count / total)
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation; 1 if all values are equal."""
        return math.sqrt(self.squares / self.count) or 1.0 if self.count else 1.0

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> "ColumnMoments":
        """Moments of some values; those that are not finite, or not below 2**480, are missing."""
        sound = values[np.abs(values) < _LARGEST]  # False for NaN.
        if not len(sound):
            return cls(missing=len(values))
        # Relative to one of them: the mean of equal values is then this value to the last bit.
        apart = sound - sound[0]
        mean = float(apart.mean())
        squares = float(np.square(apart - mean).sum())
        return cls(len(sound), float(sound[0]) + mean, squares, len(values) - len(sound))


@dataclass(slots=True)
class ValueCounts:
    """The different values of a column, as texts."""

    counts: dict[str, int] = field(default_factory=dict)
    missing: int = 0
    has_more: bool = False
    """True if there are more than `MOST_VALUES`: then `counts` is empty."""
    texts: int = 0
    """Number of values of a column of texts."""
    numbers: int = 0
    """Number of those that are numbers, with or without separators of thousands."""
    not_number: str = ""
    """A text that is not a number as it stands; empty if there is none."""

    @classmethod
    def of_texts(cls, values: Sequence[str]) -> "ValueCounts":
        """The values of a column of texts."""
        counts_of = cls()
        for value in values:
            if is_missing(value):
                counts_of.missing += 1
                if value.strip() == _UNKNOWN:
                    counts_of.not_number = value
            else:
                counts_of.counts[value] = counts_of.counts.get(value, 0) + 1
        for value, count in counts_of.counts.items():
            is_number = _is_number(value)
            counts_of.texts += count
            if is_number or _THOUSANDS.fullmatch(value):
                counts_of.numbers += count
            if not is_number and not counts_of.not_number:
                counts_of.not_number = value
        counts_of.merge(cls())
        return counts_of

    def merge(self, other: "ValueCounts") -> None:
        """Add the values of other rows."""
        self.missing += other.missing
        self.has_more |= other.has_more
        self.texts += other.texts
        self.numbers += other.numbers
        self.not_number = self.not_number or other.not_number
        for value, count in other.counts.items():
            self.counts[value] = self.counts.get(value, 0) + count
        if self.has_more or len(self.counts) > MOST_VALUES:
            self.counts, self.has_more = {}, True


def column_names(reader: Reader) -> dict[str, tuple[str, int | None]]:
    """Return (field, place) by column name: arrays of one dimension are several columns.

    A field `x` of the kind `float32[3]` gives the columns `x[0]`, `x[1]` and `x[2]`.
    """
    columns: dict[str, tuple[str, int | None]] = {}
    for name, kind in reader.schema.kinds.items():
        if len(kind.shape) == 1 and kind.fixed:
            columns |= {f"{name}[{k}]": (name, k) for k in range(kind.shape[0] or 0)}
        else:
            columns[name] = (name, None)
    return columns


def table_statistics(
    reader: Reader, numbers: Sequence[str], values: Sequence[str], comm: Communicator
) -> tuple[dict[str, ColumnMoments], dict[str, ValueCounts]]:
    """Return the moments of some columns, and the values of some, by name. Collective.

    Names are those of `column_names`. Raises SourceError for a sample that cannot be read.
    """
    count = len(reader)
    size = max(_PIECE, -(-count // _MOST_CHUNKS))
    places = column_names(reader)
    mine = []
    for begin in range(comm.rank * size, count, comm.size * size):
        moments = {name: ColumnMoments() for name in numbers}
        values_of = {name: ValueCounts() for name in values}
        for low in range(begin, min(count, begin + size), _PIECE):
            rows = np.arange(low, min(count, begin + size, low + _PIECE), dtype=np.int64)
            read = _columns(reader, rows, {*numbers, *values}, places)
            for name in numbers:
                moments[name].merge(ColumnMoments.of(np.asarray(read[name], np.float64)))
            for name in values:
                values_of[name].merge(_value_counts(read[name]))
        mine.append(
            (
                [(m.count, m.mean, m.squares, m.missing) for m in moments.values()],
                [astuple(v) for v in values_of.values()],
            )
        )
    everyone = comm.allgather(mine)
    moments = {name: ColumnMoments() for name in numbers}
    values_of = {name: ValueCounts() for name in values}
    for each_numbers, each_values in _in_order(everyone):
        for total, row in zip(moments.values(), each_numbers, strict=True):
            total.merge(ColumnMoments(*row))
        for counts, row in zip(values_of.values(), each_values, strict=True):
            counts.merge(ValueCounts(*row))
    return moments, values_of


def _in_order(everyone: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yield the ranks' results for chunks, in the order of chunks."""
    for turn in range(max(map(len, everyone))):
        for chunks in everyone:
            if turn < len(chunks):
                yield chunks[turn]


def _columns(
    reader: Reader,
    rows: npt.NDArray[np.int64],
    names: set[str],
    places: Mapping[str, tuple[str, int | None]],
) -> dict[str, Any]:
    """Read rows; return the values of columns: arrays of numbers, and lists of texts."""
    payloads = reader.read(rows)
    wanted = {places[name][0] for name in names}
    fixed = {name: (kind, at) for name, kind, at in reader.schema.places() if name in wanted}
    fields: dict[str, Any] = {}
    if fixed:
        # Fields of fixed size lie at the same place in all payloads, before the others.
        ends = max(at + kind.bytes for kind, at in fixed.values())
        if any(len(payload) < ends for payload in payloads):
            raise SourceError(f"{reader.path}: a row is shorter than its columns: restore the file")
        joined = b"".join(bytes(memoryview(payload)[:ends]) for payload in payloads)
        table = np.frombuffer(joined, np.uint8).reshape(len(rows), ends)
        fields = {name: _of_kind(table, kind, at) for name, (kind, at) in fixed.items()}
    texts = wanted - set(fields)
    if texts:
        split = [_split(reader, int(k), payload) for k, payload in zip(rows, payloads, strict=True)]
        fields |= {name: [str(row[name], "utf-8") for row in split] for name in texts}
    columns = {}
    for name in names:
        source, place = places[name]
        columns[name] = fields[source] if place is None else fields[source][:, place]
    return columns


def _of_kind(table: npt.NDArray[np.uint8], kind: Kind, at: int) -> npt.NDArray[Any]:
    assert kind.dtype is not None
    cut = np.ascontiguousarray(table[:, at : at + kind.bytes])
    shape = tuple(size or 0 for size in kind.shape)
    return cut.view(kind.dtype).reshape(len(table), *shape)


def _split(reader: Reader, sample: int, payload: Buffer) -> dict[str, Any]:
    try:
        return reader.schema.split(payload)
    except CorruptBlock as error:
        raise SourceError(f"{reader.path}: {SampleName(reader, sample)}: {error}") from error


def _value_counts(values: Any) -> ValueCounts:
    if isinstance(values, np.ndarray):
        return _counts_of_numbers(values)
    return ValueCounts.of_texts(values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _counts_of_numbers(values: npt.NDArray[Any]) -> ValueCounts:
    counts_of = ValueCounts()
    if values.dtype.kind == "f":
        sound = np.isfinite(values)
        counts_of.missing, values = int((~sound).sum()), values[sound]
    different, counts = np.unique(values, return_counts=True)
    counts_of.counts = {
        value_text(v): int(n) for v, n in zip(different.tolist(), counts, strict=True)
    }
    counts_of.merge(ValueCounts())
    return counts_of


def value_text(value: float | bool) -> str:
    """Return a number as the text of a category: 3 and 3.0 are the same one."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
