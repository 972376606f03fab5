"""Folders as they are published and exported, whose labels and splits lie next to a lone folder, in
texts that look like another format's, or in lists: read, or told with a remedy that reads them."""

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dlio.data.reader import open_reader
from dlio.errors import UsageError
from dlio.image.image_warnings import WARNINGS
from dlio.image.segmentation_masks import decode_mask
from dlio.util import printable
from dlio.util.settings import REHEARSAL
from dlio_staging.verify import verify


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.
    monkeypatch.setattr(printable, "_told", set())
    caplog.set_level(logging.INFO)


def _picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (9, 9, 9)).save(path)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _labels_of(path: object, **options: Any) -> tuple[list[str], list[int]]:
    reader = open_reader(str(path), **options)
    try:
        return list(reader.classes), np.asarray(reader.labels).tolist()
    finally:
        reader.close()


# Labels of lists


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
@pytest.mark.parametrize(
    ("lists", "labels"),
    [
        ([[1], [2, 0], []], [0, 0, 0]),  # As many values as rows, and not one a row.
        ([[], [7, 8], [9]], [0, 0, 0]),
        ([[[1, 2]], [], [[0]]], [0, 0, 0]),
        ([[1], [2], [0]], [1, 2, 0]),
        ([[[1]], [[2]], [[0]]], [1, 2, 0]),
    ],
)
def test_lists_are_labels_only_if_each_has_one(
    lists: Any, labels: Sequence[int], suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, path = pa.table({"x": [1.0, 2.0, 3.0], "labels": lists}), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)
    assert _labels_of(path) == ([], labels)
    assert ("its labels is a list, of several labels" in caplog.text) == (not any(labels))


def test_a_description_with_one_more_column_gives_no_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in "ab":
        _picture(tmp_path / kind / "0.png")
    _text(tmp_path / "metadata.csv", "file_name,width\na/0.png,8\nb/0.png,9\n")
    assert _labels_of(tmp_path) == (["a", "b"], [0, 1])
    assert "metadata.csv, which has no labels of the pictures" in caplog.text


# Lists in other places


def _textures(folder: Path) -> None:
    """As the Describable Textures are: lists of ten ways to split them, in `labels`."""
    for kind in ("banded", "dotted"):
        for k in range(3):
            _picture(folder / "images" / kind / f"{kind}_{k}.jpg")
    for k, split in enumerate(("train", "val", "test")):
        for way in (1, 2):
            rows = [f"{kind}/{kind}_{(k + way) % 3}.jpg\n" for kind in ("banded", "dotted")]
            _text(folder / "labels" / f"{split}{way}.txt", "".join(rows))


def test_lists_in_a_folder_labels_are_no_boxes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _textures(tmp_path)
    assert _labels_of(tmp_path) == (["banded", "dotted"], [0, 0, 0, 1, 1, 1])
    assert "6 files (labels/test1.txt, labels/test2.txt, labels/train1.txt, ...)" in caplog.text
    assert "choose one with table=" in caplog.text
    assert _labels_of(tmp_path, table="labels/train1.txt") == (["banded", "dotted"], [0, 1])


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_lists_name_pictures_of_a_folder_in_a_folder(split: str, tmp_path: Path) -> None:
    """As Kaggle's copy of CelebA."""
    males = [1, -1, 1, -1, -1, 1]
    for k in range(6):
        _picture(tmp_path / "img_align_celeba" / "img_align_celeba" / f"00000{k}.jpg")
    rows = "".join(f"00000{k}.jpg,{males[k]},1\n" for k in range(6))
    _text(tmp_path / "list_attr_celeba.csv", f"image_id,Male,Young\n{rows}")
    rows = "".join(f"00000{k}.jpg,{k // 2}\n" for k in range(6))
    _text(tmp_path / "list_eval_partition.csv", f"image_id,partition\n{rows}")
    with pytest.raises(UsageError, match=r"no column that is clearly the label \(Male, Young\)"):
        open_reader(str(tmp_path))
    place = ("train", "val", "test").index(split)
    labels = _labels_of(tmp_path, split=split, table="list_attr_celeba.csv", label="Male")[1]
    assert labels == males[2 * place : 2 * place + 2]


