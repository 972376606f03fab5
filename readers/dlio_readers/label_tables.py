"""Tables of labels next to pictures: `labels.csv`, `metadata.jsonl` and their like.

A table has a column of names of pictures, with their suffix and folder or without, and one of
labels. A `metadata.*` may have none, and describes the pictures then.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.labels import (
    LABEL_NAMES,
    LabelEncoding,
    encode_labels,
    first_missing,
    is_index,
    label_name,
    label_text,
    likely_label,
    one_hot,
)
from dlio.data.source import Source
from dlio.data.splits import not_chosen_by, split_column
from dlio.errors import SourceError
from dlio.util.printable import tell_once
from dlio.util.structured_text import check_cells, parse_json, utf8_text
from dlio.util.units import counted
from dlio_readers.picture_lists import (
    DESCRIPTIONS,
    FILE_COLUMNS,
    MAX_TABLE,
    PROBED,
    delimiter_of,
    is_wordy,
    names_for,
    same_name,
    small_suffix,
    tell_of_boxes,
)

# fmt: off
TABLES: Final = (
    "labels.csv", "labels.tsv", "labels.json", "labels.jsonl", "labels.parquet", "metadata.csv",
    "metadata.jsonl", "metadata.parquet",
)
# fmt: on
"""Names of the tables, of which the first one is read."""
_LABEL_TABLES: Final = "labels."
"""Beginning of the names of tables that hold labels, and not descriptions."""
_MOST_ROWS: Final = 1 << 24
_LOOKED_AT: Final = 1 << 14


def read_table(
    source: Source, table: str, pictures: Sequence[str], chosen: str | None = None
) -> dict[str, str]:
    """Return labels, as text, by file name, of which some are among `pictures`; {} if the table is
    of descriptions alone, which is told. The user may have `chosen` the column of labels.

    Raises SourceError for an invalid table.
    """
    data = source.read(table, 0, MAX_TABLE + 1)
    try:
        if len(data) > MAX_TABLE:
            raise ValueError(f"it has over {MAX_TABLE} bytes")
        text = "" if table.endswith(".parquet") else utf8_text(data)
        names: list[str] = []
        if table.endswith(".parquet"):
            rows: list[Any] = _parquet_rows(data, chosen)
        elif table.endswith(".json"):
            table_data = parse_json(data, source.path(table))
            rows = (
                [{"file": name, "label": label} for name, label in table_data.items()]
                if isinstance(table_data, dict)
                else list(table_data)
            )
        elif table.endswith(".jsonl"):
            check_cells(data, b"\n{[,:", source.path(table))
            rows = [
                parse_json(line, source.path(table)) for line in text.splitlines() if line.strip()
            ]
        else:
            delimiter = delimiter_of(table, text)
            check_cells(data, f"\n{delimiter}".encode(), source.path(table))
            lines: Iterator[list[str]] = csv.reader(
                io.StringIO(text, newline=""),
                delimiter=delimiter,
                strict=True,
                skipinitialspace=True,
            )
            names = [name.strip() for name in next(lines, [])]
            if without := names_for(names, pictures):
                names, lines = without, chain([names], lines)
            if len(set(names)) != len(names):
                raise ValueError(f"its first line repeats names: {', '.join(names)}")
            rows = _named_rows(names, lines)
        if not rows:
            raise ValueError("it has no rows")
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError('its rows are not objects, such as {"file_name": ..., "label": ...}')
        columns = names or [str(name) for name in rows[0]]
        small = {name.lower(): name for name in reversed(columns)}
        file = next((small[name] for name in FILE_COLUMNS if name in small), None)
        file = file or _naming_column(rows, columns, pictures)
        if chosen is not None and chosen not in columns:
            raise ValueError(f"it has {', '.join(columns)}, and no column {chosen!r}")
        label = label_name((name for name in columns if name != file), chosen)
        if label is None and file is not None and table.startswith(_LABEL_TABLES):
            label = _lone_column(rows, [name for name in columns if name != file])
        if label is None and file is not None:
            others = [name for name in columns if name != file and not is_index(name)]
            values = ([row.get(name) for name in others] for row in rows)
            if hot := one_hot(source.path(table), others, values):
                label, rows = (
                    LABEL_NAMES[0],
                    [
                        {file: row.get(file), LABEL_NAMES[0]: name}
                        for row, name in zip(rows, hot, strict=True)
                    ],
                )
        inner = [f"{name}.{each}" for name, value in rows[0].items() if isinstance(value, dict)
                 for each in value]  # fmt: skip
        if label is None and table.startswith(DESCRIPTIONS):
            if tell_of_boxes(source.path(table), [*columns, *inner]):
                return {}
            tell_once(
                f"{source.path(table)} has {', '.join(columns)} and no column {LABEL_NAMES[0]}: "
                "it gives the pictures no labels; label= chooses a column that does"
            )
            return {}
        if file is None or label is None:
            raise ValueError(
                f"it has {', '.join(columns)}, and needs a column {FILE_COLUMNS[0]} and "
                f"a column {LABEL_NAMES[0]}"
            )
        labels, repeated = _labels_of(rows, file, label)
    except (ValueError, KeyError, TypeError, csv.Error, RecursionError) as error:
        raise SourceError(f"{source.path(table)} is not a label table: {error}") from error
    column = split_column(columns)
    if column not in (None, label):
        tell_once(f"{source.path(table)}: {not_chosen_by(column)}")
    tell_of_boxes(source.path(table), columns)
    others = [name for name in columns if name not in (file, label) and likely_label([name])]
    if others:
        left = ", ".join(others)
        tell_once(f"{source.path(table)}: labels are of its column {label}; left out: {left}")
    if repeated:
        tell_once(f"{source.path(table)}: {repeated} of its rows repeat others")
    return _matched(labels, pictures)


def check_agreement(
    source: Source,
    table: str,
    labels: Mapping[str, str],
    names: Sequence[str],
    kind: str = "image",
) -> None:
    """Raise SourceError unless a table has a label for each file of a kind, and for no other."""
    own = set(names)
    lost = [name for name in labels if name not in own]
    left = [name for name in names if name not in labels]
    if lost or left:
        words = [f"{len(lost)} of its files are not in the folder {lost[:3]}"] if lost else []
        words += [f"it has no label for {counted(len(left), kind)} {left[:3]}"] if left else []
        classes = ", or choose layout='classes'" if any("/" in name for name in names) else ""
        raise SourceError(f"{source.path(table)}: {', and '.join(words)}: make both agree{classes}")


def numbered(
    labels: Sequence[str], known: LabelEncoding | None = None
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return (class numbers, class names); whole numbers stay, other labels are sorted."""
    encoding = encode_labels(labels) if known is None else known
    numbers = np.array([encoding.numbers[label] for label in labels], np.int64)
    if encoding.classes:
        return numbers, encoding.classes
    if len(numbers) and (numbers.min() < 0 or numbers.max() > 1 << 20):
        return numbers, []
    return numbers, [str(number) for number in range(int(numbers.max()) + 1)]


