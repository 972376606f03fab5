"""Lists whose labels are several words, folders within class folders, and first lines of tables
that are samples: read as meant, or told."""

import itertools
import json
import logging
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dlio.data.labels import several_labels
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.util import printable
from dlio_readers.folder_doubts import masks_among


@pytest.fixture(autouse=True)
def _telling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printable, "_told", set())


def _pictures(folder: Path, names: Sequence[str]) -> None:
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(folder / name)


@pytest.mark.parametrize(
    ("rows", "classes", "told"),
    [
        (("Boeing 707", "DC-3"), ["Boeing 707", "DC-3"], ""),
        (("Boeing 707", "Boeing 727"), ["Boeing"], "the first word behind a name is its label"),
        (("DC-3", "MD-80"), ["DC-3", "MD-80"], ""),
        (("1 0 1", "0 0 1"), [], "has several marks, such as 1 0 1, and no label is read"),
        (("-1 1", "1 1"), [], "has several marks, such as -1 1"),
        (("5 2 1", "7 1 4"), ["a", "b"], ""),
    ],
)
def test_labels_of_several_words_in_a_list_are_read_or_told(
    rows: Sequence[str],
    classes: list[str],
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("a_1", "b_2")
    _pictures(tmp_path, [f"images/{name}.jpg" for name in names])
    text = "".join(f"{name}.jpg {row}\n" for name, row in zip(names, rows, strict=True))
    (tmp_path / "train.txt").write_text(text)
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(tmp_path), table="train.txt")
    assert reader.classes == classes
    assert told in caplog.text if told else "word" not in caplog.text


