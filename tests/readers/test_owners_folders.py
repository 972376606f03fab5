"""Folders as their owners have them: each is read with its labels, or what may be meant is told.

`dlio verify` and `dlio pack` count the samples that `dlio.open` has.
"""

import contextlib
import io
import json
import logging
import unicodedata
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import dlio
from dlio.data.reader import open_reader
from dlio.errors import DecodeError, SourceError, UsageError
from dlio.util import printable
from dlio.util.limits import LFS_POINTER
from dlio.util.settings import REHEARSAL
from dlio_readers.folder_doubts import masks_among, name_labels, parts_of_cases
from dlio_staging.pack_folder import pack
from dlio_staging.verify import verify
from tests.readers.tar_members import write_tar_of

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")  # Each new file is read by a child process otherwise.
    monkeypatch.setattr(printable, "_told", set())


class _Owned(NamedTuple):
    """A folder, and how it is read."""

    pictures: str
    """Names, separated by spaces."""
    texts: Mapping[str, str] = MappingProxyType({})
    labels: Sequence[int] = ()
    classes: Sequence[str] = ()
    warning: str = ""
    """Part of a warning; "" for a folder that is read without any."""
    options: Mapping[str, Any] = MappingProxyType({})


NAMED = {
    "dogs and cats": _Owned("cat.0.jpg cat.1.jpg dog.0.jpg dog.1.jpg", warning="(cat, dog), which"),
    "pets": _Owned("a_b_1.jpg a_b_2.jpg c_1.jpg c_2.jpg", warning="(a_b, c), which layout='names'"),
    "digits": _Owned("0_1.png 0_2.png 7_1.png 7_2.png", warning="(0, 7), which"),
    "cat.0 read": _Owned(
        "cat.0.jpg cat.1.jpg dog.0.jpg dog.1.jpg",
        labels=[0, 0, 1, 1],
        classes=["cat", "dog"],
        options={"layout": "names"},
    ),
    "digits read": _Owned(
        "0_1.png 0_2.png 2_1.png 2_2.png",
        labels=[0, 0, 2, 2],
        classes=["0", "1", "2"],
        options={"layout": "names"},
    ),
    "camera": _Owned("IMG_0001.jpg IMG_0002.jpg DSC_0001.jpg DSC_0002.jpg"),
    "ages": _Owned("25_0_1_2017.jpg 30_0_1_2017.jpg 41_1_2_2017.jpg"),
    "one kind": _Owned("ISIC_001.jpg ISIC_002.jpg ISIC_003.jpg"),
}
CLASSES = {
    "case": _Owned("a/0.PNG a/1.JPG b/0.PNG b/1.JPG", labels=[0, 0, 1, 1], classes=["a", "b"]),
    "labels.csv in a class": _Owned(
        "a/0.png b/0.png",
        {"a/labels.csv": "file,label\n0.png,3\n"},
        [0, 1],
        ["a", "b"],
        "1 file (a/labels.csv) in class folders",
    ),
    "metadata in classes": _Owned(
        "a/0.png b/0.png",
        {"a/metadata.csv": "file_name,text\n0.png,x\n", "b/metadata.csv": "file_name,text\n"},
        [0, 1],
        ["a", "b"],
        "2 files (a/metadata.csv, b/metadata.csv)",
    ),
    "labelme": _Owned("a/0.png b/0.png", {"a/0.json": "{}"}, [0, 1], ["a", "b"], "(a/0.json)"),
    "traffic signs": _Owned(
        "0/0.ppm 1/0.ppm",
        {"0/GT-0.csv": "Filename;ClassId\n0.ppm;0\n"},
        [0, 1],
        ["0", "1"],
        "(0/GT-0.csv) in class folders",
    ),
    "order of a framework": _Owned(
        "a/0.png b/0.png",
        {"labels_to_idx.json": '{"a": 1, "b": 0}'},
        [0, 1],
        ["a", "b"],
        "(labels_to_idx.json), which may hold labels: folders' names are taken",
    ),
    "synsets": _Owned("n1/0.png n2/0.png", {"synsets.txt": "n1 a\n"}, [0, 1], ["n1", "n2"]),
    "numbers": _Owned(
        "0/0.png 1/0.png 10/0.png 2/0.png",
        labels=[0, 1, 2, 3],
        classes=["0", "1", "10", "2"],
        warning="label 2 is folder 10",
    ),
    "letters": _Owned(
        "Cat/0.png cat/0.png dog/0.png",
        labels=[0, 1, 2],
        classes=["Cat", "cat", "dog"],
        warning="Cat and cat are two classes, and differ only in case",
    ),
    "domains": _Owned(
        "am/images/cup/0.png am/images/pen/0.png dslr/images/cup/0.png dslr/images/pen/0.png",
        labels=[0, 0, 1, 1],
        classes=["am", "dslr"],
        warning="each of these folders holds the folders cup, pen, as cases do",
    ),
    "packed twice": _Owned(
        "P/a/0.png P/b/0.png a/0.png b/0.png",
        labels=[0, 0, 1, 2],
        classes=["P", "a", "b"],
        warning="P is a class that holds folders called a and b",
    ),
    "cases": _Owned(
        "p1/image.png p1/mask.png p2/image.png p2/mask.png",
        labels=[0, 0, 1, 1],
        classes=["p1", "p2"],
        warning="each of these folders holds image, mask, as cases do",
    ),
    "slices": _Owned(
        "A/A_1.tif A/A_1_mask.tif B/B_1.tif B/B_1_mask.tif B/B_2.tif B/B_2_mask.tif",
        labels=[0, 0, 1, 1, 1, 1],
        classes=["A", "B"],
        warning="3 files (A/A_1_mask.tif, B/B_1_mask.tif, B/B_2_mask.tif) may be masks",
    ),
    "nuclei": _Owned(
        "a/images/a.png a/masks/1.png b/images/b.png b/masks/1.png",
        labels=[0, 0, 1, 1],
        classes=["a", "b"],
        warning="each of these folders holds the folders images, masks",
    ),
    "faces of one list": _Owned(
        "celeba/000001.jpg celeba/000002.jpg",
        {"list_attr.txt": "2\nMale Young\n000001.jpg -1  1\n000002.jpg  1  1\n"},
        [0, 0],
        ["celeba"],
        "(list_attr.txt), which may hold labels",
    ),
    "one folder": _Owned(
        "obj/0.jpg obj/1.jpg", labels=[0, 0], classes=["obj"], warning="so all labels are 0"
    ),
    "same numbers": _Owned("a/0.png a/1.png b/0.png b/1.png", {}, [0, 0, 1, 1], ["a", "b"]),
}
TABLES = {
    "mark and CRLF": _Owned(
        "a.png b.png",
        {"labels.csv": "\ufefffile_name,label\r\na.png,y\r\nb.png,x\r\n\r\n"},
        [1, 0],
        ["x", "y"],
    ),
    "zeros": _Owned(
        "a.png b.png", {"labels.csv": "file,label\na.png,001\nb.png,002\n"}, [1, 2], list("012")
    ),
    "below 0": _Owned("a.png b.png", {"labels.csv": "file,label\na.png,-1\nb.png,1\n"}, [-1, 1]),
    "backslashes": _Owned(
        "im/a.png im/b.png",
        {"labels.csv": "file_name,label\nim\\a.png,y\nim\\b.png,x\n"},
        [1, 0],
        ["x", "y"],
    ),
    "backslashes in a list": _Owned(
        "im/a.png im/b.png",
        {"data.csv": "path,label\nim\\a.png,y\nim\\b.png,x\n"},
        [1, 0],
        ["x", "y"],
    ),
    "accents": _Owned(
        unicodedata.normalize("NFD", "é.png"), {"labels.csv": "file,label\né.png,1\n"}, [1], "01"
    ),
    "two tables": _Owned(
        "a.png b.png",
        {"labels.csv": "file,label\na.png,1\nb.png,0\n", "labels.json": "{}"},
        [1, 0],
        ["0", "1"],
        "1 file (labels.json), since labels.csv is read",
    ),
    "parts of a download": _Owned(
        "part_1/a.jpg part_1/b.jpg part_2/c.jpg",
        {"meta.csv": "id,dx,age\na,nv,1\nb,mel,2\nc,nv,3\n"},
        [1, 0, 1],
        ["mel", "nv"],
        options={"table": "meta.csv", "label": "dx"},
    ),
    "boxes": _Owned(
        "a.png b.png",
        {"_annotations.csv": "filename,class,xmin,ymin\na.png,x,1,1\nb.png,y,1,1\n"},
        [0, 1],
        ["x", "y"],
        "its boxes (xmin, ymin) are left out",
    ),
    "masks next to pictures": _Owned(
        "a.jpg b.jpg a_mask.png b_mask.png", warning="2 files (a_mask.png, b_mask.png) may be masks"
    ),
    "truth above": _Owned(
        "val/a.png val/b.png",
        {"ground_truth.txt": "3\n1\n"},
        warning="1 file (ground_truth.txt) in ",
    ),
}
CASES = {**NAMED, **CLASSES, **TABLES}


