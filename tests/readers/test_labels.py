"""The same table has the same labels in every format."""

import json
import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.util.settings import REHEARSAL
from tests.readers.tar_members import write_tar_of


@pytest.fixture(autouse=True)
def _no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each new file is read by a child process first otherwise; test_rehearsal covers that.
    monkeypatch.setenv(REHEARSAL, "1")


NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=8)
NAMES = st.lists(st.sampled_from(["no", "yes", "cat", "1_0", "NA"]), min_size=1, max_size=8)
UNRELATED = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def labels_of(path: Path) -> tuple[list[str], list[int]]:
    reader = open_reader(str(path))
    try:
        return list(reader.classes), np.asarray(reader.labels).tolist()
    finally:
        reader.close()


def write_tables(folder: Path, table: pa.Table) -> list[Path]:
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet")
    feather.write_feather(table, str(folder / "a.feather"))
    rows = table.to_pylist()
    lines = ["label,v", *(f"{row['label']},{row['v']}" for row in rows)]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return [folder / name for name in ("a.parquet", "a.feather", "a.csv")]


@UNRELATED
@given(names=NAMES)
def test_names_are_the_same_classes_in_all_tables(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("names")
    classes = sorted(set(names))
    expected = classes, [classes.index(name) for name in names]
    table = pa.table({"label": names, "v": np.arange(len(names), dtype=np.float64)})
    for path in write_tables(folder / "a", table):
        if path.suffix == ".csv" and set(names) == {"NA"}:
            continue  # Nothing but missing numbers, as pandas has it.
        assert labels_of(path) == expected, path.name
        reader = open_reader(str(path))
        payloads = reader.read(np.arange(len(names)))
        assert [reader.schema.split(p)["label"] for p in payloads] == expected[1]
        reader.close()
    categories = table.set_column(0, "label", table.column("label").dictionary_encode())
    pq.write_table(categories, folder / "c.parquet")
    assert labels_of(folder / "c.parquet") == expected


@UNRELATED
@given(numbers=NUMBERS, kind=st.sampled_from(["int16", "int64", "float64"]))
def test_numbers_are_the_same_labels_in_all_formats(
    numbers: list[int], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("numbers")
    values = np.array(numbers, kind)
    table = pa.table({"label": values, "v": np.arange(len(numbers), dtype=np.float64)})
    paths = write_tables(folder / "a", table)
    np.savez(folder / "a.npz", label=values[:, None], x=np.zeros((len(numbers), 2)))
    with h5py.File(folder / "a.h5", "w") as file:
        file["label"], file["x"] = values.reshape(-1, 1, 1), np.zeros((len(numbers), 2))
    for path in [*paths, folder / "a.npz", folder / "a.h5"]:
        assert labels_of(path) == ([], numbers), path.name


def test_an_empty_name_of_a_class_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": ["cat", ""], "v": [1.0, 2.0]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="row 1: its label is empty"):
        open_reader(f"{tmp_path}/a.parquet")


@pytest.mark.parametrize("form", ["{}", "{}.0"])
@pytest.mark.parametrize("table", ["labels.csv", "labels.json", "metadata.jsonl"])
def test_a_table_of_numbers_beside_pictures_is_in_their_order(
    form: str, table: str, tmp_path: Path
) -> None:
    for k in range(11):
        (tmp_path / f"p{k:02d}.png").write_bytes(b"\x89PNG")
    rows = [(f"p{k:02d}.png", form.format(k)) for k in range(11)]
    if table.endswith(".csv"):
        text = "file_name,label\n" + "\n".join(map(",".join, rows))
    elif table.endswith(".json"):
        text = json.dumps({name: json.loads(label) for name, label in rows})
    else:
        text = "\n".join(json.dumps({"file_name": n, "label": json.loads(v)}) for n, v in rows)
    (tmp_path / table).write_text(text)
    assert labels_of(tmp_path)[1] == list(range(11))


def test_a_missing_number_beside_pictures_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"\x89PNG")
    (tmp_path / "labels.csv").write_text("file_name,label\na.png,1.0\nb.png,nan\n")
    with pytest.raises(SourceError, match=r"b\.png has no label"):
        open_reader(str(tmp_path))


def test_groups_of_which_each_is_a_sample_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for k in range(3):
            file[f"s{k}/image"], file[f"s{k}/label"] = np.full((4, 4), k), k
    with pytest.raises(UsageError, match="does not read groups as samples"):
        open_reader(f"{tmp_path}/a.h5")
    assert len(open_reader(f"{tmp_path}/a.h5::s1/image")) == 4


GROUPS = {
    "numbered": (["s0/image", "s0/label", "s1/image", "s1/label"], (4, 4), True),
    "some with more": (["s0/image", "s1/image", "s1/mask"], (4, 4), True),
    "below classes": (["cat/0/image", "cat/1/image", "dog/0/image", "dog/1/image"], (4, 4), True),
    "nested": (["d/e0/a", "d/e0/obs/x", "d/e1/a", "d/e1/obs/x"], (4, 4), True),
    "names": (["anna/image", "bert/image"], (4, 4), False),
    "arrays of classes": (["cat/0", "cat/1", "dog/0", "dog/1"], (4, 4), False),
    "numbered arrays": (["0", "1", "2", "3"], (4, 4), False),
    "numbers alone": (["0", "1", "2"], (4,), False),
    "of numpy.savez": (["arr_0", "arr_1", "arr_2"], (4, 4), False),
    "inputs and targets": (["arr_0", "arr_1"], (4, 4), None),
    "features": (["x0", "x1", "x2", "x3"], (4,), None),
    "a few fields": (["image", "depth", "mask0", "mask1"], (4, 4), None),
}


@pytest.mark.parametrize("form", ["h5", "zarr", "npz"])
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_and_arrays_that_may_be_samples_are_refused_or_told(
    kind: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names, shape, is_refused = GROUPS[kind]
    path = f"{tmp_path}/a.{form}"
    if form == "h5":
        with h5py.File(path, "w") as file:
            for name in names:
                file[name] = np.ones(shape, np.float32)
    elif form == "npz":
        arrays: dict[str, Any] = {name: np.ones(shape, np.float32) for name in names}
        np.savez(path, **arrays)
    else:
        root = zarr.open_group(path, mode="w")
        for name in names:
            root.create_array(name, data=np.ones(shape, np.float32))
    if is_refused:
        with pytest.raises(UsageError, match=r"2 groups|4 groups"):
            open_reader(path)
        assert len(open_reader(f"{path}::{names[0]}")) == 4
        return
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(path)) == 4
    assert caplog.text.count("arrays named alike") == (is_refused is False)


@pytest.mark.parametrize(
    ("labels", "several"),
    [
        (["a|b", "c"], "a|b"),
        (["a; b", "a"], "a; b"),
        (["cat dog", "cat", "dog"], "cat dog"),
        (["x,y", "x", "y", "z"], "x,y"),
        (["black cat", "white cat", "cat"], ""),
        (["a|", "|", "No Finding"], ""),
    ],
)
def test_several_labels_in_one_are_told(
    labels: list[str], several: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"x": np.zeros(len(labels)), "label": labels})
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(open_reader(str(tmp_path)).classes) == sorted(labels)
    words = f"its label {several!r} seems to be several, and is one class"
    assert (words in caplog.text) == bool(several)
    assert bool(several) == ("seems to be several" in caplog.text)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz", "tar"])
