"""Folders are read by the reader that clearly fits best; the rest and ties are told."""

import logging
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dlio.cli.ls import describe
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import SourceError, UsageError


def _picture(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(path)


def _folders(root: Path, count: int = 2, suffix: str = ".png") -> None:
    for kind in ("cat", "dog"):
        for k in range(count):
            _picture(root / kind / f"{k}{suffix}")


def _stray(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["x"] = np.zeros((4, 2))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table({"x": [1, 2]}), path)
    elif path.suffix == ".feather":
        feather.write_feather(pa.table({"x": [1, 2]}), path)
    elif path.suffix == ".npy":
        np.save(path, np.zeros((4, 2)))
    else:
        path.write_bytes(b"x,y\n1,2\n" if path.suffix == ".csv" else b"\0" * 10240)


def _said(reader: Reader) -> tuple[int, list[str], list[int]]:
    return len(reader), list(reader.classes), reader.labels.tolist()


@pytest.mark.parametrize(
    "name", ["n01.tar", "x.h5", "x.parquet", "x.feather", "x.npy", "x.csv", "sheet.png"]
)
def test_a_stray_file_beside_class_folders_is_left_out_and_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _folders(tmp_path)
    if name == "sheet.png":
        _picture(tmp_path / name)
    else:
        _stray(tmp_path / name)
    for _ in range(2):
        assert _said(open_reader(str(tmp_path))) == (4, ["cat", "dog"], [0, 0, 1, 1])
    (said,) = [each.getMessage() for each in caplog.records]
    assert name in said
    assert "2 class folders with 4 images" in said
    about = describe(str(tmp_path))
    assert name in " ".join(about["left_out"])
    assert about["understood"] == "2 class folders with 4 images"


def test_the_reader_of_the_stray_file_can_be_chosen(tmp_path: Path) -> None:
    _folders(tmp_path)
    _stray(tmp_path / "x.h5")
    assert open_reader(str(tmp_path), format="hdf5").format == "hdf5"
    with pytest.raises(UsageError, match="format='hdf4'"):
        open_reader(str(tmp_path), format="hdf4")


def test_a_tie_shows_both_readings_and_the_option(tmp_path: Path) -> None:
    _folders(tmp_path)
    for k in range(3):
        _stray(tmp_path / f"{k}.h5")
    with pytest.raises(UsageError, match=r"2 class folders with 4 images.*3 files.*format='hdf5'"):
        open_reader(str(tmp_path))
    assert open_reader(str(tmp_path), format="folder").format == "folder"


def test_pictures_beside_as_many_in_folders_are_a_tie(tmp_path: Path) -> None:
    _folders(tmp_path)
    for k in range(3):
        _picture(tmp_path / f"{k}.png")
    with pytest.raises(UsageError, match=r"4 images, or 3 pictures.*layout='classes'"):
        open_reader(str(tmp_path))
    assert len(open_reader(str(tmp_path), layout="classes")) == 4
    assert len(open_reader(str(tmp_path), layout="flat")) == 3


def test_one_picture_beside_a_file_of_data_does_not_hide_it(tmp_path: Path) -> None:
    _stray(tmp_path / "x.parquet")
    _picture(tmp_path / "thumbnail.png")
    assert open_reader(str(tmp_path)).format == "parquet"


@pytest.mark.parametrize(
    "table", ["metadata.csv", "labels.csv", "metadata.parquet", "metadata.jsonl"]
)
def test_a_table_that_names_pictures_of_folders_gives_the_labels(
    table: str, tmp_path: Path
) -> None:
    names = [f"images/{k}.png" for k in range(6)]
    kinds = ["cat" if k % 2 else "dog" for k in range(6)]
    for name in names:
        _picture(tmp_path / name)
    if table.endswith(".parquet"):
        parquet.write_table(pa.table({"file_name": names, "label": kinds}), tmp_path / table)
    elif table.endswith(".jsonl"):
        rows = [
            f'{{"file_name": "{n}", "label": "{k}"}}' for n, k in zip(names, kinds, strict=True)
        ]
        (tmp_path / table).write_text("\n".join(rows))
    else:
        rows = [f"{n},{k}" for n, k in zip(names, kinds, strict=True)]
        (tmp_path / table).write_text("file_name,label\n" + "\n".join(rows) + "\n")
    assert _said(open_reader(str(tmp_path))) == (6, ["cat", "dog"], [1, 0, 1, 0, 1, 0])


@pytest.mark.parametrize("suffix", ["parquet", "feather", "h5", "npy"])
def test_files_of_several_splits_are_not_one_data_set(suffix: str, tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        _stray(tmp_path / "data" / f"{name}.{suffix}")
    for path in (tmp_path / "data", tmp_path):  # The folder, and the repository that it lies in.
        with pytest.raises(UsageError, match=r"train \(1 file\), test \(1 file\): choose one"):
            open_reader(str(path))
        one = len(open_reader(str(path), split="train"))
        assert one == len(open_reader(str(path), split="test"))
        assert len(open_reader(str(path), split="all")) == 2 * one
        with pytest.raises(UsageError, match=r"split='dev'.*choose one of these"):
            open_reader(str(path), split="dev")


def test_a_pattern_for_several_splits_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train", "test"):
        _stray(tmp_path / f"{name}-0.parquet")
    pattern = f"{tmp_path}/*.parquet"
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(pattern)) == 4
    assert "splits test, train" in caplog.text
    assert len(open_reader(pattern, split="test")) == 2


def _yolo(root: Path, described: str) -> str:
    for k in range(6):
        _picture(root / "images" / f"{k}.png")
        (root / "labels").mkdir(exist_ok=True)
        (root / "labels" / f"{k}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    for name, low, high in (("train", 0, 4), ("val", 4, 6)):
        lines = "".join(f"./images/{k}.png\n" for k in range(low, high))
        (root / f"{name}.txt").write_text(lines)
    (root / "data.yaml").write_text(described + "names: [a]\n")
    return str(root / "data.yaml")


def test_splits_that_data_yaml_lists_are_read(tmp_path: Path) -> None:
    path = _yolo(tmp_path, "path: .\ntrain: train.txt\nval: val.txt\n")
    for place in (path, str(tmp_path)):
        with pytest.raises(UsageError, match="splits train, val: choose one with split='train'"):
            open_reader(place)
        counts = [len(open_reader(place, split=name)) for name in ("train", "validation", "all")]
        assert counts == [4, 2, 6]


def test_lists_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    path = _yolo(tmp_path / "in", "train: train.txt\n")
    (tmp_path / "in" / "train.txt").write_text("../../secret.png\n")
    with pytest.raises(SourceError, match=r"train\.txt, line 1: .* outside of the data"):
        open_reader(path)


_HIDDEN = (".ipynb_checkpoints/0.png", "__MACOSX/cat/._0.png", ".x.png")


@pytest.mark.nightly
@settings(max_examples=100, deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=2),
    strays=st.sets(st.sampled_from(["x.tar", "x.h5", "x.parquet", "x.csv", "README.md"])),
    hidden=st.sets(st.sampled_from(_HIDDEN)),
    splits=st.sampled_from([(), ("train",), ("train", "val"), ("Training", "dev", "test")]),
    with_table=st.booleans(),
    linked=st.booleans(),
)
def test_any_folder_gives_the_samples_and_labels_that_lie_there(
    counts: dict[str, int],
    strays: set[str],
    hidden: set[str],
    splits: tuple[str, ...],
    with_table: bool,
    linked: bool,
) -> None:
    classes = sorted(counts)
    files = [(f"{name}/{k}.png", name) for name in classes for k in range(counts[name])]
    with tempfile.TemporaryDirectory() as folder:
        for part in splits or ("",):
            root = Path(folder) / part
            for name, _ in files:
                _picture(root / name)
            if linked:
                (root / classes[0] / "link.png").symlink_to(root / files[0][0])
            for name in [*hidden, f"{classes[0]}/._0.png"]:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(b"left behind")
            for name in strays:
                _stray(root / name)
            names = sorted([n for n, _ in files] + [f"{classes[0]}/link.png"] * linked)
            if with_table:
                rows = [f"{name},{number % 2}" for number, name in enumerate(names)]
                (root / "labels.csv").write_text("file,label\n" + "\n".join(rows) + "\n")
                labels = [number % 2 for number in range(len(names))]
            else:
                labels = [classes.index(name[0]) for name in names]
        if len(splits) > 1:
            with pytest.raises(UsageError, match="choose one with split="):
                open_reader(folder)
        for split in splits or (None,):
            reader = open_reader(folder, split=split)
            assert (len(reader), reader.labels.tolist()) == (len(names), labels)
            if not with_table:
                assert list(reader.classes) == classes


def test_folders_that_each_hold_splits_are_not_classes(tmp_path: Path) -> None:
    for place in ("leftImg8bit/train/aachen", "leftImg8bit/val/lindau", "gtFine/train/aachen"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "gtFine" / "val").mkdir()
    with pytest.raises(UsageError, match="gtFine and leftImg8bit hold the splits train, val"):
        open_reader(str(tmp_path))
    # As class folders, one split of one of them is read.
    assert open_reader(str(tmp_path / "leftImg8bit" / "train")).classes == ["aachen"]


def test_of_an_empty_folder_no_reasons_of_readers_are_listed(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        open_reader(str(tmp_path))
    assert str(caught.value) == f"{tmp_path} holds nothing to read: check the path"


def test_a_folder_without_a_picture_is_an_error_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(SourceError, match="cats is a class folder without images"):
        open_reader(str(tmp_path))
    assert not caplog.records
