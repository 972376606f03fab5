"""Data sets for YOLO whose texts lie next to their pictures, and splits that lists name."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import SourceError, UsageError
from tests.loader.targets_data import painted, write

HEIGHT, WIDTH = 24, 32
BOX = [8.0, 6.0, 24.0, 18.0]
LINE = "1 0.5 0.5 0.5 0.5\n"


def _pictures(folder: Path, names: Sequence[str], text: str = LINE) -> None:
    for name in names:
        write(folder / f"{name}.png", painted(HEIGHT, WIDTH, []))
        (folder / f"{name}.txt").write_text(text)


def _boxes(reader: Reader) -> list[tuple[str, list[list[float]], list[int]]]:
    payloads = reader.read(np.arange(len(reader)))
    rows = [reader.schema.split(each) for each in payloads]
    return [
        (reader.name(k), row["boxes"].tolist(), row["box_labels"].tolist())
        for k, row in enumerate(rows)
    ]


def test_texts_lie_next_to_pictures_as_labelimg_writes_them(tmp_path: Path) -> None:
    _pictures(tmp_path, ["a"])
    _pictures(tmp_path, ["b"], text="")
    write(tmp_path / "c.png", painted(HEIGHT, WIDTH, []))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    reader = open_reader(str(tmp_path))
    assert (reader.format, list(reader.classes)) == ("yolo", ["cat", "dog"])
    assert _boxes(reader) == [("a.png", [BOX], [1]), ("b.png", [], []), ("c.png", [], [])]


def test_splits_whose_texts_lie_next_to_pictures(tmp_path: Path) -> None:
    for split, name in (("train", "a"), ("valid", "b")):
        _pictures(tmp_path / split, [name])
        (tmp_path / split / "_darknet.labels").write_text("cat\ndog\n")
    (tmp_path / "README.roboflow.txt").write_text("exported")
    reader = open_reader(str(tmp_path), split="val")
    assert _boxes(reader) == [("valid/b.png", [BOX], [1])]
    assert list(reader.classes) == ["cat", "dog"]
    inner = open_reader(str(tmp_path / "train"))
    assert _boxes(inner) == [("a.png", [BOX], [1])]


@pytest.mark.parametrize("before", ["", "data/", "/content/darknet/data/", "C:\\old\\data\\"])
def test_lists_of_darknet_name_the_pictures_of_splits(tmp_path: Path, before: str) -> None:
    _pictures(tmp_path / "obj_train_data", ["a", "b", "c"])
    (tmp_path / "obj.names").write_text("cat\ndog\n")
    (tmp_path / "train.txt").write_text(f"{before}obj_train_data/a.png\n")
    assert len(open_reader(str(tmp_path))) == 3  # One list may be there by chance.
    assert [each[0] for each in _boxes(open_reader(str(tmp_path), split="train"))] == [
        "obj_train_data/a.png"
    ]
    lines = "".join(f"{before}obj_train_data/{name}.png\n" for name in "bc")
    (tmp_path / "test.txt").write_text(lines)
    with pytest.raises(UsageError, match="splits test, train"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), split="test")
    assert [each[1:] for each in _boxes(reader)] == [([BOX], [1])] * 2


def test_lists_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _pictures(root / "obj", ["a"])
    _pictures(tmp_path, ["secret"])
    (root / "obj.names").write_text("cat\ndog\n")
    for line in ("../secret.png", "x/../../secret.png", "data/../../secret.png"):
        (root / "train.txt").write_text(f"{line}\n")
        with pytest.raises(SourceError, match=r"lies outside of the data set's|lacks 1 of 1 file"):
            open_reader(str(root), split="train")


def test_a_data_yaml_may_name_folders_anywhere(tmp_path: Path) -> None:
    for place, name in (("x", "a"), ("y", "b")):
        write(tmp_path / place / "images" / f"{name}.png", painted(HEIGHT, WIDTH, []))
        label = tmp_path / place / "labels" / f"{name}.txt"
        label.parent.mkdir()
        label.write_text(LINE)
    (tmp_path / "data.yaml").write_text(
        "train: [x/images]\nval:\n  - y/images\nnames: [cat, dog]\n"
    )
    with pytest.raises(UsageError, match="splits train, val"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), split="val")
    assert _boxes(reader) == [("y/images/b.png", [BOX], [1])]


@pytest.mark.parametrize("text", ["a photo of a cat", "1 2 3 4 5", "0.5 0.5 0.5 0.5", ""])
def test_other_texts_next_to_pictures_are_told(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, ["a", "b"], text=text)
    reader = open_reader(str(tmp_path))
    assert (reader.format, len(reader)) == ("folder", 2)
    assert "2 files (a.txt, b.txt) named as pictures are" in caplog.text


@pytest.mark.parametrize("bad", [0, 4, 7])
@pytest.mark.parametrize("line", ["dog 0.5 0.5 0.2 0.2", "0 0.5 0.5 0.2", "0 50 50 20 20"])
def test_one_wrong_text_next_to_pictures_is_named(bad: int, line: str, tmp_path: Path) -> None:
    for k in range(8):
        _pictures(tmp_path, [str(k)], line if k == bad else LINE)
    with pytest.raises(SourceError, match=rf"{bad}\.txt, line 1: "):
        open_reader(str(tmp_path))


@pytest.mark.parametrize("texts", [range(13, 20), range(20)])
def test_pictures_of_which_few_have_boxes_have_these(texts: range, tmp_path: Path) -> None:
    for k in range(20):
        _pictures(tmp_path, [f"{k:02}"], LINE if k > 12 else "")
        if k not in texts:
            (tmp_path / f"{k:02}.txt").unlink()
    reader = open_reader(str(tmp_path))
    assert reader.format == "yolo"
    assert len(reader) == 20
    assert [len(boxes) for _, boxes, _ in _boxes(reader)] == [0] * 13 + [1] * 7


def test_boxes_in_pixels_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _pictures(tmp_path, ["0", "1", "2", "3"], "0 12 12 8 8\n")
    with pytest.raises(SourceError, match=r"0\.txt has 12, and not shares of its picture's sides"):
        open_reader(str(tmp_path), format="yolo")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert open_reader(str(tmp_path)).format == "folder"
    assert "0.txt has 12, and not shares of its picture's sides" in caplog.text
