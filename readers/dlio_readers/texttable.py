"""Tables of text, whose first line names their columns: `.csv`, `.tsv`."""

import csv
import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, cached_index
from dlio.data.labels import MISSING, label_name
from dlio.data.source import File, own_name
from dlio.errors import SourceError, UsageError
from dlio_readers.columns import Column, ConcatColumn
from dlio_readers.compressed_files import SUFFIXES as COMPRESSED
from dlio_readers.compressed_files import in_memory
from dlio_readers.path_reader import check_names

FEATURES: Final = "features"
"""Field that holds the columns of `columns=` as one array."""
_ALL: Final = "*"
_VERSION: Final = 3
_MAX_TEXT: Final = 4 << 30
_MAX_HEADER: Final = 1 << 24
_MAX_CELL: Final = (1 << 31) - 1
_MOST_KEPT: Final = 1 << 13
"""Parsed rows that a thread keeps for the other columns, at most."""
_SEPARATORS: Final = (",", ";", "\t", "|")
_MAX_DIGITS: Final = 64
"""Characters of a whole number: Python converts no number of thousands of digits."""
_WHOLE: Final = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class _TextColumnFacts:
    """A column of one file, from the file's index."""

    name: str
    kind: str
    """`int64`, `float64`, `text`, or `none` if all values are missing."""
    missing: int
    """Number of the first row without a value, as numbers go; -1 if all have one."""
    blank: int
    """Number of the first row with an empty text, -1 for none."""


class _LastRows(threading.local):
    """The rows that a thread has parsed last: it reads them once for each column."""

    key: tuple[int, int] = (0, 0)
    rows: Sequence[list[str]] = ()


@dataclass(frozen=True, slots=True)
class _TableFile:
    file: File
    index: Arrays
    separator: str
    facts: tuple[_TextColumnFacts, ...]
    last: "_LastRows" = field(default_factory=_LastRows, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.facts)

    @property
    def count(self) -> int:
        return len(self.index["starts"]) - 1


def open_text_tables(
    files: Sequence[File],
    names: Sequence[str],
    separator: str | None = None,
    features: Sequence[str] | str | None = None,
) -> tuple[Mapping[str, Column], int]:
    """Return (columns, rows) of some files as one table. Their indexes are cached.

    Columns in `names` are read, all if it is empty; without a separator the first line tells it.
    With `features`, columns of numbers that become one array, `FEATURES` ("*" for all of them but
    the label), only the label and `names` are read of the others.

    Raises SourceError for damaged files and missing labels, UsageError for columns that the files
    do not have.
    """
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise UsageError(f"separator={separator!r}: give one character, such as ';'")
    parts = [_part(file, separator) for file in files]
    header = parts[0].names
    for part in parts[1:]:
        if part.names != header:
            raise SourceError(
                f"{part.file.name} has the columns {', '.join(part.names)}, but "
                f"{parts[0].file.name} has {', '.join(header)}: read them one by one"
            )
    kinds = {name: _kind([part.facts[k] for part in parts]) for k, name in enumerate(header)}
    label = label_name(header)
    if label is not None and kinds[label] == "":
        kinds[label] = "text"  # NA is a name among labels.
    kinds = {name: kind or "float64" for name, kind in kinds.items()}
    check_names(parts[0].file.name, names, header, "column")
    matrix = _feature_names(parts[0].file.name, kinds, label, features)
    chosen = list(names) or list(header)
    if features is not None:
        chosen = [name for name in header if name in names or name == label]
    if label in chosen:
        _check_labels(parts, header.index(label), kinds[label])
    columns: dict[str, Column] = {}
    if features is not None:
        if FEATURES in chosen:
            raise UsageError(f"{parts[0].file.name} has a column {FEATURES!r}: rename it")
        numbers = [header.index(name) for name in matrix]
        columns[FEATURES] = _joined(parts, lambda part: _Matrix(part, numbers))
    for name in chosen:
        make = partial(_TextColumn, number=header.index(name), kind=kinds[name])
        columns[name] = _joined(parts, make)
    return columns, sum(part.count for part in parts)


