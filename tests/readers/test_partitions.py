"""Folders of Hive's partitions are read as pyarrow.dataset reads them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.util import printable
from tests.readers.tar_members import write_tar_of


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
    table = dataset.dataset(path, partitioning="hive").to_table()
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
    dataset.write_dataset(
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


def test_a_table_of_iceberg_is_called_so(tmp_path: Path) -> None:
    for name in ("data", "metadata"):
        (tmp_path / name).mkdir()
    for k in range(2):
        pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "data" / f"0000{k}-0.parquet")
    (tmp_path / "metadata" / "v1.metadata.json").write_text('{"format-version": 2}')
    (tmp_path / "metadata" / "snap-1.avro").write_bytes(b"Obj")
    with pytest.raises(SourceError, match="is a table of Iceberg, whose metadata say which files"):
        open_reader(str(tmp_path))
    reader = open_reader(f"{tmp_path}/data/*.parquet")
    assert len(reader) == 4
    reader.close()


def test_files_of_hudi_are_told_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"_hoodie_commit_time": ["1", "2"], "x": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "a_0.parquet")
    for _ in range(2):
        monkeypatch.setattr(printable, "_told", set())
        with caplog.at_level(logging.WARNING, "dlio"):
            open_reader(str(tmp_path)).close()
        assert "rows of earlier versions lie as well" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("kind", ["csv", "feather", "tar"])
def test_partitions_of_other_formats_have_the_remedy_of_theirs(kind: str, tmp_path: Path) -> None:
    for name in ("label=cat", "label=dog"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"p.{kind}"
        if kind == "csv":
            path.write_text("x,y\n1,2\n3,4\n")
        elif kind == "feather":
            feather.write_feather(pa.table({"x": [1, 3], "y": [2, 4]}), str(path))
        else:
            write_tar_of(path, {"0.txt": b"x", "1.txt": b"y"})
    with pytest.raises(UsageError, match="column label stands in their names") as raised:
        open_reader(str(tmp_path))
    form = {"csv": "csv", "feather": "ipc"}.get(kind)
    if form is None:
        assert "write it into the files" in str(raised.value)
        return
    assert f"format={form!r}" in str(raised.value)
    rows = dataset.dataset(str(tmp_path), format=form, partitioning="hive").to_table()
    assert sorted(rows["label"].to_pylist()) == ["cat", "cat", "dog", "dog"]


def test_columns_that_samples_cannot_have_are_named_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns = {
        "when": pa.array([0, 1], pa.timestamp("us")),
        "pair": pa.array([{"a": 1}, {"a": 2}]),
        "x": [1.0, 2.0],
        "label": ["u", "v"],
    }
    pq.write_table(pa.table(columns), path)
    with pytest.raises(
        SourceError, match=r"when \(timestamp\[us\]\), pair .*as in x\.parquet::x,label$"
    ):
        open_reader(str(path))
    reader = open_reader(f"{path}::x,label")
    assert (list(reader.classes), np.asarray(reader.labels).tolist()) == (["u", "v"], [0, 1])
    reader.close()
