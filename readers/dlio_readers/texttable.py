"""Tables of text, whose first line names their columns: `.csv`, `.tsv`."""

import contextlib
import csv
import io
import itertools
import json
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.index import Arrays, cached_index
from dlio.data.index_memory import GrowingColumn
from dlio.data.labels import (
    LABEL_NAMES,
    MAX_CLASSES,
    MISSING,
    are_alike,
    is_number,
    label_name,
    label_names,
    no_such_label,
)
from dlio.data.schema import WholeNumbers
from dlio.data.source import File
from dlio.errors import SourceError, UsageError
from dlio.util.limits import check_objects
from dlio.util.printable import tell_once
from dlio.util.structured_text import not_utf8, separator_of
from dlio.util.units import counted
from dlio_readers.columns import Column, ConcatColumn
from dlio_readers.compressed_files import SUFFIXES as COMPRESSED
from dlio_readers.compressed_files import in_memory
from dlio_readers.feature_columns import FEATURES, NUMBER, feature_names
from dlio_readers.path_reader import check_names

_VERSION: Final = 7
_MAX_TEXT: Final = 4 << 30
_LINE_END: Final = re.compile(rb"[\r\n]")
_MAX_HEADER: Final = 1 << 24
_MAX_CELL: Final = (1 << 31) - 1
_MOST_KEPT: Final = 1 << 13
"""Parsed rows that a thread keeps for the other columns, at most."""
_PART: Final = 1 << 18
"""Bytes of a table that are indexed at a time."""
_ROWS: Final = 1 << 14
_COLUMN_BYTES: Final = 2048
"""Memory that a column takes while a table is indexed and opened, whatever its rows."""
_MAX_DIGITS: Final = 64
"""Characters of a whole number: Python converts no number of thousands of digits."""
_LOOKED_AT: Final = 256
_MOST_STEP: Final = 1000
"""Largest step of numbers that name columns, such as years and wavelengths."""
_MOSTLY: Final = 0.75
"""Part of the first values of a column that are numbers, by which it is told that it is text."""
_SIGNS: Final = re.compile(r"[,%$€£¥]|(?<!\d)\s+|\s+(?!\d)|(?<=\d)\s(?=\d{3}(?!\d))")
"""Parts of numbers for people; `1 2 3` are several numbers, and `1 234` is one."""
_THOUSANDS: Final = re.compile(r"[+-]?[0-9]{1,3},[0-9]{3}", re.ASCII)
"""A number that may have a decimal comma, or one between its thousands."""
_LONGEST_SHOWN: Final = 40
_HINT: Final = re.compile(rb"sep=([,;\t|])\r?\n", re.IGNORECASE)
"""A line by which Excel is told the separator."""
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
    odd: str
    """A value for which a column that is mostly numbers is text; "" without one."""