def _made(case: _Owned, root: Path) -> None:
    for name in case.pictures.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (9, 9, 9)).save(root / name)
    for name, text in case.texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_folder_is_read_or_what_it_may_mean_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, root = CASES[name], tmp_path / "data"
    _made(case, root)
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(str(root), **case.options)
    count = len(reader)
    labels = list(case.labels) or [0] * count
    assert (list(reader.classes), reader.labels.tolist()) == (list(case.classes), labels)
    reader.close()
    # A lone folder that is read, and a lone split, are told as well.
    texts = [text for text in caplog.messages if "alone" not in text]
    assert case.warning in " ".join(texts)
    assert bool(case.warning) == bool(texts), texts
    assert verify(str(root), **case.options).samples == count
    with contextlib.closing(open_reader(str(root), **case.options)) as source:
        pack(source, str(tmp_path / "packed"))
    packed = open_reader(str(tmp_path / "packed"))
    assert sorted(packed.labels.tolist()) == sorted(labels)
    packed.close()


def test_names_that_are_no_labels_are_refused_as_such(tmp_path: Path) -> None:
    _made(_Owned("a.png b.png"), tmp_path)
    with pytest.raises(UsageError, match=r"layout=.names.: .*are not labels and numbers"):
        open_reader(str(tmp_path), layout="names")


