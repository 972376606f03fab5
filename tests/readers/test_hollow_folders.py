"""Folders without pictures among others are named with what can be read of the data set."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlio.data.reader import open_reader, open_reading
from dlio.errors import SourceError, UsageError


def _files(folder: Path, *names: str, text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(text.encode() or b"\x89PNG")


def test_pictures_and_masks_of_davis_are_named(tmp_path: Path) -> None:
    for video in ("bear", "camel"):
        _files(tmp_path / "JPEGImages" / "480p" / video, "0.jpg", "1.jpg")
        _files(tmp_path / "Annotations" / "480p" / video, "0.png", "1.png")
    _files(tmp_path / "ImageSets" / "2017", "train.txt", text="bear\n")
    words = r"format='masks', images='JPEGImages', masks='Annotations' reads the two"
    with pytest.raises(SourceError, match=words):
        open_reader(str(tmp_path))
    path = str(tmp_path)
    assert len(open_reader(path, format="masks", images="JPEGImages", masks="Annotations")) == 4


def test_the_only_folder_of_pictures_of_mot_is_named(tmp_path: Path) -> None:
    _files(tmp_path / "img1", "000001.jpg", "000002.jpg")
    _files(tmp_path / "gt", "gt.txt", text="1,1,912,484,97,109,0,7,1\n")
    with pytest.raises(SourceError, match=r"texts of numbers.*; or open .*/img1, the only folder"):
        open_reader(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  2.88e-001 -2.02e-002\n", "x.txt: numpy.loadtxt reads them"),
        ("a word of 1\n", "a column of a CSV or Parquet file"),
        ("\n", "a column of a CSV or Parquet file"),
    ],
)
def test_texts_of_numbers_have_the_way_to_arrays(text: str, words: str, tmp_path: Path) -> None:
    _files(tmp_path / "signals", "x.txt", text=text)
    with pytest.raises(SourceError, match=words):
        open_reader(str(tmp_path))


def test_masks_of_runs_of_pixels_are_no_label_to_choose(tmp_path: Path) -> None:
    _files(tmp_path / "train", "0.png", "1.png")
    rows = "".join(f"{k}.png,29102 12 29346 {24 + k}\n" for k in range(2))
    (tmp_path / "train.csv").write_text(f"ImageId,EncodedPixels\n{rows}")
    with pytest.raises(UsageError, match="its EncodedPixels are masks by their runs") as caught:
        open_reader(str(tmp_path))
    assert "label=" not in str(caught.value)
    assert len(open_reader(str(tmp_path / "train"), layout="flat")) == 2


def test_json_of_boxes_by_picture_is_not_called_coco(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        _files(tmp_path / folder, "a.png", "b.png")
    text = '{"a": {"height": 2, "width": 2, "bbox": [{"label": "polyp", "xmin": 1}]}}'
    (tmp_path / "bboxes.json").write_text(text)
    assert open_reader(str(tmp_path)).format == "masks"


@pytest.mark.parametrize(
    ("table", "name"), [("labels.csv", "images/{}.png"), ("metadata.csv", "{}.png")]
)
def test_a_label_that_no_column_has_is_told_with_the_columns(
    table: str, name: str, tmp_path: Path
) -> None:
    _files(tmp_path / ("images" if "/" in name else ""), "0.png", "1.png")
    rows = "".join(f"{name.format(k)},cat\n" for k in range(2))
    (tmp_path / table).write_text(f"image,species\n{rows}")
    words = rf"label='specis': .*{table} has image, species, .*; did you mean species\?"
    with pytest.raises(UsageError, match=words):
        open_reader(str(tmp_path), label="specis")
    assert list(open_reader(str(tmp_path), label="species").classes) == ["cat"]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "npz"])
def test_splits_below_the_only_folder_are_the_splits(suffix: str, tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        _table(tmp_path / "default" / split / f"0000.{suffix}", count)
    with pytest.raises(UsageError, match="default holds the splits test, train: choose one"):
        open_reader(str(tmp_path))
    for split, count in (("train", 3), ("test", 2)):
        reader = open_reader(str(tmp_path), split=split)
        assert reader.labels.tolist() == list(range(count))
    shutil.rmtree(tmp_path / "default" / "test")
    assert len(open_reader(str(tmp_path))) == 3
    assert len(open_reader(str(tmp_path), split="train")) == 3
    with pytest.raises(UsageError, match=r"split='test': .*default has train: choose one"):
        open_reader(str(tmp_path), split="test")


@pytest.mark.parametrize("split", [None, "train"])
def test_configurations_with_folders_of_splits_are_named(split: str | None, tmp_path: Path) -> None:
    for name in ("de", "en"):
        _table(tmp_path / name / "train" / "0000.parquet", 3)
    words = r"holds the data sets de \(parquet\), en \(parquet\): open one of them, such as .*/de"
    with pytest.raises(UsageError, match=words):
        open_reading(str(tmp_path), split=split)
    assert len(open_reader(str(tmp_path / "en"), split="train")) == 3


def test_class_folders_of_pictures_that_are_left_out_have_the_way_to_convert_them(
    tmp_path: Path,
) -> None:
    for name in ("cat", "dog"):
        _files(tmp_path / name, "0.heic", "1.heic")
    with pytest.raises(
        SourceError, match=r"0\.heic is a picture of a kind .*: convert it to \.png"
    ):
        open_reader(str(tmp_path))


def _table(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True)
    numbers = np.arange(count)
    if path.suffix == ".npz":
        np.savez(path, x=numbers / 2, label=numbers)
    elif path.suffix == ".csv":
        path.write_text("x,label\n" + "".join(f"{k / 2},{k}\n" for k in range(count)))
    else:
        pq.write_table(pa.table({"x": numbers / 2, "label": numbers}), path)