class _LastRows(threading.local):
    """The rows that a thread has parsed last, of all files: it reads them once for each column."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, int], Sequence[list[str]]] = OrderedDict()
        self._count = 0

    def get(self, span: tuple[str, int, int]) -> Sequence[list[str]] | None:
        """Return the rows of a span of a file, None if they are not kept."""
        return self._kept.get(span)

    def keep(self, span: tuple[str, int, int], rows: Sequence[list[str]]) -> None:
        """Keep rows, in place of those that were parsed first."""
        self._kept[span] = rows
        self._count += len(rows)
        while self._count > _MOST_KEPT:
            self._count -= len(self._kept.popitem(last=False)[1])


@dataclass(frozen=True, slots=True)
class _TableFile:
    file: File
    index: Arrays
    separator: str
    facts: tuple[_TextColumnFacts, ...]
    labels: Mapping[int, list[str]]
    """By column that may be the label, its different texts, which the index numbers."""
    last: _LastRows = field(repr=False, compare=False)

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
    label: str | None = None,
) -> tuple[Mapping[str, Column], int]:
    """Return (columns, rows) of some files as one table. Their indexes are cached.

    Columns in `names` are read, all if it is empty; without a separator the first line tells it.
    With `features`, columns of numbers that become one array, `FEATURES` ("*" for all of them but
    the label), only the label and `names` are read of the others. `label` may be
    chosen.

    Raises SourceError for damaged files and missing labels, UsageError for columns that the files
    do not have.
    """
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise UsageError(f"separator={separator!r}: give one character, such as ';'")
    last = _LastRows()
    parts = [_part(file, separator, last, chosen=label) for file in files]
    header = parts[0].names
    for part in parts[1:]:
        if part.names != header:
            raise SourceError(
                f"{part.file.name} has the columns {', '.join(part.names)}, but "
                f"{parts[0].file.name} has {', '.join(header)}: read them one by one"
            )
    _tell_of_header(parts[0].file.name, header)
    kinds = {name: _kind([part.facts[k] for part in parts]) for k, name in enumerate(header)}
    number_of = {name: k for k, name in enumerate(header)}
    if label is not None and label not in header:
        raise no_such_label(parts[0].file.name, header, label)
    chosen_label, label = label, label_name(header, label)
    if label is not None and kinds[label] == "":
        kinds[label] = "text"  # NA is a name among labels.
    if label is not None and kinds[label] in ("int64", "float64"):
        own = [part.labels.get(number_of[label], []) for part in parts]
        if not are_alike(text for text in itertools.chain(*own) if is_number(text)):
            kinds[label] = "text"
    kinds = {name: kind or "float64" for name, kind in kinds.items()}
    texts = {k for k, name in enumerate(header) if kinds[name] == "text"}
    for number, part in enumerate(parts):
        # A column of numbers is text if it is in another file.
        if any(f"bodies{k}" not in part.index for k in texts):
            wanted = frozenset(header[k] for k in texts)
            parts[number] = _part(part.file, separator, last, wanted, chosen_label)
    _tell_of_numbers(parts, header, texts - {number_of.get(label or "", -1)})
    check_names(parts[0].file.name, names, header, "column")
    chosen = list(names) or list(header)
    if features is not None:
        chosen = [name for name in header if name in names or name == label]
    if label in chosen:
        _check_labels(parts, number_of[label], kinds[label])
    columns: dict[str, Column] = {}
    if features is not None:
        plain = {name: "text" if kind == "text" else NUMBER for name, kind in kinds.items()}
        matrix = feature_names(parts[0].file.name, plain, label, features, chosen)
        numbers = [number_of[name] for name in matrix]
        columns[FEATURES] = _joined(parts, lambda part: _Matrix(part, numbers))
    for name in chosen:
        make = partial(_TextColumn, number=number_of[name], kind=kinds[name])
        columns[name] = _joined(parts, make)
    return columns, sum(part.count for part in parts)


def _tell_of_header(path: str, header: Sequence[str]) -> None:
    """Warn once if the first line, which names the columns, may be a sample: one of its values is a
    number, and they do not count the columns as 0, 1, 2."""
    numbers = [float(name) for name in header if is_number(name)]
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    counts = (len(steps) == 1 and 0 < steps.pop() <= _MOST_STEP) or numbers == [0.0]
    if numbers and not counts:
        tell_once(
            f"{path}: its first line, {', '.join(header[:4])}, names its columns: "
            "if it is a sample, write a line of names above it"
        )


def _joined(parts: Sequence[_TableFile], make: Callable[[_TableFile], Column]) -> Column:
    columns = [make(part) for part in parts]
    if len(columns) == 1:
        return columns[0]
    return ConcatColumn(columns, [part.count for part in parts])


def _tell_of_numbers(
    parts: Sequence[_TableFile], header: Sequence[str], texts: Iterable[int]
) -> None:
    """Warn once of columns that are mostly numbers, and are text for one of their values."""
    odd = {
        header[k]: next((part.facts[k].odd for part in parts if part.facts[k].odd), "")
        for k in sorted(texts)
        if header[k] not in LABEL_NAMES
    }
    odd = {name: value for name, value in odd.items() if value}
    commas = [n for n, value in odd.items() if is_number(value.strip().replace(",", ".", 1))]
    where = parts[0].file.name
    for is_thousand in (False, True):
        own = [n for n in commas if bool(_THOUSANDS.fullmatch(odd[n].strip())) == is_thousand]
        if own:
            kind = "commas, such as " + odd[own[0]].strip() if is_thousand else "decimal commas"
            remedy = "decimals with points, and thousands without a sign"
            tell_once(
                f"{where}: numbers with {kind} are read as text, in its columns {', '.join(own)}: "
                f"write {remedy if is_thousand else 'them with points'}"
            )
    others = [f"{name} ({value!r})" for name, value in odd.items() if name not in commas]
    if others:
        tell_once(
            f"{where}: columns of numbers are read as text for a value that is none, "
            f"{', '.join(others)}: leave such cells empty, and write numbers without signs"
        )


def _part(
    file: File,
    separator: str | None,
    last: _LastRows,
    texts: frozenset[str] = frozenset(),
    chosen: str | None = None,
) -> _TableFile:
    """Open a file; its index has the sizes of the columns `texts`, and of its own texts, and the
    values of columns that may be labels, as the `chosen` one is."""
    if separator is None and ".tsv" in file.own_name[-8:]:
        separator = "\t"
    if file.own_name.endswith(COMPRESSED):
        file = in_memory(file)
    kind = "table" if separator is None else f"table{ord(separator)}"
    if texts or chosen is not None:
        own = repr((sorted(texts), chosen) if chosen is not None else sorted(texts))
        kind += f"-{xxhash.xxh3_64_hexdigest(own.encode('utf-8', 'replace'))}"
    index = cached_index(
        kind, _VERSION, [file], lambda: _table_index(file, separator, texts, chosen)
    )
    head = json.loads(index["head"].tobytes())
    facts = tuple(_TextColumnFacts(*row) for row in head["columns"])
    labels = {int(k): own for k, own in head["texts"].items()}
    return _TableFile(file, index, head["separator"], facts, labels, last)


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
    span = part.file.url, start, stop
    kept = part.last.get(span)
    if kept is not None:
        return kept
    low, high = int(part.index["starts"][start]), int(part.index["starts"][stop])
    text = part.file.read(low, high - low).decode("utf-8")
    table = _cells(io.StringIO(text, newline=""), part.separator)
    rows = [row for row in table if row]
    if len(rows) != stop - start:
        raise SourceError(f"{part.file.name} has changed since it was opened: run again")
    part.last.keep(span, rows)
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

    def bodies(self) -> WholeNumbers | None:
        if self.kind != "text":
            return None
        return np.broadcast_to(self._part.index[f"bodies{self._number}"], self._part.count)

    def codes(self, start: int, stop: int) -> tuple[list[str], npt.NDArray[np.int64]] | None:
        """Return (different texts, number of the text in each row) of a column that may be the
        label; None if it has too many."""
        texts = self._part.labels.get(self._number)
        if texts is None:
            return None
        codes = self._part.index[f"labels{self._number}"]
        if len(codes) == 1:
            return texts, np.zeros(stop - start, np.int64)
        return texts, codes[start:stop].astype(np.int64)

    @cached_property
    def _whole_numbers(self) -> npt.NDArray[np.int64]:
        """The different texts of a column of whole numbers that may be the label."""
        return np.array([int(text) for text in self._part.labels[self._number]], np.int64)

    def rows(self, start: int, stop: int) -> Any:
        # A single row is parsed anyway, for the other columns.
        codes = self.codes(start, stop) if self.kind == "int64" and stop - start > 1 else None
        if codes is not None:
            return self._whole_numbers[codes[1]]
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


def _table_index(
    file: File, separator: str | None, texts: frozenset[str], label: str | None = None
) -> Arrays:
    """Index the offsets of rows, the kinds of columns, the sizes of texts and the labels.

    The sizes are those of the columns `texts`, next to those that are found to be text. The table
    is read once, part by part; twice if a column turns out to be text after its first rows.
    """
    if file.size > _MAX_TEXT:
        raise SourceError(f"{file.name} of {file.size} bytes is too large a table: write Parquet")
    while True:
        scan = _TableScan(file, separator, texts, label)
        late = scan.run()
        if not late:
            return scan.arrays()
        texts |= late


class _TableScan:
    """A table that is being indexed."""

    def __init__(
        self, file: File, separator: str | None, texts: frozenset[str], label: str | None = None
    ) -> None:
        self._file, self._name, self._texts, self._label = file, file.name, texts, label
        first = file.read(0, _PART)
        self._at = 3 if first.startswith(b"\xef\xbb\xbf") else 0
        """Offset of the first byte that is not parsed yet."""
        hint = _HINT.match(first, self._at)
        if hint is not None and separator is None:
            self._at, separator = hint.end(), hint[1].decode()
        end = _LINE_END.search(first, self._at)
        if end is None:
            first = file.read(0, _MAX_HEADER)
            end = _LINE_END.search(first, self._at)
        line = first[self._at : end and end.start()].decode("utf-8", "replace")
        self._separator = separator_of(line) if separator is None else separator
        self._begin = self._at
        """Offset of the row that is being parsed."""
        self._starts = GrowingColumn()
        self._columns: list[_ColumnScan] = []

    def run(self) -> frozenset[str]:
        """Read the table; return the names of columns whose sizes would have to be known from the
        beginning. Raises SourceError.
        """
        parts = self._parts()
        try:
            for part in parts:
                rows = self._plain(part) if self._columns else None
                if rows is None:
                    self._parsed(part, parts)
                else:
                    self._add(*rows)
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._name} at byte {self._begin}: {not_utf8(error)}") from error
        except csv.Error as error:
            raise SourceError(f"{self._name} at byte {self._begin}: {error}") from error
        if not self._columns:
            raise SourceError(f"{self._name} is empty")
        if not len(self._starts):
            raise self._without_names()
        self._starts.append(self._at)
        return frozenset(
            each.name for each in self._columns if each.is_late and each.kind == "text"
        )

    def arrays(self) -> Arrays:
        """Return the index."""
        head = {
            "columns": [column.facts() for column in self._columns],
            "separator": self._separator,
            "texts": {str(k): list(c.codes) for k, c in enumerate(self._columns) if c.codes},
        }
        arrays: Arrays = {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "starts": self._starts.spread(),
        }
        for k, column in enumerate(self._columns):
            if column.has_sizes and not column.is_late:
                arrays[f"bodies{k}"] = column.sizes.values()
            if column.codes:
                arrays[f"labels{k}"] = column.labels.values()
        return arrays

    def _parts(self) -> Iterator[bytes]:
        """Yield the table in parts of about 256 KiB that end with a line; lines may end with CR."""
        at, held = self._at, []
        while at < self._file.size:
            data = self._file.read(at, min(_PART, self._file.size - at))
            if not data:
                raise SourceError(f"{self._name} has changed since it was opened: run again")
            at += len(data)
            # The last byte may be half of CR LF.
            cut = data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, -1) + 1
            held.append(data[:cut] if cut else data)
            if cut:
                yield b"".join(held)
                held = [data[cut:]]
        if any(held):
            yield b"".join(held)

    def _plain(
        self, part: bytes
    ) -> tuple[WholeNumbers, list[Sequence[str]], list[WholeNumbers]] | None:
        """Return (start of each row, values of each column, their bytes) of lines that need no
        parser; None for others: with quotes, blank lines or a wrong number of values.
        """
        width = len(self._columns)
        if any(each in part for each in (b'"', b"\r", b"\0")) or not part.endswith(b"\n"):
            return None
        data = np.frombuffer(part, np.uint8)
        lines = np.flatnonzero(data == 10)
        mark = self._separator.encode()
        if len(mark) > 1 or len(data) < 2 or (data[:1] == 10) or (np.diff(lines) == 1).any():
            return None
        ends = np.flatnonzero((data == 10) | (data == mark[0]))
        if len(ends) != width * len(lines) or (ends[width - 1 :: width] != lines).any():
            return None
        try:
            text = part.decode("utf-8")
        except UnicodeDecodeError:
            return None
        values = text[:-1].replace("\n", self._separator).split(self._separator)
        sizes = np.diff(ends, prepend=-1) - 1
        starts = np.concatenate([[0], lines[:-1] + 1]) + self._at
        self._at += len(part)
        columns = range(width)
        return starts, [values[k::width] for k in columns], [sizes[k::width] for k in columns]

    def _parsed(self, part: bytes, more: Iterator[bytes]) -> None:
        """Add the rows of a part as Python's parser reads them; if it ends within quotes, those of
        all parts that follow, too."""
        at = self._at
        try:
            rows = list(self._rows_of([part]))
        except csv.Error:
            self._at = at
            self._add_rows(self._rows_of(itertools.chain([part], more)))
        else:
            self._add_rows(rows)

    def _rows_of(self, parts: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
        """Yield (offset, values) of each row. Raises csv.Error, UnicodeDecodeError."""

        def feed() -> Iterator[str]:
            for part in parts:
                for line in part.splitlines(keepends=True):
                    self._at += len(line)
                    yield line.decode("utf-8")

        self._begin = self._at
        for row in _cells(feed(), self._separator, strict=True):
            if row:
                yield self._begin, row
            self._begin = self._at

    def _add_rows(self, rows: Iterable[tuple[int, list[str]]]) -> None:
        rows = iter(rows)
        if not self._columns:
            header = [name.strip() for name in next(rows, (0, []))[1]]
            if header.count("") > 1:  # As pandas names them.
                header = [name or f"Unnamed: {k}" for k, name in enumerate(header)]
            if len(set(header)) != len(header):
                (name, _), *_ = Counter(header).most_common(1)
                raise SourceError(
                    f"{self._name} needs a line of different names on top, and has {name!r} twice "
                    "in its first line: rename one, or write names above it if it is a sample"
                )
            check_objects(_COLUMN_BYTES * len(header), self._file.size, self._name)
            self._columns = [_ColumnScan(name, name in self._texts) for name in header]
            for name in {*label_names(header, self._label)}.intersection(header):
                self._columns[header.index(name)].is_label = True
        width = len(self._columns)
        while some := list(itertools.islice(rows, _ROWS)):
            for number, (_, row) in enumerate(some, len(self._starts)):
                if len(row) != width:
                    raise SourceError(
                        f"{self._name}, row {number + 2}: {counted(len(row), 'value')}, where the "
                        f"first line names {width}"
                    )
            values = list(zip(*(row for _, row in some), strict=True))
            sizes = [np.array([len(v.encode()) for v in own], np.int64) for own in values]
            self._add(np.array([start for start, _ in some], np.int64), values, sizes)

    def _without_names(self) -> SourceError:
        text = f"{self._name} needs a line of different names on top, and rows below"
        return SourceError(text)

    def _add(
        self, starts: WholeNumbers, values: Sequence[Sequence[str]], sizes: Sequence[WholeNumbers]
    ) -> None:
        first = len(self._starts)
        self._starts.extend(starts)
        for column, own, lengths in zip(self._columns, values, sizes, strict=True):
            column.add(first, own, lengths)


class _ColumnScan:
    """A column of a table that is being indexed."""

    def __init__(self, name: str, is_text: bool) -> None:
        self.name = name
        self.is_label = False
        self.has_sizes = is_text
        self.is_late = False
        """True if the sizes of its first values are not known."""
        self.sizes, self.labels = GrowingColumn(), GrowingColumn()
        self.codes: dict[str, int] = {}
        """Different texts of a label, as long as there are few."""
        self._missing = self._blank = -1
        self._kinds: set[str] = set()
        self._odd = ""

    def facts(self) -> list[Any]:
        """Return the fields of `_TextColumnFacts`."""
        return [self.name, self.kind, self._missing, self._blank, self._odd]

    def add(self, first: int, values: Sequence[str], sizes: WholeNumbers) -> None:
        """Add the values of the rows from `first` on, with their bytes."""
        self._look(first, values, sizes)
        if self.kind == "text" and not self.has_sizes:
            self.has_sizes, self.is_late = True, first > 0
        if self.has_sizes and not self.is_late:
            self.sizes.extend(sizes)
        if self.is_label:
            codes = self.codes
            rows = [codes.setdefault(value, len(codes)) for value in values]
            self.labels.extend(np.array(rows, np.int64))
            if len(codes) > MAX_CLASSES:
                self.is_label, self.labels, self.codes = False, GrowingColumn(), {}

    def _look(self, first: int, values: Sequence[str], sizes: WholeNumbers) -> None:
        """Note the kind of values, and which is missing."""
        text = "".join(values)
        if sizes.min() > 0 and sizes.max() < 19 and text.isascii() and text.isdigit():
            self._kinds.add("int64")
            return
        # Python's float() takes 1_0 and digits of other alphabets, too.
        if "_" not in text and text.isascii() and "text" not in self._kinds:
            with contextlib.suppress(ValueError):
                # Values that are missing are NaN, or no numbers.
                if not np.isnan(np.fromiter(map(float, values), np.float64, len(values))).any():
                    whole = _WHOLE.fullmatch(values[0])
                    self._kinds.add(_kind_of(values) if whole else "float64")
                    return
        gaps: list[int] = []
        if not MISSING.isdisjoint(map(str.strip, values)):
            gaps = [row for row, value in enumerate(values) if value.strip() in MISSING]
            blank = next((row for row in gaps if not values[row].strip()), -1)
            if self._missing < 0:
                self._missing = first + gaps[0]
            if self._blank < 0 <= blank:
                self._blank = first + blank
        if "text" not in self._kinds:
            skipped = set(gaps)
            present = [v for row, v in enumerate(values) if row not in skipped]
            kind = _kind_of(present)
            if kind == "text":
                self._odd = _odd_value(present, bool({"int64", "float64"} & self._kinds))
            self._kinds.add(kind)

    @property
    def kind(self) -> str:
        """Kind of all values so far."""
        for kind in ("text", "float64"):
            if kind in self._kinds:
                return kind
        # Whole numbers such as keys of 20 digits would lose digits as floats.
        return "text" if "long" in self._kinds else "int64" if "int64" in self._kinds else "none"


def _odd_value(values: Sequence[str], follows_numbers: bool) -> str:
    """Return the first of some values that is not a number, if most are, or would be without signs
    such as `%`, or if numbers went before; else ""."""
    odd = [value for value in values[:_LOOKED_AT] if not is_number(value.strip())]
    plain = len(values[:_LOOKED_AT]) - len(odd)
    plain += sum(is_number(_SIGNS.sub("", value)) for value in odd)
    if not follows_numbers and plain < _MOSTLY * len(values[:_LOOKED_AT]):
        return ""
    return next((value for value in values if not is_number(value.strip())), "")[:_LONGEST_SHOWN]


def _kind_of(values: Sequence[str]) -> str:
    """Return the kind of some values: `int64`, `float64`, `text`, `none` without any, or `long` for
    whole numbers of which some exceed 64 bits."""
    if not values:
        return "none"
    if all(_WHOLE.fullmatch(value) for value in values):
        short = all(len(value) <= _MAX_DIGITS for value in values)
        return "int64" if short and all(abs(int(value)) < 2**63 for value in values) else "long"
    try:
        for value in values:
            float(value)
    except ValueError:
        return "text"
    is_odd = any("_" in value or not value.isascii() for value in values)
    return "text" if is_odd else "float64"