def naming_table(source: Source, names: Sequence[str]) -> str:
    """Return the table of labels in a folder whose first rows name files there; "" without one."""
    here = {name for name, folder in source.names() if not folder}
    table = next((name for name in TABLES if name in here), "")
    text = source.read(table, 0, _LOOKED_AT) if table else b""
    known = named_in(text, names)
    if table.endswith((".csv", ".tsv")) and all(_bare(name).isdecimal() for name in known):
        known = known if _is_column(text, known) else []
    return table if known else ""


def named_in(text: bytes, names: Sequence[str]) -> list[str]:
    """Return those of the first of some names of files, two at least, that are cells of a text,
    with their suffixes or without; [] of fewer."""
    cells = set(re.split(rb"[,;:{}\t\s\"]+", text))
    some = names[:PROBED]
    known = [n for n in some if {os.fsencode(n), os.fsencode(_bare(n))} & cells]
    return known if len(known) > 1 else []


def _is_column(text: bytes, known: Sequence[str]) -> bool:
    """True if some files are the different values of a column of the first rows of a table, and not
    numbers in it that files such as `0.npy` and `1.npy` are called as."""
    names = {os.fsencode(each) for name in known for each in (name, _bare(name))}
    lines = text.removeprefix(b"\xef\xbb\xbf").splitlines()[: PROBED + 1]
    rows = [[cell.strip(b' "') for cell in re.split(rb"[,;\t]", line)] for line in lines]
    columns = [
        each if each[0].isdigit() or each[0] in names else each[1:]  # Below the column's name.
        for each in zip(*rows, strict=False)
    ]
    return any(
        len(names.intersection(column)) > 1 and len(set(column)) == len(column)
        for column in columns
    )