@pytest.mark.parametrize(
    ("stems", "labels"),
    [
        (["cat.0", "cat.1", "dog.2", "dog.3"], ["cat", "dog"]),
        (["a (1)", "a (2)", "b (1)", "b (2)"], ["a", "b"]),
        (["a1", "a2", "b1", "b2"], ["a", "b"]),
        (["a1", "b1", "c1"], []),
        (["0001", "0002", "0003", "0004"], []),
        (["img_1", "img_2", "dsc_1", "dsc_2"], []),
        (["a1", "a2", "b1", "b2", "cover"], []),
        ([], []),
    ],
)
def test_labels_in_names_are_told_from_numbers(stems: list[str], labels: list[str]) -> None:
    assert sorted(set(name_labels(stems).values())) == labels


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        ({"p1": ["p1_t1", "p1_seg"], "p2": ["p2_t1", "p2_seg"]}, ("seg", "t1")),
        ({"p1": ["t1", "t2"], "p2": ["t1", "t2"], "p3": ["t1"]}, ("t1", "t2")),
        ({"p1": ["x-t1", "x-t2"], "p2": ["y-t1", "y-t2"]}, ("t1", "t2")),
        ({"a": ["0", "1"], "b": ["0", "1"]}, ()),
        ({"a": ["a_0", "a_1"], "b": ["b_0", "b_1"]}, ()),
        ({"a": ["IM0001", "IM0002"], "b": ["IM0001", "IM0002"]}, ()),
        ({"a": ["x"], "b": ["x"]}, ()),
        ({"a": ["x", "y"], "b": ["z", "w"]}, ()),
        ({"a": ["x", "y"]}, ()),
        ({}, ()),
    ],
)
def test_cases_are_told_from_classes(folders: dict[str, list[str]], parts: tuple[str, ...]) -> None:
    assert parts_of_cases(folders) == parts


def test_masks_are_known_by_the_names_of_their_pictures() -> None:
    assert masks_among(["a.png", "a_mask.png", "b-seg.tif", "c.nii.gz", "c_seg.nii.gz"]) == [
        "a_mask.png",
        "c_seg.nii.gz",
    ]


