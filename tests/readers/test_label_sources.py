"""Labels from where people keep them: files, links, enumerations, metadata, tables of pictures."""

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import dlio
from dlio.cli.ls import describe
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.loader.dataset_views import field_values
from dlio.train.tasks.classification import ClassifyImages
from dlio.train.train_options import ModelOptions
from dlio.util import printable
from dlio.util.settings import REHEARSAL
from dlio_staging.pack_folder import pack, packed_path


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.
    monkeypatch.setattr(printable, "_told", set())


def labels_of(path: object) -> tuple[list[str], list[int]]:
    reader = open_reader(path)
    try:
        return list(reader.classes), np.asarray(reader.labels).tolist()
    finally:
        reader.close()


# HDF5


@pytest.mark.parametrize(
    ("members", "numbers", "expected"),
    [
        ({"B": 0, "A": 1}, [0, 1, 0], (["B", "A"], [0, 1, 0])),
        ({"B": 5, "A": 7}, [5, 7, 5], (["A", "B"], [1, 0, 1])),
    ],
)
def test_names_of_an_enumeration_are_classes(
    members: dict[str, int], numbers: list[int], expected: Any, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((3, 2))
        file.create_dataset("Label", data=numbers, dtype=h5py.enum_dtype(members))
    assert labels_of(f"{tmp_path}/a.h5") == expected


def test_soft_links_are_followed_and_others_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.zeros(3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw/y"], file["raw/x"] = np.array([2, 0, 1]), np.zeros((3, 2))
        file["label"] = h5py.SoftLink("/raw/y")
        file["gone"], file["other"] = h5py.SoftLink("/no"), h5py.ExternalLink("b.h5", "x")
        file["round"] = h5py.SoftLink("other")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(f"{tmp_path}/a.h5") == ([], [2, 0, 1])
    assert "3 links to groups, nothing or other files left out, such as gone" in (caplog.text)
    with pytest.raises(SourceError, match="is a link to a group, to nothing or to another file"):
        open_reader(f"{tmp_path}/a.h5::other")


@pytest.mark.parametrize("suffix", ["npz", "h5"])
@pytest.mark.parametrize("labels", [[3, 1, 2], ["b", "a", "b"]])
def test_a_file_whose_label_is_a_single_value_is_one_sample(
    suffix: str, labels: list[Any], tmp_path: Path
) -> None:
    for k, label in enumerate(labels):
        arrays = {"image": np.full((4, 4), k, np.float32), "label": label}
        if suffix == "npz":
            np.savez(tmp_path / f"{k}.npz", **arrays)
        else:
            with h5py.File(tmp_path / f"{k}.h5", "w") as file:
                for name, value in arrays.items():
                    file[name] = value
    expected = ([], labels) if isinstance(labels[0], int) else (["a", "b"], [1, 0, 1])
    assert labels_of(str(tmp_path)) == expected
    reader = open_reader(str(tmp_path))
    values = [reader.schema.split(each) for each in reader.read(np.arange(3))]
    assert [value["label"] for value in values] == expected[1]
    assert [value["image"].shape for value in values] == [(4, 4)] * 3
    with pytest.raises(UsageError, match="its label is a single value, so that each file is one"):
        open_reader(str(tmp_path), samples="rows")


# Metadata and packing


def _hub(path: Path, labels: list[int], column: str = "label") -> None:
    feature = {"names": ["zebra", "ant", "bee"], "_type": "ClassLabel"}
    about = {"info": {"features": {"x": {"dtype": "float32"}, column: feature}}}
    table = pa.table({"x": np.zeros(len(labels), np.float32), column: labels})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), path)


@pytest.mark.parametrize("column", ["label", "intent"])
def test_names_of_the_hub_are_classes_in_their_order_also_when_packed(
    column: str, tmp_path: Path
) -> None:
    _hub(tmp_path / "a.parquet", [2, 0, -1, 2], column)
    assert labels_of(f"{tmp_path}/a.parquet") == (["zebra", "ant", "bee"], [2, 0, -1, 2])
    reader = open_reader(f"{tmp_path}/a.parquet")
    names = np.asarray(field_values(reader, "class")).tolist()
    assert names == ["bee", "zebra", "", "bee"]
    assert describe(f"{tmp_path}/a.parquet")["classes"] == {
        "zebra": 1,
        "ant": 0,
        "bee": 2,
        "(unlabelled)": 1,
    }