def _bare(name: str) -> str:
    return os.path.splitext(name.removesuffix(".gz"))[0]


def _naming_column(
    rows: Sequence[Any], columns: Sequence[str], pictures: Sequence[str]
) -> str | None:
    """Return the column whose first values are names of pictures, with suffix or without; None if
    there is none."""
    known = {*pictures, *map(_bare, pictures)}
    return next((c for c in columns if all(r.get(c) in known for r in rows[:PROBED])), None)


def _lone_column(rows: Sequence[Any], others: Sequence[str]) -> str | None:
    """Return the only one of some columns that is not an index as pandas writes it, such as `breed`
    of `id,breed`; None if there are several, or if it holds descriptions."""
    named = [name for name in others if not is_index(name)]
    if len(named) != 1 or any(is_wordy(str(row.get(named[0]))) for row in rows[:PROBED]):
        return None
    return named[0]


def _named_rows(names: Sequence[str], lines: Iterable[Sequence[str]]) -> list[dict[str, str]]:
    """Return lines by name. Values that a short line lacks take no memory: a wide first line above
    many of them would take that of their product. Raises ValueError for a long line."""
    rows: list[dict[str, str]] = []
    for line in lines:
        if len(line) > len(names):
            raise ValueError(f"row {len(rows) + 1} has more values than the first line names")
        if line:
            rows.append(dict(zip(names, line, strict=False)))
    return rows


def _matched(labels: Mapping[str, str], pictures: Sequence[str]) -> dict[str, str]:
    """Return labels by the names of the pictures that a table means: it may leave out their
    extension, and the folder that all of them lie in.

    Raises SourceError if two of its names mean one picture.
    """
    known = {same_name(name): name for name in pictures}
    bare: dict[str, list[str]] = {}
    for own, name in known.items():
        for form in (_bare(own), small_suffix(own)):
            bare.setdefault(form, []).append(name)
    folders = {os.path.dirname(name) for name in pictures}
    inside = folders.pop() if len(folders) == 1 else ""
    result: dict[str, str] = {}
    for given, label in labels.items():
        name = same_name(given)
        tries = [name, os.path.join(same_name(inside), name)]
        meant = [known[each] for each in tries if each in known]
        tries += [small_suffix(each) for each in tries]
        meant = meant or [each for bases in tries for each in bare.get(bases, ())]
        target = meant[0] if len(set(meant)) == 1 or name in known else name
        if result.setdefault(target, label) != label:
            raise SourceError(f"the table of labels has several for {target}: keep one")
    return result


def _parquet_rows(data: bytes, label: str | None) -> list[Any]:
    """Return the rows of a Parquet file, of its columns of names and labels alone; of all that hold
    texts and numbers without these."""
    import pyarrow
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:
            if file.metadata.num_rows > _MOST_ROWS:
                raise ValueError(f"it has over {_MOST_ROWS} rows")
            wanted = (*FILE_COLUMNS, *([label.lower()] if label else LABEL_NAMES))
            fields = list(file.schema_arrow)
            columns = [each.name for each in fields if each.name.lower() in wanted]
            if label_name(columns, label) not in columns:
                columns = [each.name for each in fields if not each.type.num_fields]
            rows: list[Any] = file.read(columns=columns).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    return rows


def _labels_of(rows: Sequence[Any], file: str, label: str) -> tuple[dict[str, str], int]:
    """Return (labels by file name, rows that repeat others).

    Raises ValueError if a row lacks either, or gives a file another label.
    """
    labels: dict[str, str] = {}
    for number, row in enumerate(rows):
        name, value = row.get(file), row.get(label)
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str) or not name:
            raise ValueError(f"row {number + 1} of its data has no {file}")
        text = label_text(value)
        if not text.strip():
            raise ValueError(f"{name} has no {label}: give it one, or remove its row")
        if labels.setdefault(name, text) != text:
            raise ValueError(f"{name} has several labels")
    names = list(labels)
    gap = first_missing(list(labels.values()), encode_labels(labels.values()).missing)
    if gap >= 0:
        raise ValueError(f"{names[gap]} has no {label}: give it one, or remove its row")
    return labels, len(rows) - len(labels)
