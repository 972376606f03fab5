"""Splits are recognised by their names, as folders and as files, and never become classes."""

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import dlio
from dlio.data.reader import open_reader
from dlio.data.splits import reading_options, split_of, split_words
from dlio.errors import SourceError, UsageError


@pytest.mark.parametrize(
    "names", [("train", "val"), ("Training", "test"), ("train", "valid"), ("train", "eval")]
)
def test_parts_of_a_data_set_are_no_classes(
    pictures: Path, tmp_path: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        shutil.copytree(pictures, tmp_path / "both" / name)
    with pytest.raises(UsageError, match=f"split='{names[0]}'.*or open {tmp_path}/both/{names[0]}"):
        open_reader(str(tmp_path / "both"))
    for name in names:
        reader = open_reader(str(tmp_path / "both"), split=name)
        assert list(reader.classes) == sorted(each.name for each in pictures.iterdir())
    whole = open_reader(str(tmp_path / "both"), split="all")
    assert list(whole.classes) == list(reader.classes)
    assert whole.labels.tolist() == 2 * reader.labels.tolist()
    shutil.copytree(next(pictures.iterdir()), tmp_path / "both" / "unlabeled")
    beside = open_reader(str(tmp_path / "both"), split="all")
    assert beside.labels.tolist() == whole.labels.tolist()
    assert "left out: 1 folder (unlabeled) next to them" in caplog.text
    shutil.rmtree(tmp_path / "both" / "unlabeled")
    named = open_reader(str(tmp_path / "both"), layout="classes")  # As the user says.
    assert list(named.classes) == sorted(names)
    assert len(named) == len(whole)


def test_folders_of_splits_may_say_the_format_of_their_files(tmp_path: Path) -> None:
    """As Synapse's, of TransUNet."""
    (tmp_path / "train_npz").mkdir()
    (tmp_path / "test_vol_h5").mkdir()
    for k in range(3):
        np.savez(tmp_path / "train_npz" / f"{k}.npz", image=np.full((4, 4), k, np.float32))
    with h5py.File(tmp_path / "test_vol_h5" / "0.npy.h5", "w") as file:
        file["image"] = np.ones((4, 4), np.float32)
    with pytest.raises(UsageError, match="holds the splits test_vol_h5, train_npz"):
        open_reader(str(tmp_path))
    assert len(open_reader(str(tmp_path), split="train")) == 12
    assert len(open_reader(str(tmp_path), split="test")) == 4


def test_a_split_that_is_a_link_elsewhere_is_not_read_with_the_others(
    pictures: Path, tmp_path: Path
) -> None:
    shutil.copytree(pictures, tmp_path / "set" / "train")
    shutil.copytree(pictures, tmp_path / "elsewhere")
    (tmp_path / "set" / "test").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="--follow-links"):
        open_reader(str(tmp_path / "set"), split="all")
    with dlio.open(tmp_path / "set", split="all", follow_links=True, tiers="none") as data:
        assert len(data) == 2 * len(open_reader(str(pictures)))


@pytest.mark.parametrize(
    ("name", "folder", "split"),
    [
        ("train-00000-of-00003.parquet", False, "train"),
        ("mnist_test.h5", False, "test"),
        ("valid.csv", False, "validation"),
        ("dev_0.tar", False, "validation"),
        ("training.npz", False, "train"),
        ("trainer.h5", False, None),
        ("latest.tar", False, None),
        ("val2017", True, "validation"),
        ("Testing", True, "test"),
        ("train set", True, None),
        ("test1", True, None),
    ],
)
def test_names_say_which_part_they_are(name: str, folder: bool, split: str | None) -> None:
    assert split_of(name, folder=folder) == split


def test_classes_are_not_warned_of(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train", "bus", "car"):  # A train may be a vehicle.
        shutil.copytree(next(each for each in pictures.iterdir()), tmp_path / "three" / name)
    for path in (pictures, tmp_path / "three"):
        with dlio.open(str(path), tiers="none") as data:
            assert len(data.classes) == 3
    assert not caplog.records


def test_a_lone_train_folder_is_warned_of(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(pictures, tmp_path / "one" / "train")
    open_reader(str(tmp_path / "one")).close()
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.endswith(f"open {tmp_path}/one/train")


def test_parts_of_another_format_are_to_be_opened_by_themselves(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / "packed" / name).mkdir(parents=True)
        (tmp_path / "packed" / name / "000000.dlio").write_bytes(b"a shard")
    with pytest.raises(UsageError, match="holds the splits train, val: choose"):
        open_reader(str(tmp_path / "packed"))


@pytest.mark.parametrize("name", ["a.npz", "a.h5", "a.csv", "a.zarr", "arrays", "pictures"])
def test_a_split_of_a_data_set_without_any_is_an_error_with_every_command_s_option(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    array = np.zeros((3, 2), np.float32)
    if name == "a.npz":
        np.savez(path, x=array)
    elif name == "a.h5":
        with h5py.File(path, "w") as file:
            file["x"] = array
    elif name == "a.csv":
        path.write_text("x,y\n1,2\n")
    elif name == "a.zarr":
        zarr.open_group(str(path), mode="w").create_array("x", data=array)
    else:
        path.mkdir()
        for k in range(3):
            if name == "arrays":
                np.save(path / f"{k}.npy", array[:2])
            else:
                (path / f"{k}.png").write_bytes(b"\x89PNG")
    with pytest.raises(UsageError, match=r"\(.*--split or --val-split, of dlio pack --source-"):
        open_reader(str(path), split="val")


def test_options_of_a_reader_are_read_from_words() -> None:
    words = ("layout=flat", "label=a=b", "first-pixel=1", 'columns=["a", "b"]', "masks=true")
    assert reading_options("val", None, words) == {
        "split": "val",
        "layout": "flat",
        "label": "a=b",
        "first_pixel": 1,
        "columns": ["a", "b"],
        "masks": True,
    }
    assert split_words("val", ("x=1", "y=2")) == (
        *("--split", "val", "--reader-option", "x=1", "--reader-option", "y=2"),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("layout",), "give NAME=VALUE"),
        (("=flat",), "give NAME=VALUE"),
        (("path=x",), "of the command's own"),
        (("split=val",), "of the command's own"),
        (("trust=true",), "of the command's own"),
        (("a=1", "a=2"), "a is given twice"),
    ],
)
def test_wrong_options_of_a_reader_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        reading_options(None, None, words)


@pytest.mark.parametrize(
    ("option", "hint"), [("crops", "option (of dlio.open)"), ("corps", "; did you mean crops?")]
)
def test_an_option_that_is_no_reader_s_is_not_suggested_for_itself(
    tmp_path: Path, option: str, hint: str
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    options: dict[str, Any] = {option: 2}
    with pytest.raises(UsageError) as refused:
        open_reader(str(tmp_path / "x.npy"), **options)
    assert str(refused.value).endswith(hint)