@pytest.mark.parametrize("form", ["native", "hdf5", "zarr"])
def test_packed_labels_are_those_of_the_source(form: str, tmp_path: Path) -> None:
    _hub(tmp_path / "hub.parquet", [2, 0, -1, 2])
    table = pa.table({"x": np.zeros(3), "label": ["b", "a", "b"]})
    pq.write_table(table, tmp_path / "text.parquet")
    for name in ("hub", "text"):
        source = open_reader(f"{tmp_path}/{name}.parquet")
        pack(source, str(tmp_path / name), format=form, order="source")
        classes, labels = labels_of(packed_path(str(tmp_path / name), form))
        assert classes == list(source.classes)
        assert sorted(labels) == sorted(source.labels.tolist())


def test_training_names_an_unlabelled_sample(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture, "png")
    table = pa.table({"image": [picture.getvalue()] * 3, "label": [0, 1, -1]})
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        dlio.open(f"{tmp_path}/a.parquet", image_size=8) as data,
        pytest.raises(UsageError, match=r"1 of 3 .* label below 0.*000000002, with -1"),
    ):
        ClassifyImages(ModelOptions(), "a", data)


# Tables next to pictures


def _pictures(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG")


@pytest.mark.parametrize(
    ("head", "form"),
    [
        ("file_name,label", "{}.png"),
        ("filename,class", "{}.png"),
        ("image,category", "{}"),
        ("Path,Target", "./{}.png"),
        ("image_id,label_id", "{}"),
        ("id,y", "images/{}.png"),
    ],
)
@pytest.mark.parametrize("folder", ["", "images/"])
def test_tables_name_pictures_and_labels_as_people_do(
    head: str, form: str, folder: str, tmp_path: Path
) -> None:
    _pictures(tmp_path, [f"{folder}{k}.png" for k in range(3)])
    rows = [f"{form.format(k)},{'bab'[k]}" for k in (2, 1, 0)]
    (tmp_path / "labels.csv").write_text("\n".join([head, *rows]) + "\n")
    if not folder and form.startswith("images"):
        with pytest.raises(SourceError, match="3 of its files are not in the folder"):
            open_reader(str(tmp_path))
        return
    assert labels_of(str(tmp_path)) == (["a", "b"], [1, 0, 1])


def test_columns_and_rows_that_a_table_of_labels_leaves_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, ["0.png", "1.png"])
    text = "image,label,class_name,age\n0.png,0,cat,3\n1.png,1,dog,4\n1.png,1,dog,4\n"
    (tmp_path / "metadata.csv").write_text(text)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert labels_of(str(tmp_path))[1] == [0, 1]
    assert "labels are of its column label; left out: class_name" in caplog.text
    assert "1 of its rows repeat others" in caplog.text


# Fields that look like labels and are none


def test_fields_that_look_like_labels_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"x": [0.5], "class_name": ["a"]}), tmp_path / "name.parquet")
    pq.write_table(pa.table({"x": [0.5], "label": [[0, 1]]}), tmp_path / "list.parquet")
    np.savez(tmp_path / "wide.npz", x=np.zeros(1), label=np.array([2**63], np.uint64))
    with tarfile.open(tmp_path / "json.tar", "w") as file:
        member = tarfile.TarInfo("a.json")
        data = json.dumps({"label": 1}).encode()
        member.size = len(data)
        file.addfile(member, io.BytesIO(data))
    expected = {
        "name.parquet": "if class_name is it",
        "list.parquet": "its label is a list, of several labels or one-hot",
        "wide.npz": "its label holds numbers beyond 64 bits",
        "json.tar": "its label is in json",
    }
    for name, text in expected.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dlio"):
            open_reader(f"{tmp_path}/{name}").close()
            open_reader(f"{tmp_path}/{name}").close()
        assert caplog.text.count(text) == 1, caplog.text


def test_texts_of_numpy_that_need_pickle_are_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(2), label=np.array(["a", None], object))
    with pytest.raises(SourceError, match=r"label\.npy holds Python objects.*pickle"):
        open_reader(f"{tmp_path}/a.npz")


def test_places_of_splits_outside_of_the_folder_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    picture = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture, "png")
    (tmp_path / "images/a.png").write_bytes(picture.getvalue())
    (tmp_path / "labels/a.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text("names: [a, b]\ntrain: /elsewhere/train\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path)).close()
    assert "1 of the places of its splits are not in the data set's folder" in caplog.text