def _joined(parts: Sequence[_TableFile], make: Callable[[_TableFile], Column]) -> Column:
    columns = [make(part) for part in parts]
    if len(columns) == 1:
        return columns[0]
    return ConcatColumn(columns, [part.count for part in parts])


def _part(file: File, separator: str | None) -> _TableFile:
    if separator is None and ".tsv" in own_name(file.name)[-8:]:
        separator = "\t"
    if own_name(file.name).endswith(COMPRESSED):
        file = in_memory(file)
    kind = "table" if separator is None else f"table{ord(separator)}"
    index = cached_index(kind, _VERSION, [file], lambda: _table_index(file, separator))
    head = json.loads(index["head"].tobytes())
    facts = tuple(_TextColumnFacts(*row) for row in head["columns"])
    return _TableFile(file, index, head["separator"], facts)


def _feature_names(
    path: str, kinds: Mapping[str, str], label: str | None, features: Sequence[str] | str | None
) -> list[str]:
    """Return the columns that make up the array of features. Raises UsageError."""
    if features is None:
        return []
    if features == _ALL:
        chosen = [name for name, kind in kinds.items() if kind != "text" and name != label]
    else:
        chosen = [features] if isinstance(features, str) else list(features)
    check_names(path, chosen, list(kinds), "column")
    texts = [name for name in chosen if kinds[name] == "text"]
    if texts:
        raise UsageError(
            f"columns=: {texts[0]!r} of {path} is text: leave it out, or replace it by numbers"
        )
    if not chosen:
        raise UsageError(f"columns=: {path} has no columns of numbers: leave it out")
    return chosen


def _kind(facts: Sequence[_TextColumnFacts]) -> str:
    """Return the kind of a column of all files; empty if all its values are missing."""
    kinds = {each.kind for each in facts}
    if "text" in kinds:
        return "text"
    if kinds == {"none"}:
        return ""
    missing = any(each.missing >= 0 for each in facts)
    return "int64" if kinds == {"int64"} and not missing else "float64"


def _check_labels(parts: Sequence[_TableFile], number: int, kind: str) -> None:
    """Raise SourceError if a label of classes is missing; a number to predict may be."""
    whole = not any(part.facts[number].kind == "float64" for part in parts)
    whole = whole and any(part.facts[number].kind == "int64" for part in parts)
    for part in parts:
        facts = part.facts[number]
        row = facts.blank if kind == "text" else facts.missing if whole else -1
        if row >= 0:
            raise SourceError(
                f"{part.file.name}, row {row + 2}: its {facts.name} is missing: fill or drop the "
                "row, or name the columns to read, as in x.csv::a,b"
            )


def _parsed(part: _TableFile, start: int, stop: int) -> Sequence[list[str]]:
    last = part.last
    if last.key == (start, stop):
        return last.rows
    low, high = int(part.index["starts"][start]), int(part.index["starts"][stop])
    text = part.file.read(low, high - low).decode("utf-8")
    table = _cells(io.StringIO(text, newline=""), part.separator)
    rows = [row for row in table if row]
    if len(rows) != stop - start:
        raise SourceError(f"{part.file.name} has changed since it was opened: run again")
    if stop - start <= _MOST_KEPT:
        last.key, last.rows = (start, stop), rows
    return rows


def _cells(lines: Iterable[str], separator: str, strict: bool = False) -> Iterator[list[str]]:
    """Parse lines into rows with cells of any length.

    Python's module has one limit for all of a process, of 128 KiB, which only ever rises here:
    other threads may parse meanwhile.
    """
    if csv.field_size_limit() < _MAX_CELL:
        csv.field_size_limit(_MAX_CELL)
    return csv.reader(lines, delimiter=separator, strict=strict)


class _TextColumn:
    """One column of a file, parsed row by row when read."""

    unit = 1

    def __init__(self, part: _TableFile, number: int, kind: str) -> None:
        self._part, self._number, self.kind = part, number, kind

    def bodies(self) -> npt.NDArray[np.int64] | None:
        bodies: npt.NDArray[np.int64] = self._part.index["bodies"][:, self._number]
        return bodies if self.kind == "text" else None

    def rows(self, start: int, stop: int) -> Any:
        values = [row[self._number] for row in _parsed(self._part, start, stop)]
        if self.kind == "text":
            return values
        if self.kind == "float64":
            return np.array([_number(value) for value in values], np.float64)
        return np.array([int(value) for value in values], np.int64)