def test_folders_in_class_folders_are_told_with_the_pattern_that_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, ["a/abbey/x0.jpg", "a/airport/x1.jpg", "b/bar/x2.jpg"])
    (tmp_path / "Training_01.txt").write_text("/a/abbey/x0.jpg\n/a/airport/x1.jpg\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert open_reader(str(tmp_path)).classes == ["a", "b"]
    assert f"such as a/abbey, and labels are the outer ones: open {tmp_path}/*/ for" in caplog.text
    assert "Training_01.txt), which may hold labels" in caplog.text
    reader = open_reader(f"{tmp_path}/*/")
    assert reader.classes == ["abbey", "airport", "bar"]
    assert reader.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("3,Wall St.,a text", True),
        ("gj04,1,,Our friends", True),
        ("0,1467810369,Mon,text", True),
        ("country,1990,2000,2010", False),
        ("0,1,2", False),
        ("name,0", False),
        ("name,age,v2", False),
    ],
)
def test_a_first_line_that_may_be_a_sample_is_told(
    first: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = ",".join("7" if name.isdecimal() else "x" for name in first.split(","))
    (tmp_path / "a.csv").write_text(f"{first}\n{row}\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path / "a.csv"))) == 1
    assert ("if it is a sample, write a line of names" in caplog.text) == told


def test_columns_without_names_are_named_as_by_pandas_and_equal_names_are_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spam.csv"
    path.write_text("v1,v2,,,\nham,Go until,,,\nspam,Free,,,\n")
    reader = open_reader(str(path), label="v1")
    assert list(reader.schema.kinds) == ["label", "v2", "Unnamed: 2", "Unnamed: 3", "Unnamed: 4"]
    assert (reader.classes, reader.labels.tolist()) == (["ham", "spam"], [0, 1])
    path.write_text("x,x,y\n1,2,3\n")
    with pytest.raises(SourceError, match="has 'x' twice in its first line: rename one"):
        open_reader(str(path))


def test_boxes_by_width_and_height_are_told_to_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, ["images/0.png", "images/1.png"])
    rows = "0.png,1,1,3,3,1\n0.png,4,4,2,2,1\n1.png,1,1,2,2,0\n"
    (tmp_path / "labels.csv").write_text("file_name,x,y,width,height,Target\n" + rows)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert open_reader(str(tmp_path)).labels.tolist() == [1, 0]
    assert "its boxes (x, y, width, height) are left out" in caplog.text


@pytest.mark.parametrize("name", ["iris.data", "a.conll"])
def test_tables_of_no_format_are_refused_with_the_way_to_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("5.1,3.5,Iris-setosa\n")
    with pytest.raises(SourceError, match=r"write a table as x\.csv with a line of names on top"):
        open_reader(str(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["metadata.jsonl", "metadata.csv", "labels.parquet", "labels.json"]
)
def test_a_column_of_a_table_next_to_pictures_is_chosen_by_its_name(
    name: str, tmp_path: Path
) -> None:
    _pictures(tmp_path, ["0.png", "1.png"])
    rows = [{"file_name": f"{k}.png", "caption": f"a photo of {k}", "id": k} for k in range(2)]
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    elif name.endswith("csv"):
        lines = [",".join(map(str, row.values())) for row in rows]
        path.write_text("\n".join(["file_name,caption,id", *lines]))
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    reader = open_reader(str(tmp_path), label="caption")
    assert reader.classes == ["a photo of 0", "a photo of 1"]
    assert reader.labels.tolist() == [0, 1]
    with pytest.raises((SourceError, UsageError), match=r"file_name|caption"):
        open_reader(str(tmp_path), label="captoin")


def test_the_remedy_for_a_table_in_a_folder_of_its_own_reads_it(tmp_path: Path) -> None:
    _pictures(tmp_path, ["Training_Input/ISIC_0.png", "Training_Input/ISIC_1.png"])
    (tmp_path / "Truth").mkdir()
    (tmp_path / "Truth" / "truth.csv").write_text("image,MEL,NV\nISIC_0,1.0,0.0\nISIC_1,0.0,1.0\n")
    with pytest.raises(SourceError, match=r"it holds a table: choose it with table='Truth/truth"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), table="Truth/truth.csv")
    assert (reader.classes, reader.labels.tolist()) == (["MEL", "NV"], [0, 1])


@pytest.mark.parametrize("name", ["train.csv", "train_labels.txt", "labels.json"])
def test_files_next_to_the_folder_of_a_split_that_may_label_it_are_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, ["train/0/0/a.png", "train/0/1/b.png", "test/0/0/c.png"])
    (tmp_path / name).write_text("{}" if name.endswith("json") else "id,landmark\na1,7\nb1,9\n")
    (tmp_path / "test.csv").write_text("id\nc1\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path), split="train")) == 2
    assert f"1 file ({name}) in {tmp_path}, which may hold labels" in caplog.text


@pytest.mark.parametrize(
    ("names", "masks"),
    [
        (("volume-0", "volume-1", "segmentation-0", "segmentation-1"), 2),
        (("0_sat", "0_mask", "1_sat", "1_mask"), 2),
        (("cat_0", "cat_1", "dog_0", "dog_1"), 0),
        (("volume-0", "volume-1", "segmentation-0"), 0),
    ],
)
def test_masks_with_a_word_for_them_next_to_a_number_are_told(
    names: Sequence[str], masks: int
) -> None:
    made = masks_among([f"{name}.nii.gz" for name in names])
    assert len(made) == masks
    assert all("mask" in name or "segmentation" in name for name in made)


def test_label_in_a_folder_of_tables_is_a_column_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"x": [0.5, 1.5], "fine_label": [19, 29], "coarse_label": [11, 15]})
    pq.write_table(table, tmp_path / "data" / "train-00000-of-00001.parquet")
    reader = open_reader(str(tmp_path), split="train", label="coarse_label")
    assert reader.labels.tolist() == [11, 15]
    _pictures(tmp_path / "pictures", ["a/0.png", "b/1.png"])
    with pytest.raises(UsageError, match=r"label='x': .* has no list of its pictures"):
        open_reader(str(tmp_path / "pictures"), label="x")


def test_classes_of_few_words_seem_to_be_several_labels() -> None:
    tags = ["clear", "haze", "primary", "road", "water"]
    several = [" ".join(own) for n in (2, 3) for own in itertools.combinations(tags, n)]
    assert several_labels(several) == several[0]
    assert not several_labels(["red circle", "red square", "blue circle", "blue square"])
    assert not several_labels(["Boeing 707", "Boeing 727", "DC-3"])
    assert not several_labels([])


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.nc", b"CDF\x01" + bytes(60), "is of NetCDF 3, which is not HDF5"),
        ("x.ply", b"ply\n", "a point cloud or mesh"),
        ("x.edf", b"0 ", "a recording: mne"),
        ("dataset.json", b'{"training": []}', "open its folder"),
        ("cifar-100-python/train", b"\x80\x02}q\x01.", "a pickle, which may run any code"),
    ],
)
def test_more_formats_are_refused_by_name(
    name: str, data: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        open_reader(str(tmp_path / name.partition("/")[0]))


def test_a_class_behind_another_name_in_a_tar_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name in ("0.input.txt", "0.target.cls"):
            file.addfile(tarfile.TarInfo(name))
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path / "a.tar"))
    assert "its target.cls is bytes: call it cls" in caplog.text
