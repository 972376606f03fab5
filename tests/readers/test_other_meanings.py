"""Labels in several columns, in names of folders, and next to row numbers; arrays that are made of
others, or scaled by who reads them: read, told or refused."""

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
import zarr
from PIL import Image
from pyarrow import feather
from pyarrow import parquet as pq

from dlio.cli.ls import describe
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError
from dlio.util.settings import REHEARSAL


@pytest.fixture(autouse=True)
def _no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")


def _pictures(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (8, 6)).save(folder / name)


@pytest.mark.parametrize("table", ["labels.csv", "train.csv", "GroundTruth.csv"])
@pytest.mark.parametrize("folder", ["", "images"])
@pytest.mark.parametrize(("one", "zero"), [("1", "0"), ("1.0", "0.0"), ("True", "False")])
def test_one_hot_columns_next_to_pictures_are_classes(
    table: str,
    folder: str,
    one: str,
    zero: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _pictures(tmp_path / folder, [f"{k}.jpg" for k in range(4)])
    rows = [(one, zero, zero), (zero, one, zero), (zero, zero, one), (one, zero, zero)]
    lines = [",".join((str(k), *row)) for k, row in enumerate(rows)]
    (tmp_path / table).write_text("\n".join(["image,NV,MEL,BCC", *lines]) + "\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(tmp_path))
    assert list(reader.classes) == ["BCC", "MEL", "NV"]
    assert reader.labels.tolist() == [2, 1, 0, 2]
    assert "NV, MEL, BCC are one-hot" in caplog.text


@pytest.mark.parametrize("row", ["0,0", "1,1", "2,0", ",1"])
def test_columns_of_which_a_row_has_another_number_of_ones_are_no_label(
    row: str, tmp_path: Path
) -> None:
    _pictures(tmp_path, ["0.jpg", "1.jpg", "2.jpg"])
    (tmp_path / "train.csv").write_text(f"image,old,male\n0,1,0\n1,0,1\n2,{row}\n")
    with pytest.raises(UsageError, match="no column that is clearly the label"):
        open_reader(str(tmp_path))


@pytest.mark.parametrize("last", ["0,0,1", "0,1,1"])
def test_one_hot_columns_of_a_table_are_told(
    last: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text(f"x,cat,dog,bird\n2,1,0,0\n3,0,1,0\n4,{last}\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/a.csv")
    assert ("cat, dog, bird are one-hot" in caplog.text) == (last == "0,0,1")


def test_row_numbers_of_pandas_are_no_features(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, head in (("a", ""), ("b", "Unnamed: 0")):
        (tmp_path / f"{name}.csv").write_text(f"{head},x,label\n0,2.5,1\n1,3.5,0\n")
        with caplog.at_level(logging.WARNING, "dlio"):
            reader = open_reader(f"{tmp_path}/{name}.csv", columns="*")
        rows = [reader.schema.split(each)["features"] for each in reader.read(np.arange(2))]
        np.testing.assert_array_equal(rows, [[2.5], [3.5]])
        assert f"{name}.csv: row numbers that pandas wrote are left out" in caplog.text


@pytest.mark.parametrize("head", ["", "Unnamed: 0", "__index_level_0__"])
@pytest.mark.parametrize("folder", ["", "images"])
@pytest.mark.parametrize("column", ["species", "grade"])
def test_row_numbers_of_pandas_are_no_labels_of_pictures(
    head: str, folder: str, column: str, tmp_path: Path
) -> None:
    _pictures(tmp_path / folder, ["a.jpg", "b.jpg", "c.jpg"])
    rows = [f"{k},{name}.jpg,{k % 2}" for k, name in enumerate("cab")]
    (tmp_path / "train.csv").write_text("\n".join([f"{head},image,{column}", *rows]) + "\n")
    reader = open_reader(str(tmp_path))
    names = [Path(reader.name(k)).name for k in range(3)]
    assert dict(zip(names, reader.labels.tolist(), strict=True)) == {
        "c.jpg": 0,
        "a.jpg": 1,
        "b.jpg": 0,
    }


@pytest.mark.parametrize("table", ["labels.csv", "train.csv"])
@pytest.mark.parametrize("folder", ["", "images"])
@pytest.mark.parametrize("suffixes", [(".JPG", ".jpg"), (".png", ".PNG"), (".Jpeg", ".jpeg")])
def test_suffixes_may_be_in_other_letters_in_a_table(
    table: str, folder: str, suffixes: tuple[str, str], tmp_path: Path
) -> None:
    _pictures(tmp_path / folder, [f"{k}{suffixes[0]}" for k in range(3)])
    rows = [f"{k}{suffixes[1]},{k % 2}" for k in (2, 0, 1)]
    (tmp_path / table).write_text("\n".join(["image,label", *rows]) + "\n")
    assert open_reader(str(tmp_path)).labels.tolist() == [0, 1, 0]


def test_suffixes_in_other_letters_tell_files_apart(tmp_path: Path) -> None:
    _pictures(tmp_path, ["0.JPG", "0.jpg"])
    (tmp_path / "labels.csv").write_text("image,label\n0.JPG,4\n0.jpg,7\n")
    assert open_reader(str(tmp_path)).labels.tolist() == [4, 7]


@pytest.mark.parametrize("head", ["", "a,b,c\n", "x,y,z\n"])
def test_numbers_of_a_table_are_no_names_of_arrays(head: str, tmp_path: Path) -> None:
    """Features, next to arrays that are numbered as their values are."""
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.full((4, 2), k, np.float32))
    (tmp_path / "labels.csv").write_text(f"{head}0,1,0\n1,0,0\n0,0,1\n1,2,0\n")
    assert open_reader(str(tmp_path)).format == "tables"


@pytest.mark.parametrize(
    "rows", ["0,1\n1,0\n2,1\n", "0.npy,1\n1.npy,0\n2.npy,1\n", "file,kind\n2,1\n0,1\n1,0\n"]
)
def test_numbers_that_name_arrays_are_their_names(rows: str, tmp_path: Path) -> None:
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.full((4, 2), k, np.float32))
    (tmp_path / "labels.csv").write_text(rows)
    reader = open_reader(str(tmp_path))
    assert reader.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        (["00000/00000", "00000/00001", "01000/01000", "01000/01001"], True),
        (["0/1", "0/3", "1/0", "1/2"], False),
        (["00000/00000_00000", "00001/00000_00000"], False),
        (["a/0", "b/1"], False),
    ],
)
def test_pictures_that_are_numbered_on_from_folder_to_folder_are_told(
    names: list[str], is_told: bool, tmp_path: Path
) -> None:
    for name in names:
        _pictures((tmp_path / name).parent, [f"{Path(name).name}.png"])
    doubts = describe(str(tmp_path))["doubts"]
    assert any("numbered on" in doubt for doubt in doubts) == is_told


