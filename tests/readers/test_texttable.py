"""Tables of text: missing values, labels, separators, several files, features as one array."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError

_GAPS = ("", "NA", "NaN", "nan", "null", "NULL", "None", "N/A", "n/a", "<NA>", "#N/A", " ")


def _write(folder: Path, text: str, name: str = "x.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _kinds(path: Any, **options: Any) -> dict[str, str]:
    return dict(open_reader(path, **options).schema.fields)


def _column(path: Any, name: str, **options: Any) -> list[Any]:
    with dlio.open(path, tiers="none", **options) as data:
        samples: list[Any] = [data[k] for k in range(len(data))]
        return [np.asarray(sample[name]).tolist() for sample in samples]


@pytest.mark.parametrize("gap", _GAPS)
@pytest.mark.parametrize("number", ["2", "-2.5", "1e3"])
def test_a_missing_number_is_nan(tmp_path: Path, gap: str, number: str) -> None:
    path = _write(tmp_path, f"a,b,c\n1,{gap},x\n{number},2,y\n,3,z\n")
    assert _kinds(path) == {"a": "float64", "b": "float64", "c": "text"}
    wanted = [[1, float(number), np.nan], [np.nan, 2, 3]]
    for name, values in zip("ab", wanted, strict=True):
        assert np.array_equal(_column(path, name), values, equal_nan=True)


def test_a_column_without_any_value_is_nan(tmp_path: Path) -> None:
    path = _write(tmp_path, "a,label\n,1\nNA,2\n")
    assert np.isnan(_column(path, "a")).all()
    assert open_reader(path).labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "+2", " 3"], "int64"),
        (["9223372036854775807", "-9223372036854775807"], "int64"),
        (["92233720368547758080", "1"], "text"),  # As floats they would lose digits.
        (["1", "2.0"], "float64"),
        (["inf", "-1"], "float64"),
        (["1_000", "2"], "text"),
        (["1", "two"], "text"),
        (["", "two"], "text"),
    ],
)
def test_kinds_of_columns(tmp_path: Path, values: list[str], kind: str) -> None:
    rows = "".join(f"{value},0\n" for value in values)
    assert _kinds(_write(tmp_path, f"a,b\n{rows}"))["a"] == kind


@pytest.mark.parametrize("name", ["label", "class", "target", "y"])
def test_a_text_label_becomes_classes(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, f"x,{name}\n1,dog\n2,cat\n3,dog\n")
    reader = open_reader(path)
    assert (list(reader.classes), reader.labels.tolist()) == (["cat", "dog"], [1, 0, 1])
    assert _kinds(path)[name] == "int64"
    assert _column(path, name) == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("x,label\n1,dog\n2,\n3,cat\n", 3),
        ("x,class\n1,0\n2,1\n3,NA\n", 4),
        ("x,target\n1, \n2,b\n", 2),
    ],
)
def test_a_missing_label_is_refused_with_its_row(tmp_path: Path, text: str, row: int) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(SourceError, match=f"row {row}: its .* is missing"):
        open_reader(path)
    assert len(open_reader(path + "::x")) == text.count("\n") - 1


def test_a_missing_value_to_predict_is_nan(tmp_path: Path) -> None:
    path = _write(tmp_path, "x,y\n1,0.5\n2,\n")
    assert np.isnan(_column(path, "y")[1])


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_that_of_the_first_line(tmp_path: Path, separator: str) -> None:
    rows = [["a", "b", "label"], ["1", "x,y;z|", "u"], ["2", "", "v"]]
    lines = [separator.join(f'"{value}"' for value in row) for row in rows]
    path = _write(tmp_path, "\n".join(lines) + "\n")
    assert _kinds(path) == {"a": "int64", "b": "text", "label": "int64"}
    assert _column(path, "a") == [1, 2]


def test_a_given_separator_is_used(tmp_path: Path) -> None:
    path = _write(tmp_path, "a b\n1 2\n3 4\n")
    assert _column(path, "b", separator=" ") == [2, 4]
    assert list(_kinds(path)) == ["a b"]
    for wrong in ("", "::", "\n", '"'):
        with pytest.raises(UsageError, match="one character"):
            open_reader(path, separator=wrong)
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    for option in ({"separator": ";"}, {"columns": ["a"]}):
        with pytest.raises(UsageError, match="tables of text"):
            open_reader(str(tmp_path / "x.npy"), **option)


def test_several_tables_are_one(tmp_path: Path) -> None:
    _write(tmp_path, "a,b,label\n1,2,dog\n3,4,cat\n", "p0.csv")
    _write(tmp_path, "a;b;label\n5;;eel\n", "p1.csv")
    _write(tmp_path, "a,b,label\n7,0.5,cat\n8,,ant\n", "p2.csv")
    for path in (f"{tmp_path}/p*.csv", [f"{tmp_path}/p{k}.csv" for k in range(3)]):
        reader = open_reader(path)
        assert list(reader.classes) == ["ant", "cat", "dog", "eel"]
        assert reader.labels.tolist() == [2, 1, 3, 1, 0]
        assert _column(path, "a") == [1, 3, 5, 7, 8]
        wanted = [2, 4, np.nan, 0.5, np.nan]
        assert np.array_equal(_column(path, "b"), wanted, equal_nan=True)
    assert _column(f"{tmp_path}/p*.csv::a", "a") == [1, 3, 5, 7, 8]
    _write(tmp_path, "a,c,label\n1,2,dog\n", "p3.csv")
    with pytest.raises(SourceError, match=r"p3\.csv has the columns a, c, label"):
        open_reader(f"{tmp_path}/p*.csv")


def test_several_arrays_are_one(tmp_path: Path) -> None:
    values = np.arange(60.0).reshape(15, 4)
    for k, (low, high) in enumerate([(0, 5), (5, 6), (6, 15)]):
        np.save(tmp_path / f"{k}.npy", values[low:high])
        np.savez(tmp_path / f"{k}.npz", x=values[low:high], y=np.arange(low, high))
    assert np.array_equal(_column(f"{tmp_path}/?.npy", "data"), values)
    assert _column(f"{tmp_path}/?.npz::y", "y") == list(range(15))
    assert np.array_equal(_column(f"{tmp_path}/?.npy", "data", select=(1,)), values[:, 1])
    np.save(tmp_path / "3.npy", np.zeros((2, 5)))
    with pytest.raises(UsageError, match="one by one"):
        open_reader(f"{tmp_path}/?.npy")
    with pytest.raises(UsageError, match="tables of text"):
        open_reader([f"{tmp_path}/0.npy", _write(tmp_path, "a\n1\n")])


@pytest.mark.parametrize("columns", ["*", ["a", "b"], ("b",), "a"])
def test_columns_become_one_tensor_of_features(tmp_path: Path, columns: Any) -> None:
    path = _write(tmp_path, "a,text,b,label\n1,x,0.5,dog\n2,y,,cat\n3,z,7,dog\n")
    names = {"*": ["a", "b"], "a": ["a"]}.get(columns) if isinstance(columns, str) else columns
    table = {"a": [1, 2, 3], "b": [0.5, np.nan, 7]}
    wanted = np.array([table[name] for name in names or ()], np.float32).T
    with (
        dlio.open(path, columns=columns, tiers="none") as data,
        dlio.DataLoader(data, batch_size=3) as loader,
    ):
        (batch,) = loader
        assert batch["features"].dtype == torch.float32
        assert np.array_equal(batch["features"].numpy(), wanted, equal_nan=True)
        assert batch["label"].tolist() == [1, 0, 1]
        assert sorted(batch) == ["features", "label"]
        assert list(data.classes) == ["cat", "dog"]


def test_features_of_several_tables_and_other_columns(tmp_path: Path) -> None:
    _write(tmp_path, "a,id,b\n1,k,2\n", "p0.csv")
    _write(tmp_path, "a,id,b\n3,l,4\n", "p1.csv")
    path = f"{tmp_path}/p*.csv::id"
    assert _column(path, "features", columns=["b", "a"]) == [[2, 1], [4, 3]]
    assert _kinds(path, columns="*") == {"features": "float32[2]", "id": "text"}


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("a,t\n1,x\n", ["a", "t"], "'t' .* is text"),
        ("a,t\n1,x\n", ["z"], "no column 'z'"),
        ("t,label\nx,1\n", "*", "no columns of numbers"),
        ("a\n1\n", [], "the list is empty"),
    ],
)
def test_columns_that_are_no_features_are_refused(
    tmp_path: Path, text: str, columns: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_reader(_write(tmp_path, text), columns=columns)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("a b label\n4.0 5.0 1\n7 8 0\n", True),
        ("1.0  2.0\n3.0 4.0\n", True),
        ("question asked\nwho goes\nwhat is\n", False),
        ("text\n1 2\n3 4\n", False),
        ("full name\nAda Byron\nAda\n", False),
    ],
)
def test_values_with_spaces_between_are_told(
    text: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path, text)
    assert len(_kinds(path)) == 1
    assert ("values with spaces between" in caplog.text) == is_told
    if "label" in text:
        assert _kinds(path, separator=" ") == {"a": "float64", "b": "float64", "label": "int64"}
