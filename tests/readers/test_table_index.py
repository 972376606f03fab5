"""The index of a table of text is that of Python's parser, however the file is cut into parts."""

import csv
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.data.labels import MISSING
from dlio.data.source import File
from dlio.errors import SourceError
from dlio_readers import texttable
from dlio_readers.texttable import _table_index

_VALUES = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.integers(0, 9).map(str),
    st.floats(allow_nan=False, width=16).map(str),
    st.sampled_from(
        ["", " ", "NA", "nan", "1_0", "x", "é", '"a,b"', '"1\n2"', '"say ""x"""', " 7"]
    ),
)


def _kind(values: list[str]) -> str:
    present = [value for value in values if value.strip() not in MISSING]
    if not present:
        return "none"
    if all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", value, re.ASCII) for value in present):
        return "int64" if all(abs(int(value)) < 2**63 for value in present) else "text"
    try:
        list(map(float, present))
    except ValueError:
        return "text"
    return "text" if any("_" in value for value in present) else "float64"


def _first(values: list[str], missing: frozenset[str]) -> int:
    return next((k for k, value in enumerate(values) if value.strip() in missing), -1)


def _as_parsed(text: str) -> tuple[list[list[Any]], list[list[int]]]:
    """Return (facts of the columns, bytes of all values), as the whole table has them."""
    header, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    columns = [list(values) for values in zip(*rows, strict=True)]
    facts = [
        [name, _kind(own), _first(own, MISSING), _first(own, frozenset({""})), False]
        for name, own in zip(header, columns, strict=True)
    ]
    return facts, [[len(value.encode()) for value in own] for own in columns]


@given(
    rows=st.lists(st.tuples(_VALUES, _VALUES, _VALUES), min_size=1, max_size=30),
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    ending=st.booleans(),
    part=st.sampled_from([1, 7, 40, 1 << 20]),
)
def test_a_table_has_the_index_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, str]],
    newline: str,
    ending: bool,
    part: int,
) -> None:
    text = newline.join(["a,b,label", *map(",".join, rows)]) + newline * ending
    path = tmp_path_factory.mktemp("table") / "x.csv"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texttable, "_PART", part)
        index = _table_index(File(str(path)), None, frozenset())
    facts, sizes = _as_parsed(text)
    head = json.loads(index["head"].tobytes())
    assert [each[:4] for each in head["columns"]] == [each[:4] for each in facts]
    count, starts = len(rows), index["starts"].tolist()
    assert starts[-1] == len(text.encode())
    for k, (low, high) in enumerate(itertools.pairwise(starts)):
        lines = io.StringIO(text.encode()[low:high].decode(), newline="")
        (row,) = [row for row in csv.reader(lines) if row]
        assert [len(value.encode()) for value in row] == [own[k] for own in sizes]
    for k, (_, kind, *_) in enumerate(facts):
        assert (f"bodies{k}" in index) >= (kind == "text")
        if f"bodies{k}" in index:
            own = index[f"bodies{k}"]
            assert np.resize(own, count).tolist() == sizes[k]


@pytest.mark.parametrize("part", [16, 1 << 20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "row 3: 1 value, where the first line names 2"),
        ('a,b\n1,2\n3,"x\n', "at byte 8: unexpected end of data"),
        ("a,b\n1,2\n3,\udce9\n", r"at byte 8: its text is not UTF-8 \(byte 0xe9\): save"),
        ("a,a\n1,2\n", "different names on top"),
        ("a,b\n", "rows below"),
        ("\n\n", "is empty"),
    ],
)
def test_damage_is_said_in_the_same_words_in_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, text: str, message: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(texttable, "_PART", part)
    with pytest.raises(SourceError, match=message):
        _table_index(File(str(path)), None, frozenset())