def test_columns_in_names_of_folders_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / f"label={name}").mkdir()
        feather.write_feather(pa.table({"x": [1.0]}), tmp_path / f"label={name}" / "0.arrow")
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(f"{tmp_path}/*/*.arrow")) == 2
    assert "label=cat and the like are columns in names of folders" in caplog.text


@pytest.mark.parametrize("kind", ["missing", "link", "group", "virtual"])
def test_virtual_data_sets_without_their_parts_are_refused(kind: str, tmp_path: Path) -> None:
    """h5py gives fill values there, or opens other files by a link."""
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones(4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["sound"], file["missing_part/x"] = np.arange(4.0), np.arange(4.0)
        file["link"] = h5py.ExternalLink("other.h5", "/")
        inner = h5py.VirtualLayout((4,), "f8")
        inner[:] = h5py.VirtualSource("other.h5", "x", (4,))
        parts = {"missing": "gone", "link": "link/x", "group": "missing_part"}
        part = {**parts, "virtual": "inner"}[kind]
        file.create_virtual_dataset("inner", inner)
        for name, source in (("good", "sound"), ("bad", part)):
            layout = h5py.VirtualLayout((4,), "f8")
            layout[:] = h5py.VirtualSource(".", source, (4,))
            file.create_virtual_dataset(name, layout)
    reader = open_reader(f"{tmp_path}/a.h5::good")
    rows = [reader.schema.split(each)["good"] for each in reader.read(np.arange(4))]
    assert rows == [0, 1, 2, 3]
    reader.close()
    with pytest.raises(SourceError, match="not a data set in the same file"):
        open_reader(f"{tmp_path}/a.h5::bad")


@pytest.mark.parametrize("form", ["nc", "zarr"])
def test_scales_that_are_not_applied_are_told(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{tmp_path}/a.{form}"
    store: Any = h5py.File(path, "w") if form == "nc" else zarr.open_group(path, mode="w")
    for name in ("x", "y"):
        store.create_dataset(name, data=np.arange(3), shape=(3,)) if form == "nc" else (
            store.create_array(name, data=np.arange(3))
        )
    store["x"].attrs.update({"scale_factor": 0.5, "add_offset": 7.0})
    if form == "nc":
        store.close()
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(path).close()
    assert f"{path}::x has add_offset and scale_factor" in caplog.text
    assert f"{path}::y" not in caplog.text


def test_the_second_array_of_savez_may_be_the_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "a.npz", np.zeros((3, 2)), np.arange(3))
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/a.npz")
    assert "if arr_1 is it, choose it, such as label='arr_1'" in caplog.text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["train_0.png", "train_1.png", "test_0.png"], "the splits test (1), train (2)"),
        (["0.jpg", "0.png", "1.jpg", "1.png"], "2 files (0.png, 1.png) may be masks"),
        (["0.jpg", "1.jpg", "1.png"], ""),
        (["train_0.png", "test_0.png", "bus.png"], ""),
    ],
)
def test_names_of_pictures_in_one_folder_that_may_say_more_are_told(
    names: list[str], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path, names)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path))) == len(names)
    assert words in caplog.text if words else not caplog.records