@pytest.mark.parametrize(
    ("pictures", "masks", "end"),
    [
        ("img", "gt", "_gt"),
        ("photos", "Ground Truth", ""),
        ("Original", "truth", "-mask"),
        ("a", "segmentations", "_segmentation"),
    ],
)
def test_masks_in_a_class_folder_are_told_with_the_remedy(
    pictures: str, masks: str, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(20):
        for folder, name in ((pictures, f"{k:04}.png"), (masks, f"{k:04}{end}.png")):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("L", (4, 4), 1).save(tmp_path / folder / name)
    assert len(open_reader(str(tmp_path))) == 40
    assert f"format='masks', images={pictures!r}, masks={masks!r} reads them so" in caplog.text
    made = open_reader(str(tmp_path), format="masks", images=pictures, masks=masks)
    assert (made.format, len(made)) == ("masks", 20)


def test_classes_of_the_same_names_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, start in (("cats", ""), ("dogs", ""), ("gtr", "x_")):
        (tmp_path / folder).mkdir()
        for k in range(20):
            Image.new("L", (4, 4), 1).save(tmp_path / folder / f"{start}{k:04}.png")
    assert len(open_reader(str(tmp_path)).classes) == 3
    assert "format='masks'" not in caplog.text


# One case a folder


def _scans(root: Path, parts: Sequence[str], cases: Sequence[str] = ("p1", "p2", "p3")) -> None:
    for at, case in enumerate(cases):
        (root / case).mkdir(parents=True)
        for number, part in enumerate(parts):
            np.save(root / case / f"{case}_{part}.npy", np.full((2, 3 + at), number, np.int16))


def test_folders_of_cases_are_samples_with_a_field_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "data"
    _scans(root, ["flair", "seg", "t1"])
    with (
        caplog.at_level(logging.WARNING, "dlio"),
        dlio.open(root, tiers="none") as data,
    ):
        for at in range(3):
            sample = data[at]
            assert {name: int(sample[name].max()) for name in sample} == {
                "flair": 0,
                "seg": 1,
                "t1": 2,
            }
            assert sample["t1"].shape == (2, 3 + at)
        assert list(data.classes) == []
    assert "cases of 3 files (flair, seg, t1), one a folder; layout='classes'" in caplog.text
    assert verify(str(root)).samples == 3
    pack(str(root), str(tmp_path / "packed"))
    with dlio.open(root, tiers="none", layout="classes") as data:
        assert list(data.classes) == ["p1", "p2", "p3"]
        assert list(data.targets) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with dlio.open(root, tiers="none", patch=(2, 2), patches_per_volume=2) as data:
        assert data[0]["seg"].shape == (2, 2)


def test_a_case_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    _scans(tmp_path, ["flair", "seg"])
    (tmp_path / "p2" / "p2_seg.npy").rename(tmp_path / "p2" / "W39_segm.npy")
    with pytest.raises(SourceError, match=r"p2 is a case without flair, seg for 2 files"):
        open_reader(str(tmp_path))


def test_classes_of_arrays_stay_classes(tmp_path: Path) -> None:
    _scans(tmp_path, ["0", "1"], ("no", "yes"))
    reader = open_reader(str(tmp_path))
    assert (list(reader.classes), reader.labels.tolist()) == (["no", "yes"], [0, 0, 1, 1])
    reader.close()
    with pytest.raises(UsageError, match="layout='cases': the folders of"):
        open_reader(str(tmp_path), layout="cases")


# Splits with classes of their own


@pytest.mark.parametrize("form", ["csv", "parquet", "folders"])
@pytest.mark.parametrize("agree", [False, True])
def test_splits_of_other_classes_are_told(
    form: str, agree: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split, classes in (("train", "abc"), ("test", "abc" if agree else "bc")):
        if form == "folders":
            _made(_Owned(" ".join(f"{split}/{name}/0.png" for name in classes)), tmp_path)
        elif form == "csv":
            text = "".join(f"1,{name}\n" for name in classes)
            (tmp_path / f"{split}.csv").write_text("x,label\n" + text)
        else:
            table = pa.table({"x": list(range(len(classes))), "label": list(classes)})
            pq.write_table(table, tmp_path / f"{split}.parquet")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path), split="test").close()
    words = "its classes are not those of split train (such as a)"
    assert (words in caplog.text) != agree
    assert bool(caplog.text) != agree


# Tables of text