class _Matrix:
    """Columns of numbers as one array of each row."""

    unit = 1

    def __init__(self, part: _TableFile, numbers: Sequence[int]) -> None:
        self._part, self._numbers = part, numbers
        self.kind = f"float32[{len(numbers)}]"

    def bodies(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        rows = _parsed(self._part, start, stop)
        return np.array([[_number(row[k]) for k in self._numbers] for row in rows], np.float32)


def _number(text: str) -> float:
    return math.nan if text.strip() in MISSING else float(text)


def _table_index(file: File, separator: str | None) -> Arrays:
    """Index the offsets of rows, the kinds of columns and the sizes of texts."""
    if file.size > _MAX_TEXT:
        raise SourceError(f"{file.name} of {file.size} bytes is too large a table: write Parquet")
    data = file.read()
    data = data.removeprefix(b"\xef\xbb\xbf") if data.startswith(b"\xef\xbb\xbf") else data
    shift = file.size - len(data)
    if separator is None:
        separator = _separator(data)
    starts, rows = _rows(data, shift, separator, file.name)
    header, rows = rows[0], rows[1:]
    if not rows or len(set(header)) != len(header):
        raise SourceError(f"{file.name} needs a line of different names on top, and rows below")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise SourceError(
                f"{file.name}, row {number + 2}: {len(row)} values, where the first line names "
                f"{len(header)}"
            )
    columns = [
        _facts(name, values) for name, values in zip(header, zip(*rows, strict=True), strict=True)
    ]
    head = {"columns": columns, "separator": separator}
    sizes = [[len(value.encode()) for value in row] for row in rows]
    return {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "starts": np.array(starts[1:], np.int64),
        "bodies": np.array(sizes, np.int64),
    }


def _separator(data: bytes) -> str:
    """Return the character that divides the first line into the most values, a comma at a tie."""
    line = next(iter(data[:_MAX_HEADER].splitlines()), b"").decode("utf-8", "replace")
    return max(_SEPARATORS, key=lambda each: len(next(csv.reader([line], delimiter=each), [])))


def _rows(data: bytes, shift: int, separator: str, name: str) -> tuple[list[int], list[list[str]]]:
    """Return (offset of each row, followed by the end; the rows)."""
    starts, rows = [], []
    at = begin = shift
    lines = iter(data.splitlines(keepends=True))

    def feed() -> Any:
        nonlocal at
        for line in lines:
            at += len(line)
            yield line.decode("utf-8")

    try:
        for row in _cells(feed(), separator, strict=True):
            if row:
                starts.append(begin)
                rows.append(row)
            begin = at
    except (csv.Error, UnicodeDecodeError) as error:
        raise SourceError(f"{name} at byte {begin}: {error}") from error
    if not rows:
        raise SourceError(f"{name} is empty")
    return [*starts, at], rows


def _facts(name: str, values: Sequence[str]) -> list[Any]:
    """Return the fields of `_TextColumnFacts` of a column."""
    gaps = [row for row, value in enumerate(values) if value.strip() in MISSING]
    blank = next((row for row in gaps if not values[row].strip()), -1)
    skipped = set(gaps)
    present = [value for row, value in enumerate(values) if row not in skipped]
    return [name, _kind_of(present), gaps[0] if gaps else -1, blank]


def _kind_of(values: Sequence[str]) -> str:
    if not values:
        return "none"
    if all(_WHOLE.fullmatch(value) for value in values):
        # Numbers such as keys of 20 digits would lose digits as floats.
        short = all(len(value) <= _MAX_DIGITS for value in values)
        return "int64" if short and all(abs(int(value)) < 2**63 for value in values) else "text"
    try:
        for value in values:
            float(value)
    except ValueError:
        return "text"
    return "text" if any("_" in value for value in values) else "float64"