@pytest.mark.parametrize("twin", ["cat", "cats"])
def test_classes_that_differ_only_in_case_are_told(
    suffix: str, twin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels, path = ["dog", "Cat", twin], tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("x,label\n" + "".join(f"1,{label}\n" for label in labels))
    elif suffix == "parquet":
        pq.write_table(pa.table({"x": [1, 2, 3], "label": labels}), path)
    elif suffix == "npz":
        np.savez(path, x=np.zeros((3, 2)), label=np.array(labels))
    else:
        write_tar_of(path, {f"{k}.cls": each.encode() for k, each in enumerate(labels)})
    assert list(open_reader(str(path)).classes) == sorted(labels)
    words = "Cat and cat are two classes, and differ only in case"
    assert (words in caplog.text) == (twin == "cat")
    assert bool(caplog.text) == (twin == "cat")


def test_truth_values_of_yaml_stay_the_names_of_classes(tmp_path: Path) -> None:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images/a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x08\0\0\0\x08\x08\x02\0\0\0"
    )
    (tmp_path / "labels/a.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    for names in ("[no, yes]", "{0: no, 1: yes}"):
        (tmp_path / "data.yaml").write_text(f"names: {names}\n")
        assert list(open_reader(str(tmp_path)).classes) == ["no", "yes"]