@pytest.mark.parametrize(
    ("text", "kinds", "told"),
    [
        ("sep=;\na;label\n1;y\n2;x\n", {"a": "int64", "label": "int64"}, ""),
        ("a,label\n1,x\n2,x\n3,x\n?,x\n", {"a": "text", "label": "int64"}, "a ('?')"),
        ("a,label\n10%,x\n20%,x\n", {"a": "text", "label": "int64"}, "a ('10%')"),
        ("a,label\n$1,x\n$2.50,x\n", {"a": "text", "label": "int64"}, "a ('$1')"),
        ("a,label\n1 2 3,x\n4 5 6,x\n", {"a": "text", "label": "int64"}, ""),
        ("a,label\n1 234,x\n5 678,x\n", {"a": "text", "label": "int64"}, "without signs"),
        (
            'a,label\n"1,234",x\n"5,678",x\n',
            {"a": "text", "label": "int64"},
            "numbers with commas, such as 1,234 are read as text, in its columns a: write "
            "decimals with points, and thousands without a sign",
        ),
        ("a;label\n1,5;x\n5,678;x\n", {"a": "text", "label": "int64"}, "with decimal commas are"),
        ("a,label\nx1,x\nx2,x\n3,x\n", {"a": "text", "label": "int64"}, ""),
        ("a,label\r1,y\r2,x\r", {"a": "int64", "label": "int64"}, ""),
        ("a,label\r\n1,y\n2,x\r\n3,y", {"a": "int64", "label": "int64"}, ""),
        ('a,label\n"l1\nl2",x\n"l ""q"" 2",y\n', {"a": "text", "label": "int64"}, ""),
    ],
)
def test_columns_that_are_mostly_numbers_are_told(
    text: str, kinds: dict[str, str], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.csv").write_bytes(text.encode())
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(f"{tmp_path}/x.csv")
    assert dict(reader.schema.fields) == kinds
    reader.close()
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


def test_a_column_that_becomes_text_later_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "".join(f"{k},x\n" for k in range(200_000))
    (tmp_path / "x.csv").write_text("a,label\n" + rows + "n.n.,x\n")
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/x.csv").close()
    assert "a ('n.n.')" in caplog.text


# Files that stand for others


@pytest.mark.parametrize("suffix", ["csv", "npz", "npy", "h5", "tar", "parquet", "arrow"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_pointers_of_git_lfs_are_named(suffix: str, in_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(POINTER)
    with pytest.raises(SourceError, match=f"a.{suffix} {LFS_POINTER}"):
        open_reader(str(tmp_path if in_folder else path))


def test_a_picture_that_is_a_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_text(POINTER)
    with (
        dlio.open(tmp_path, tiers="none", image_size=None) as data,
        pytest.raises(DecodeError, match=f"0.png {LFS_POINTER}"),
    ):
        data[0]


def test_class_folders_in_a_zip_are_read(tmp_path: Path) -> None:
    _made(_Owned("a/0.png b/0.png b/c/1.png"), tmp_path)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("a/0.png", "b/0.png", "b/c/1.png"):
            archive.write(tmp_path / name, name)
    with dlio.open(f"zip://::{tmp_path}/x.zip", tiers="none", image_size=None) as data:
        assert (list(data.classes), list(data.targets)) == (["a", "b"], [0, 1, 1])
        assert data[2]["image"].shape == (3, 6, 8)


def test_annotations_without_boxes_are_named_for_what_they_are(tmp_path: Path) -> None:
    _made(_Owned("train/0.jpg"), tmp_path)
    whole = {
        "images": [{"id": 0, "file_name": "train/0.jpg", "width": 8, "height": 6}],
        "annotations": [{"id": 0, "image_id": 0, "category_id": 1}],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "train.json").write_text(json.dumps(whole))
    with pytest.raises(SourceError, match="it has no bbox: if these name classes of whole"):
        open_reader(f"{tmp_path}/train.json")


def test_boxes_of_pascal_voc_without_their_pictures_are_named(tmp_path: Path) -> None:
    _made(_Owned("Pictures/0.jpg"), tmp_path)
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "0.xml").write_text("<annotation/>")
    with pytest.raises(SourceError, match="it holds XML, such as Pascal VOC's boxes"):
        open_reader(str(tmp_path))


# Columns and members


def test_files_of_one_data_set_may_order_their_columns_otherwise(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "label": [0]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"label": [1], "x": [2]}), tmp_path / "1.parquet")
    with dlio.open(tmp_path, tiers="none") as data:
        assert [(int(data[k]["x"]), int(data[k]["label"])) for k in range(2)] == [(1, 0), (2, 1)]
    pq.write_table(pa.table({"label": [1], "x": [2.5], "z": [3]}), tmp_path / "1.parquet")
    with pytest.raises(SourceError, match="x is double in it, and int64 there; make them alike"):
        open_reader(str(tmp_path))
    reader = open_reader(f"{tmp_path}::label")
    assert reader.labels.tolist() == [0, 1]
    reader.close()


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="has several columns 'x': give each a name of its own"):
        open_reader(f"{tmp_path}/a.parquet")