def test_a_table_of_labels_may_have_no_header(tmp_path: Path) -> None:
    _pictures(tmp_path, ["0.png", "1.png", "2.png"])
    (tmp_path / "labels.csv").write_text("0.png,2\n1.png,0\n2.png,1\n")
    assert open_reader(str(tmp_path)).labels.tolist() == [2, 0, 1]
    (tmp_path / "labels.csv").write_text("0.png,2\n1.png,0\n")
    with pytest.raises(SourceError, match=r"labels\.csv: it has no label for 1 image \['2.png'\]"):
        open_reader(str(tmp_path))


@pytest.mark.parametrize("masks", ["annots", "truth"])
@pytest.mark.parametrize("last", ["1.png", "2.png"])
def test_pictures_and_masks_in_folders_of_any_name_are_told(
    masks: str, last: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "imgs", ["0.png", "1.png"])
    _pictures(tmp_path / masks, ["0.png", last])
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path)).classes) == 2
    remedy = f"format='masks', images='imgs', masks='{masks}' reads them so"
    assert (remedy in caplog.text) == (last == "1.png")


def test_a_file_beside_a_lone_folder_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "images", ["0.png", "1.png", "2.png"])
    (tmp_path / "captions.txt").write_text("0.png,hello\n1.png,you\n2.png,x\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path))
    assert caplog.text.count("captions.txt") == 1
    assert "folders' names" not in caplog.text


def test_a_table_next_to_class_folders_is_left_out_where_the_folders_are_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cat", "dog"):
        _pictures(tmp_path / name, ["0.png"])
    (tmp_path / "labels.csv").write_text("file_name,label\ncat/0.png,black\n")
    with pytest.raises(SourceError, match=r"no label for 1 image.*or choose layout='classes'"):
        open_reader(str(tmp_path))
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(tmp_path), layout="classes")
    assert list(reader.classes) == ["cat", "dog"]
    assert "labels.csv, as layout='classes' takes the folders' names" in caplog.text


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_labels_in_attributes_are_told(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"a.{suffix}"
    store: Any = h5py.File(path, "w") if suffix == "h5" else zarr.open_group(str(path), mode="w")
    made = store.create_dataset if suffix == "h5" else store.create_array
    made("images", data=np.ones((4, 3), np.uint8))
    made("plain", data=np.ones((4, 3), np.uint8))
    store["images"].attrs["labels"] = [0, 1, 0, 1]
    store.attrs["target"] = [0, 1, 0, 1]
    store["plain"].attrs["CLASS"] = "IMAGE"
    if suffix == "h5":
        store.close()
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(path)).close()
    assert "::images has an attribute labels, and attributes are not read" in caplog.text
    assert f"{path.name} has an attribute target" in caplog.text
    assert "::plain has" not in caplog.text


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (("LR", "HR"), "as two pictures of each sample do"),
        (("bounding_box_train", "query"), "bounding_box_train says a split by its name"),
        (("train_images", "query"), "train_images says a split by its name"),
        (("face", "mask"), "as pictures and their masks do"),
        (("photos", "truth", "edges"), "as pictures and their masks do"),
        (("trainA", "trainB", "testA", "testB"), "as of CycleGAN"),
        (("train_a", "train_b"), ""),
        (("trainA", "testB", "bus"), ""),
        (("cat", "dog"), ""),
        (("low", "medium", "high"), ""),
        (("test_tube", "beaker"), ""),
        (("train_station", "test_lab"), ""),
        (("freight_train", "steam_train", "bus"), ""),
        (("mask", "no_mask"), ""),
        (("images", "paintings", "drawings"), ""),
        (("barcode", "label", "stamp"), ""),
    ],
)
def test_folders_that_may_be_no_classes_are_told(
    folders: tuple[str, str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in folders:
        _pictures(tmp_path / folder, ["0.png", "1.png", "2.png"])
    with caplog.at_level(logging.WARNING, "dlio"):
        assert list(open_reader(str(tmp_path)).classes) == sorted(folders)
    assert told in caplog.text
    assert len(caplog.records) == bool(told)


@pytest.mark.parametrize(
    ("folder", "end", "is_told"),
    [("LabeledApproved_full", "_L", True), ("truth", "_xyz", True), ("dogs", "_L", False)],
)
def test_a_folder_called_as_masks_with_the_names_of_another_is_told(
    folder: str, end: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "701_StillsRaw_full", ["0006R0_1.png", "0006R0_2.png"])
    _pictures(tmp_path / folder, [f"0006R0_{k}{end}.png" for k in (1, 2)])
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path)).close()
    assert (f"masks='{folder}' reads them so" in caplog.text) == is_told


