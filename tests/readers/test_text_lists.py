"""Lists of texts in Parquet and Arrow files, such as captions, are lists in samples and batches."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio.util import limits
from dlio.util.settings import REHEARSAL
from tests.conftest import examples

WRITERS: dict[str, Callable[[pa.Table, str], object]] = {
    "parquet": pq.write_table,
    "arrow": feather.write_feather,
}
ROWS = [["a dog", 'ä "q" \\ \n\x01'], [], ["", None, "語"]]
TEXTS = [["a dog", 'ä "q" \\ \n\x01'], [], ["", "", "語"]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.


def written(folder: Path, form: str, **columns: Any) -> str:
    """Write a table, and return its path."""
    path = str(folder / f"a.{form}")
    WRITERS[form](pa.table({"x": list(range(len(next(iter(columns.values()))))), **columns}), path)
    return path


@pytest.mark.parametrize("form", WRITERS)
def test_a_batch_has_a_list_of_lists(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, form, captions=pa.array(ROWS))
    with dlio.open(path, tiers="none") as data:
        assert [data[k]["captions"] for k in range(3)] == TEXTS
        with dlio.DataLoader(data, 3) as loader:
            (batch,) = loader
    assert batch["captions"] == TEXTS


@given(
    rows=st.lists(st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3), min_size=1),
    depth=st.integers(1, 2),
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
    form=st.sampled_from(sorted(WRITERS)),
    large=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_any_lists_are_those_of_pyarrow(
    rows: list[list[list[str]]],
    depth: int,
    kind: pa.DataType,
    form: str,
    large: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    flat = [list(itertools.chain(*row)) for row in rows]
    own: list[Any] = rows if depth == 2 else flat
    plain = pa.list_(pa.string()) if depth == 1 else pa.list_(pa.list_(pa.string()))
    make = pa.large_list if large else pa.list_
    wanted = make(kind) if depth == 1 else pa.list_(make(kind))
    path = written(tmp_path_factory.mktemp("t"), form, t=pa.array(own, plain).cast(wanted))
    with dlio.open(path, tiers="none") as data:
        assert [data[k]["t"] for k in range(len(own))] == own


@pytest.mark.parametrize("form", WRITERS)
def test_lists_of_texts_are_no_labels(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, form, labels=pa.array([["a"], ["b"], ["a"]]))
    reader = open_reader(path)
    assert (reader.classes, reader.labels.tolist()) == ([], [0, 0, 0])
    assert "labels is a list, of several labels" in getattr(reader, "unlabelled", "")


@pytest.mark.parametrize("form", WRITERS)
def test_a_missing_list_is_named(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, form, t=pa.array([["a"], None]))
    with pytest.raises(SourceError, match=r"column 't': 1 row, .* row 1, without list: write an"):
        open_reader(path)


@pytest.mark.parametrize("form", WRITERS)
def test_a_text_that_stands_in_many_lists_is_counted_before_it_is_repeated(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int16()), ["x" * 3000])
    rows = pa.ListArray.from_arrays(pa.array(range(3001), pa.int32()), many)
    path = written(tmp_path, form, t=rows)
    monkeypatch.setattr(limits, "usable_memory", lambda: 1 << 20)
    monkeypatch.setattr(limits, "_FREE_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_EXPANSION", 16)
    with pytest.raises(SourceError, match=r"claims to hold 9000000 bytes"):
        open_reader(path)