def test_a_second_array_in_a_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        np.save(file, np.arange(4))
        np.save(file, np.arange(5))
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(f"{tmp_path}/a.npy")) == 4
    assert "168 bytes behind its array left out" in caplog.text


def test_labels_in_a_tar_may_begin_with_the_mark_of_utf_8(tmp_path: Path) -> None:
    write_tar_of(
        tmp_path / "a.tar",
        {"0.txt": b"a", "0.cls": b"0\r\n", "1.txt": b"b", "1.cls": b"\xef\xbb\xbf1"},
    )
    reader = open_reader(f"{tmp_path}/a.tar")
    assert (list(reader.classes), reader.labels.tolist()) == ([], [0, 1])
    reader.close()


def test_a_tar_of_tars_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar_of(tmp_path / "n01.tar", {"0.txt": b"a"})
    body = (tmp_path / "n01.tar").read_bytes()
    write_tar_of(tmp_path / "a.tar", {"n01.tar": body, "n02.tar": body})
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(f"{tmp_path}/a.tar").close()
    assert "its members are tars themselves: extract it" in caplog.text


# Boxes and masks


def test_labels_without_their_pictures_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = "0 .5 .5 .2 .2\n"
    texts = {"labels/a.txt": box, "labels/b.txt": box, "labels/classes.txt": "cat\n"}
    _made(_Owned("images/a.png", texts), tmp_path)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path))) == 1
    assert "1 file (labels/b.txt) left out: images has no picture of the name" in caplog.text


def test_a_folder_of_masks_next_to_a_split_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _made(_Owned("train/a.png train_labels/a_L.png val/b.png val_labels/b_L.png"), tmp_path)
    with caplog.at_level(logging.WARNING, "dlio"):
        assert len(open_reader(str(tmp_path), split="train")) == 1
    assert "train_labels holds files named as those of train" in caplog.text
    assert "val_labels" not in caplog.text
    with dlio.open(
        tmp_path,
        format="masks",
        images="train",
        masks="train_labels",
        tiers="none",
        image_size=None,
    ) as data:
        assert data[0][1].shape == (6, 8)


def test_annotations_of_another_kind_next_to_pictures_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '{"images": [{"id": 1, "file_name": "1.png"}], "annotations": [{"caption": "x"}]}'
    _made(_Owned("val/1.png", {"annotations/captions_val.json": text}), tmp_path)
    with caplog.at_level(logging.WARNING, "dlio"):
        open_reader(str(tmp_path)).close()
    assert "1 file (annotations/captions_val.json)" in caplog.text


def test_names_in_annotations_may_have_backslashes(tmp_path: Path) -> None:
    _made(_Owned("images/1.png"), tmp_path)
    whole = {
        "images": [{"id": 1, "file_name": "images\\1.png", "width": 8, "height": 6}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 3, 3]}],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "result.json").write_text(json.dumps(whole))
    reader = open_reader(f"{tmp_path}/result.json")
    assert reader.name(0) == "images/1.png"
    reader.close()


def test_a_jpeg_of_12_bits_is_named_for_what_it_is(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), (9, 99, 200)).save(stream, "JPEG")
    data = stream.getvalue().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc1\x00\x11\x0c")
    (tmp_path / "a.jpg").write_bytes(data)
    with (
        dlio.open(tmp_path, tiers="none", image_size=None) as opened,
        pytest.raises(DecodeError, match="is a JPEG of 12 bits a colour, which dlio does not"),
    ):
        opened[0]
