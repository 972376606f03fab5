"""Folders of Hive's partitions are read as pyarrow.dataset reads them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.data.reader import open_reader
from dlio.errors import SourceError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


_VALUES = st.one_of(
    st.integers(-(2**33), 2**33).map(str), st.sampled_from(["DE", "a b", "x=1/y", "01", "+1"])
)


def _rows(path: str | Sequence[str]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the names of the fields, and the values of all samples, sorted."""
    reader: Any = open_reader(path, trust=True)
    names = sorted(reader.schema.kinds)
    rows = [reader.schema.split(each) for each in reader.read(np.arange(len(reader)))]
    reader.close()
    return names, sorted(tuple(_plain(row[name]) for name in names) for row in rows)


def _plain(value: Any) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode()
    return value.item() if hasattr(value, "item") else value


def _expected(path: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    table = pyarrow.dataset.dataset(path, partitioning="hive").to_table()
    names = sorted(table.column_names)
    return names, sorted(tuple(row[name] for name in names) for row in table.to_pylist())


@given(
    st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=4, unique=True),
    st.integers(1, 2),
)
def test_partitions_are_columns_as_in_pyarrow(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, str]], depth: int
) -> None:
    data = tmp_path_factory.mktemp("data")
    table = pa.table(
        {
            "x": np.arange(2.0 * len(values)),
            "a": [first for first, _ in values for _ in range(2)],
            "b": [second for _, second in values for _ in range(2)],
        }
    )
    table = table.select(["x", "a", "b"][: depth + 1])
    pyarrow.dataset.write_dataset(
        table,
        data,
        format="parquet",
        partitioning=pa.dataset.partitioning(
            pa.schema([(name, pa.string()) for name in "ab"[:depth]]), flavor="hive"
        ),
    )
    (data / "_SUCCESS").write_bytes(b"")
    expected = _expected(data)
    assert _rows(str(data)) == expected
    if len({first for first, _ in values}) > 1:
        assert _rows(f"{data}{'/*' * depth}/*.parquet") == expected


def test_a_partition_gives_labels_and_is_chosen_by_name(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / f"label={name}").mkdir()
        pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / f"label={name}" / "p.parquet")
    reader = open_reader(str(tmp_path))
    assert (list(reader.classes), reader.labels.tolist()) == (["cat", "dog"], [0, 0, 1, 1])
    alone = open_reader(f"{tmp_path}::label")
    assert (list(alone.schema.kinds), alone.labels.tolist()) == (["label"], [0, 0, 1, 1])


def test_a_lone_partition_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = tmp_path / "country=DE"
    inner.mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0]}), inner / "p.parquet")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert list(open_reader(f"{inner}/p.parquet").schema.kinds) == ["x"]
        assert "country=DE and the like are columns in names of folders" in caplog.text
        caplog.clear()
        assert list(open_reader(str(tmp_path)).schema.kinds) == ["x", "country"]
    assert not caplog.text


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a=1", "a=__HIVE_DEFAULT_PARTITION__"], "lies in a partition without a value"),
        (["a=1", "a=1/b=2"], "has other columns than .*: b is string in it, and missing there"),
        (["_delta_log", "a=1"], "is a table of Delta Lake, whose log says which files are of"),
        (["_delta_log", "."], "is a table of Delta Lake, whose log says which files are of"),
    ],
)
def test_partitions_that_are_not_whole_are_refused(
    folders: Sequence[str], message: str, tmp_path: Path
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
        if name != "_delta_log":
            pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / name / "p.parquet")
    with pytest.raises(SourceError, match=message):
        open_reader(str(tmp_path))