def test_lists_name_pictures_of_parts_with_a_folder_in_each(tmp_path: Path) -> None:
    """As ChestX-ray14."""
    for k in range(4):
        _picture(tmp_path / f"images_00{k // 2 + 1}" / "images" / f"000{k}.png")
    _text(tmp_path / "train_val_list.txt", "0000.png\n0001.png\n0002.png\n")
    _text(tmp_path / "test_list.txt", "0003.png\n")
    findings = "0000.png,Effusion\n0001.png,None\n0002.png,Effusion\n0003.png,None\n"
    _text(tmp_path / "Data_Entry_2017.csv", f"Image Index,Finding Labels\n{findings}")
    with pytest.raises(UsageError, match="holds the splits"):
        open_reader(str(tmp_path))
    with closing(open_reader(str(tmp_path), split="test")) as reader:
        assert [reader.name(k).rpartition("/")[2] for k in range(len(reader))] == ["0003.png"]
    table = {"table": "Data_Entry_2017.csv", "label": "Finding Labels"}
    classes = ["Effusion", "None"]
    assert _labels_of(tmp_path, split="train", **table) == (classes, [0, 1, 0])
    assert _labels_of(tmp_path, split="test", **table) == (classes, [1])


@pytest.mark.parametrize(
    "name", ["train2018.json", "places_train_standard.txt", "LOC_synset_mapping.txt"]
)
def test_files_next_to_the_lone_folder_that_is_read_are_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("10", "11"):
        _picture(tmp_path / "train_val2018" / "Aves" / kind / "x.jpg")
    _text(tmp_path / name, json.dumps({"images": []}))
    _text(tmp_path / "README.txt", "About.")
    assert _labels_of(tmp_path) == (["10", "11"], [0, 1])
    assert f"1 file ({name}) in {tmp_path}, which may hold labels or splits" in caplog.text
    assert "README" not in caplog.text


def test_the_remedy_for_a_split_without_labels_reads_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Kaggle's copy of GTSRB."""
    for kind in (0, 1):
        _picture(tmp_path / "Train" / str(kind) / "0.png")
        _picture(tmp_path / "Test" / f"{kind}.png")
    rows = "8,6,1,Test/0.png\n8,6,0,Test/1.png\n"
    _text(tmp_path / "Test.csv", f"Width,Height,ClassId,Path\n{rows}")
    assert _labels_of(tmp_path, split="test") == ([], [0, 0])
    assert f"open {tmp_path} with table='Test.csv'" in caplog.text
    labels = _labels_of(tmp_path, table="Test.csv", label="ClassId")
    assert labels == (["0", "1"], [1, 0])


# Samples of other kinds


@pytest.mark.parametrize("name", ["a.wav", "clip.MP4", "x.nii.gz"])
def test_other_samples_in_class_folders_are_counted(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("no", "yes"):
        _picture(tmp_path / kind / "0.png")
        _picture(tmp_path / kind / "1.png")
        (tmp_path / kind / name).write_bytes(b"RIFF")
    assert _labels_of(tmp_path, format="folder") == (["no", "yes"], [0, 0, 1, 1])
    assert f"leaves out 2 files next to its pictures, such as no/{name}" in caplog.text
    notices = verify(str(tmp_path), format="folder").notices
    assert any("next to its pictures" in text for text in notices)


def test_masks_may_be_gifs_and_are_their_numbers(tmp_path: Path) -> None:
    """As Carvana's, whose palette has white for 1."""
    numbers = np.arange(48, dtype=np.uint8).reshape(6, 8) % 2
    for k in range(2):
        _picture(tmp_path / "train" / f"{k}.jpg")
        mask = Image.fromarray(numbers)
        mask.putpalette([0, 0, 0, 255, 255, 255])
        (tmp_path / "train_masks").mkdir(exist_ok=True)
        mask.save(tmp_path / "train_masks" / f"{k}_mask.gif")
    options: dict[str, Any] = {"format": "masks", "images": "train", "masks": "train_masks"}
    with closing(open_reader(str(tmp_path), **options)) as reader:
        values = reader.schema.split(reader.read(np.array([1]))[0])
    stored = bytes(values["mask"])
    np.testing.assert_array_equal(decode_mask(stored, "1_mask.gif"), numbers)
    assert WARNINGS.of("1_mask.gif") is None
