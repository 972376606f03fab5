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


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (
            "684,8,273,116,0,0,0,0\n",
            "{stem}.txt",
            "texts named as pictures are, such as 000001.txt",
        ),
        (
            "000001  1\n000002 -1\n",
            "Main/cat.txt",
            r"lists of pictures, .*table='sets/Main/cat.txt'",
        ),
        (
            "images/000001.jpg 1\nimages/000002.jpg 0\n",
            "a.txt",
            r"lists of pictures, .*table='sets/a",
        ),
    ],
)
def test_texts_of_the_pictures_next_to_them_are_called_so(
    text: str, name: str, words: str, tmp_path: Path
) -> None:
    stems = ("000001", "000002")
    _files(tmp_path / "images", *(f"{stem}.jpg" for stem in stems))
    for stem in stems:
        path = tmp_path / "sets" / name.format(stem=stem)
        _files(path.parent, path.name, text=text)
    with pytest.raises(SourceError, match=words):
        open_reader(str(tmp_path))
    if "table" in words:
        table = f"sets/{name}"
        assert open_reader(str(tmp_path), table=table).labels.tolist()[0] == 1


@pytest.mark.parametrize("depth", ["", "data/"])
@pytest.mark.parametrize("test", ["test", "test/test"])
def test_folders_of_splits_next_to_a_split_are_no_classes(
    depth: str, test: str, tmp_path: Path
) -> None:
    for split in ("train", "valid"):
        for name in ("a", "b"):
            _files(tmp_path / "data" / depth / split / name, "0.jpg")
    _files(tmp_path / test, "0.jpg", "1.jpg")
    inner = f"{tmp_path}/data/{depth}".rstrip("/")
    words = rf"/data holds the splits .*: open {inner} with split='train' or .*/test$"
    with pytest.raises(UsageError, match=words):
        open_reader(str(tmp_path))
    assert list(open_reader(inner, split="train").classes) == ["a", "b"]


@pytest.mark.parametrize("count", [3, 20])
def test_class_folders_of_splits_each_are_refused_however_many(count: int, tmp_path: Path) -> None:
    for k in range(count):
        for split in ("train", "test"):
            _files(tmp_path / f"c{k:02}" / split, "0.jpg")
    with pytest.raises(UsageError, match="c00 and c01 hold the splits"):
        open_reader(str(tmp_path))


def test_class_folders_of_other_arrays_than_each_other_may_be_opened_one_by_one(
    tmp_path: Path,
) -> None:
    for folder, shape in (("flat", (2, 3)), ("tall", (4, 2, 3))):
        (tmp_path / folder).mkdir()
        for k in range(3):
            np.save(tmp_path / folder / f"{k}.npy", np.zeros(shape))
    with pytest.raises(SourceError, match=r"or open one of flat, tall$"):
        open_reader(str(tmp_path))


def test_a_column_to_choose_is_no_width(tmp_path: Path) -> None:
    _files(tmp_path / "train", "0.png", "1.png")
    rows = "".join(f'{k},1024,1024,"[834.0, 222.0]",usask\n' for k in range(2))
    (tmp_path / "train.csv").write_text(f"image_id,width,height,bbox,source\n{rows}")
    with pytest.raises(UsageError, match="label='source', or read them without"):
        open_reader(str(tmp_path))