def test_class_folders_of_files_named_otherwise_are_no_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "low", ["17.png", "31.png"])
    _pictures(tmp_path / "high", ["20.png", "44.png"])
    with caplog.at_level(logging.WARNING, "dlio"):
        assert list(open_reader(str(tmp_path)).classes) == ["high", "low"]
    assert not caplog.text


def _split_folders(root: Path) -> None:
    for name in ("n01", "n02"):
        (root / "train" / name).mkdir(parents=True)
        for k in range(2):
            (root / "train" / name / f"{k}.png").write_bytes(b"\x89PNG")
    (root / "val").mkdir()
    for k in range(4):
        (root / "val" / f"v{k}.png").write_bytes(b"\x89PNG")


@pytest.mark.parametrize(
    ("texts", "classes"), [(["0", "1"], ["0", "1"]), (["n01", "n02"], ["n01", "n02"])]
)
def test_class_folders_of_a_split_are_labels_where_a_list_labels_another_split(
    texts: list[str], classes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _split_folders(tmp_path)
    (tmp_path / "val.txt").write_text("".join(f"v{k}.png {texts[k % 2]}\n" for k in range(4)))
    with caplog.at_level(logging.WARNING, "dlio"):
        train = open_reader(str(tmp_path), split="train")
        val = open_reader(str(tmp_path), split="val")
    assert (list(train.classes), train.labels.tolist()) == (["n01", "n02"], [0, 0, 1, 1])
    assert (list(val.classes), val.labels.tolist()) == (classes, [0, 1, 0, 1])
    differ = texts != classes or classes[0] == "0"
    assert ("labels of train are its folders" in caplog.text) == differ
    if differ:
        with pytest.raises(UsageError, match=r"labels of train are folders, and others"):
            open_reader(str(tmp_path), split="all")
    else:
        assert open_reader(str(tmp_path), split="all").labels.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]


def test_pictures_of_a_column_that_are_paths_alone_are_named(tmp_path: Path) -> None:
    image = pa.array([{"bytes": None, "path": "imgs/0.png"}])
    pq.write_table(pa.table({"image": image, "label": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="its column 'image' has paths of files and no bytes"):
        open_reader(str(tmp_path / "a.parquet"))


def test_a_text_of_the_classes_is_not_told_as_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("ant", "bee"):
        _pictures(tmp_path / folder, ["0.png", "1.png"])
    (tmp_path / "labels.txt").write_text("bee\nant\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path)).close()
        assert not caplog.text
        (tmp_path / "labels.txt").write_text("bee\nwasp\n")
        open_reader(str(tmp_path)).close()
    assert "1 file (labels.txt), which may hold labels" in caplog.text


def test_class_folders_of_negative_numbers_are_not_called_fractions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("-1", "0", "1"):
        _pictures(tmp_path / folder, ["0.png", "1.png"])
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path)).close()
    assert "fractions" not in caplog.text


def test_doubts_are_told_in_one_place_of_dlio_ls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "tumor", ["a.png", "b.png"])
    with caplog.at_level(logging.WARNING, "dlio"):
        (doubt,) = describe(str(tmp_path))["doubts"]
        assert doubt.startswith("tumor is the only class, so all labels are 0")
        assert not caplog.text
        open_reader(str(tmp_path)).close()
    assert doubt in caplog.text


@pytest.mark.parametrize("other", ["", "meta.pkl", "input.txt"])
def test_files_of_tokens_in_a_folder_are_named(other: str, tmp_path: Path) -> None:
    for name in filter(None, ("train.bin", "val.bin", other)):
        (tmp_path / name).write_bytes(b"\0" * 64)
    words = r"2 files \(train.bin, val.bin\) of tokens, .* open .*/train.bin, or several by a list"
    with pytest.raises(UsageError, match=words):
        open_reader(str(tmp_path))
