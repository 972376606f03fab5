"""Pascal VOC as people have it, with ElementTree as the judge of its XML files."""

import os
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import dlio
from dlio.data.reader import Reader, open_reader
from dlio.data.schema import Value
from dlio.errors import SourceError, UsageError
from dlio.image.segmentation_masks import draw_instance, run_lengths
from dlio.testing import ReaderTests
from dlio.util import printable
from tests.conftest import examples
from tests.loader.targets_data import Box, drawn, painted, write

ROWS = drawn(3, 9, boxes=2)
NAMES = ("dog", "cat", "person")
Fields = dict[str, Any]


def one(name: str, box: Sequence[float | str], more: str = "") -> str:
    """Return an object; the box has the numbers of the file."""
    edges = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{edge}>{number}</{edge}>" for edge, number in edges)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


def note(height: int, width: int, *objects: str) -> str:
    """Return an XML file."""
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation>\n<folder>x</folder>{size}\n{''.join(objects)}</annotation>\n"


def write_voc(root: Path, rows: Sequence[tuple[int, int, list[Box]]], shift: int = 0) -> None:
    """Write a data set of Pascal VOC, of which every third picture is of `val`."""
    ids = [f"2007_{k:06d}" for k in range(len(rows))]
    for k, (height, width, boxes) in enumerate(rows):
        write(root / "JPEGImages" / f"{ids[k]}.png", painted(height, width, boxes))
        objects = [
            one(
                NAMES[(k + n + shift) % 3],
                (left + 1, top + 1, right, bottom),
                f"<pose>Left</pose><truncated>{n % 2}</truncated><difficult>{k % 2}</difficult>",
            )
            for n, (left, top, right, bottom) in enumerate(boxes)
        ]
        _text(root / "Annotations" / f"{ids[k]}.xml", note(height, width, *objects))
    lists = {"train": [k for k in ids if int(k[5:]) % 3], "val": ids[::3], "trainval": ids}
    for name, own in lists.items():
        _text(root / "ImageSets" / "Main" / f"{name}.txt", "\n".join(own) + "\n")
        marked = "".join(f"{each} {-1 if k % 2 else 1:2d}\n" for k, each in enumerate(own))
        _text(root / "ImageSets" / "Main" / f"dog_{name}.txt", marked)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def judge(path: Path) -> list[Fields]:
    """Return the objects of a file, as ElementTree reads them: boxes from 0, as edges."""
    made = []
    for each in ET.parse(path).getroot().findall("object"):
        box = [float(each.findtext(f"bndbox/{k}", "")) for k in ("xmin", "ymin", "xmax", "ymax")]
        flags = {f: int(each.findtext(f, "0")) for f in ("difficult", "truncated")}
        edges = [box[0] - 1, box[1] - 1, box[2], box[3]]
        made.append({"name": each.findtext("name", "").strip(), "box": edges, **flags})
    return made


def fields(reader: Reader, sample: int) -> Fields:
    """Return the fields of a sample."""
    (payload,) = reader.read(np.array([sample]))
    return dict(reader.schema.split(payload))


def objects_of(reader: Reader, sample: int) -> list[Fields]:
    """Return the objects of a sample as `judge` does."""
    own = fields(reader, sample)
    return [
        {
            "name": reader.classes[own["box_labels"][k]],
            "box": own["boxes"][k].tolist(),
            "difficult": own["box_difficult"][k],
            "truncated": own["box_truncated"][k],
        }
        for k in range(len(own["boxes"]))
    ]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


class TestVoc(ReaderTests):
    def make(self, folder: Path) -> Reader:
        if not (folder / "data").exists():
            write_voc(folder / "data", ROWS)
        return open_reader(str(folder / "data"), split="trainval")

    def change(self, folder: Path) -> None:
        write_voc(folder / "data", ROWS, 1)
        later = time.time() + 5  # The file system's clock may be coarse.
        for path in (folder / "data").rglob("*.*"):
            os.utime(path, (later, later))

    def damage(self, folder: Path, sample: int) -> None:
        os.truncate(folder / "data" / "JPEGImages" / f"2007_{sample:06d}.png", 5)

    def expected(self) -> Sequence[Mapping[str, Value]]:
        # cat is 0, dog 1, person 2.
        order = (1, 0, 2)
        return [
            {
                "boxes": [[float(side) for side in box] for box in boxes],
                "box_labels": [order[k % 3], order[(k + 1) % 3]],
                "box_difficult": [k % 2] * 2,
                "box_truncated": [0, 1],
            }
            for k, (_, _, boxes) in enumerate(ROWS)
        ]


@pytest.mark.parametrize("outer", ["", "VOCdevkit/VOC2012"])
def test_splits_are_those_of_the_lists(outer: str, tmp_path: Path) -> None:
    write_voc(tmp_path / outer, ROWS)
    with pytest.raises(UsageError, match=r"has the splits train, trainval, val: .*split='train'"):
        open_reader(str(tmp_path))
    for split, wanted in (("train", [1, 2, 4, 5, 7, 8]), ("validation", [0, 3, 6])):
        reader = open_reader(str(tmp_path), split=split)
        names = [reader.name(k) for k in range(len(reader))]
        assert names == [f"JPEGImages/2007_{k:06d}.png" for k in wanted]
        assert reader.classes == ["cat", "dog", "person"]
        for k, number in enumerate(wanted):
            path = tmp_path / outer / "Annotations" / f"2007_{number:06d}.xml"
            assert objects_of(reader, k) == judge(path)
    assert len(open_reader(str(tmp_path), split="all")) == len(ROWS)


def test_pictures_that_no_list_names_are_told_where_all_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_voc(tmp_path, ROWS[:4])
    (tmp_path / "ImageSets/Main/trainval.txt").unlink()
    _text(tmp_path / "ImageSets/Main/train.txt", "2007_000001\n")
    assert len(open_reader(str(tmp_path), split="train")) == 1
    assert "left out" not in caplog.text
    assert len(open_reader(str(tmp_path), split="all")) == 3
    assert "1 file (Annotations/2007_000002.xml) left out: no list in ImageSets" in caplog.text


def test_a_list_may_name_a_picture_a_few_times_and_not_without_end(tmp_path: Path) -> None:
    write_voc(tmp_path, ROWS[:2])
    _text(tmp_path / "ImageSets/Main/train.txt", "2007_000001\n" * 32)
    assert len(open_reader(str(tmp_path), split="train")) == 32
    _text(tmp_path / "ImageSets/Main/train.txt", "2007_000001\n" * 33)
    with pytest.raises(SourceError, match="over 16 lines for each of 2 files: name each picture"):
        open_reader(str(tmp_path), split="train")


def test_a_folder_of_another_kind_is_refused_where_the_reader_is_chosen(tmp_path: Path) -> None:
    write(tmp_path / "a" / "0.png", painted(20, 30, []))
    with pytest.raises(SourceError, match="has no pictures with XML files of Pascal VOC next to"):
        open_reader(str(tmp_path), format="voc", first_pixel=0)
    (tmp_path / "a").rename(tmp_path / "JPEGImages")
    (tmp_path / "Annotations").mkdir()
    with pytest.raises(SourceError, match="Annotations holds no XML files"):
        open_reader(str(tmp_path), format="voc", first_pixel=0)


def test_classes_are_the_same_in_a_split_that_lacks_one(tmp_path: Path) -> None:
    write_voc(tmp_path, ROWS)
    _text(tmp_path / "ImageSets/Main/val.txt", "2007_000000\n")
    _text(tmp_path / "Annotations/2007_000000.xml", note(ROWS[0][0], ROWS[0][1]))
    reader = open_reader(str(tmp_path), split="val")
    assert reader.classes == ["cat", "dog", "person"]
    assert fields(reader, 0)["boxes"].shape == (0, 4)


def test_several_years_are_named_and_opened_as_a_list(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        write_voc(tmp_path / year, ROWS)
        write_voc_masks(tmp_path / year)  # Which the first reader by name would take.
    for split in ("train", "all"):
        with pytest.raises(UsageError, match="holds the data sets VOC2007, VOC2012: open one"):
            open_reader(str(tmp_path), split=split)
    with pytest.raises(UsageError, match="holds the data sets VOC2007, VOC2012: open one"):
        open_reader(str(tmp_path))
    both = open_reader([str(tmp_path / "VOC2007"), str(tmp_path / "VOC2012")], split="trainval")
    assert (both.format, len(both)) == ("voc", 2 * len(ROWS))


@pytest.mark.parametrize(
    ("pictures", "notes"),
    [
        ("images", "annotations"),
        ("images/train", "annotations/train"),
        ("train/images", "train/annotations"),
        ("train", "train"),
        ("", ""),
    ],
)
def test_layouts_of_programs_for_drawing_boxes_are_read(
    pictures: str, notes: str, tmp_path: Path
) -> None:
    rows = ROWS[:3]
    write_voc(tmp_path / "voc", rows)
    for kind, place in (("JPEGImages", pictures), ("Annotations", notes)):
        for file in (tmp_path / "voc" / kind).iterdir():
            (tmp_path / "data" / place).mkdir(parents=True, exist_ok=True)
            file.rename(tmp_path / "data" / place / file.name)
            if "train" in place:  # Another split, of one more class.
                other = (tmp_path / "data" / place.replace("train", "valid")) / file.name
                other.parent.mkdir(parents=True, exist_ok=True)
                moved = (tmp_path / "data" / place / file.name).read_bytes()
                other.write_bytes(moved.replace(b"<name>cat<", b"<name>a cow<"))
    options: dict[str, Any] = {"split": "train"} if "train" in pictures else {}
    reader = open_reader(str(tmp_path / "data"), **options)
    assert (reader.format, len(reader)) == ("voc", 3)
    more = ["a cow"] if options else []
    assert reader.classes == [*more, "cat", "dog", "person"]
    for k in range(3):
        path = tmp_path / "data" / notes / f"2007_{k:06d}.xml"
        assert objects_of(reader, k) == judge(path)


@given(data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_any_sound_file_is_read_as_by_elementtree(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("voc")
    write(root / "JPEGImages" / "0.png", painted(60, 80, []))
    root_of = ET.Element("annotation")
    if data.draw(st.booleans()):
        size = ET.SubElement(root_of, "size")
        for name, value in (("height", 60), ("width", 80)):
            ET.SubElement(size, name).text = f" {value}\n"
    words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)
    for _ in range(data.draw(st.integers(0, 4))):
        each = ET.SubElement(root_of, "object", pose="x")
        name = data.draw(words.filter(lambda text: bool(text.strip())))
        left, top = data.draw(st.integers(1, 79)), data.draw(st.integers(1, 59))
        right, bottom = data.draw(st.integers(left, 80)), data.draw(st.integers(top, 60))
        part = ET.Element("part")
        for parent in (each, part):
            ET.SubElement(parent, "name").text = name if parent is each else "head"
            box = ET.SubElement(parent, "bndbox")
            edges = [("ymax", bottom), ("xmin", left), ("xmax", right), ("ymin", top)]
            for edge, number in data.draw(st.permutations(edges)):
                is_whole = edge in ("xmax", "ymax") or left == right or top == bottom
                fraction = "" if is_whole else data.draw(st.sampled_from(["", ".0", ".25"]))
                ET.SubElement(box, edge).text = f"{number}{fraction}"
        if data.draw(st.booleans()):
            each.append(part)
        for flag in ("difficult", "truncated"):
            if data.draw(st.booleans()):
                ET.SubElement(each, flag).text = str(data.draw(st.integers(0, 1)))
    encoding = data.draw(st.sampled_from(["utf-8", "utf-16", "unicode"]))
    text = ET.tostring(root_of, encoding=encoding, xml_declaration=encoding != "unicode")
    file = root / "Annotations" / "0.xml"
    file.parent.mkdir()
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    reader = open_reader(str(root), outside="clip")
    assert objects_of(reader, 0) == judge(file)
    assert reader.classes == sorted({each["name"] for each in judge(file)})


SOUND = note(20, 30, one("dog", (1, 1, 30, 20)))
DAMAGED = {
    "cut off": (SOUND[:-30], "is not whole XML: .*: line 3, column .*: it was cut off or damaged"),
    "nothing": ("", "is not whole XML: no element found"),
    "not XML": ("0 0.5 0.5 0.1 0.1", "is not whole XML: syntax error"),
    "not text": ("<annotation>\x01</annotation>", "is not whole XML: not well-formed"),
    "encoding": ('<?xml version="1.0" encoding="x"?>' + SOUND, "is not whole XML: unknown encod"),
}
REFUSED = {
    "DTD": ('<!DOCTYPE a [<!ENTITY x "y">]>' + SOUND, "has a DTD .<!DOCTYPE., whose entities"),
    "another root": ("<html/>", "is XML of <html>, not an <annotation> of Pascal VOC"),
    "deep": ("<annotation>" + "<a>" * 9999, "is nested too deeply"),
    "many": ("<annotation>" + "<object/>" * 300_000, "it has over 262144 values"),
    "large": ("<annotation>" + " " * (8 << 20), "has over 8388608 bytes"),
    "no name": (note(20, 30, one(" ", (1, 1, 2, 2))), "object 1 has no name"),
    "no box": (note(20, 30, SOUND[99:0], "<object><name>a</name></object>"), "1 has no bndbox/xmi"),
    "text": (note(20, 30, one("a", (1, 1, "x", 2))), "object 1: its xmax is 'x', not a number"),
    "nan": (note(20, 30, one("a", (1, float("nan"), 3, 4))), "its ymin is 'nan', not a number"),
    "turned": (note(20, 30, one("a", (5, 1, 3, 4))), "object 1: its box ends before it begins"),
    "outside": (note(20, 30, one("a", (5, 1, 99, 4))), "lies outside of its picture of 30 x 20"),
    "flag": (note(20, 30, one("a", (1, 1, 2, 2), "<difficult>x</difficult>")), "is 'x', not 0 or"),
    "size": (SOUND.replace(">30<", ">a<", 1), "its size/width is 'a', not a number"),
}


@pytest.mark.parametrize("case", [*DAMAGED, *REFUSED])
def test_a_file_that_is_not_read_is_named_with_the_reason(case: str, tmp_path: Path) -> None:
    write_voc(tmp_path, [(20, 30, [])] * 3)
    text, words = {**DAMAGED, **REFUSED}[case]
    file = tmp_path / "Annotations" / "2007_000001.xml"
    file.write_text(text)
    with pytest.raises(SourceError, match=f"2007_000001.xml.*{words}") as caught:
        open_reader(str(tmp_path), split="train")
    assert "\n" not in str(caught.value)
    if case in DAMAGED:  # Nothing else is called so.
        with pytest.raises(ET.ParseError if case != "encoding" else (ET.ParseError, LookupError)):
            ET.parse(file)
    else:
        assert "damaged" not in str(caught.value)


def test_pictures_and_files_that_lack_the_other_are_told_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_voc(tmp_path, ROWS[:4])
    _text(tmp_path / "ImageSets/Main/train.txt", "2007_000001\n2007_000009\n")
    with pytest.raises(
        SourceError, match=r"train.txt, line 2: 2007_000009 has no XML file in Anno"
    ):
        open_reader(str(tmp_path), split="train")
    for file in (tmp_path / "ImageSets" / "Main").iterdir():
        file.unlink()
    (tmp_path / "Annotations" / "2007_000002.xml").unlink()
    for k in range(3):  # The last one is out of the cache.
        caplog.clear()
        assert len(open_reader(str(tmp_path))) == 3
        monkeypatch.setattr(printable, "_told", set())
        later = time.time() - 100
        for folder in tmp_path.rglob("*"):
            os.utime(folder, (later, later))
        words = "1 file (JPEGImages/2007_000002.png) left out: no XML file in Annotations"
        assert words in caplog.text, k
    (tmp_path / "JPEGImages" / "2007_000001.png").unlink()
    with pytest.raises(SourceError, match=r"lacks 1 of 3 files .* such as JPEGImages/2007_000001"):
        open_reader(str(tmp_path))
    for suffix in ("png", "jpg"):
        write(tmp_path / "JPEGImages" / f"2007_000001.{suffix}", painted(20, 30, []))
    with pytest.raises(SourceError, match="have one name, and an XML file for both"):
        open_reader(str(tmp_path))


def test_boxes_that_count_from_zero_are_told_and_read_where_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_voc(tmp_path, [(20, 30, [])])
    _text(tmp_path / "Annotations/2007_000000.xml", note(20, 30, one("a", (0, 0, 10, 20))))
    assert fields(open_reader(str(tmp_path), split="val"), 0)["boxes"].tolist() == [[0, 0, 10, 20]]
    assert "1 box beginning at pixel 0, where Pascal VOC counts from 1" in caplog.text
    caplog.clear()
    _text(tmp_path / "Annotations/2007_000000.xml", note(20, 30, one("a", (3, 0, 10, 20))))
    reader = open_reader(str(tmp_path), split="val", first_pixel=0)
    assert fields(reader, 0)["boxes"].tolist() == [[3, 0, 10, 20]]
    assert not caplog.text
    with pytest.raises(UsageError, match="first_pixel=2: give 1 or 0"):
        open_reader(str(tmp_path), split="val", first_pixel=2)


def test_outlines_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_voc(tmp_path, [(20, 30, [])])
    more = "<polygon><x1>1</x1></polygon>"
    _text(tmp_path / "Annotations/2007_000000.xml", note(20, 30, one("a", (1, 1, 9, 9), more)))
    open_reader(str(tmp_path), split="val")
    assert "1 object with a polygon or a turned box: only bndbox is read" in caplog.text


# Masks


def write_voc_masks(root: Path) -> None:
    """Write masks of two of the pictures, with a palette, and their list."""
    for k in (1, 4):
        height, width, _ = ROWS[k]
        for folder, value in (("SegmentationClass", 10 + k), ("SegmentationObject", 1)):
            pixels = np.full((height, width), value, np.uint8)
            pixels[0] = 255
            mask = Image.fromarray(pixels, "P")
            mask.putpalette(bytes(range(256)) * 3)
            (root / folder).mkdir(exist_ok=True)
            mask.save(root / folder / f"2007_{k:06d}.png")
    _text(root / "ImageSets" / "Segmentation" / "train.txt", "2007_000004\n")
    _text(root / "ImageSets" / "Segmentation" / "val.txt", "2007_000001\n")


def test_masks_are_read_where_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_voc(tmp_path, ROWS)
    write_voc_masks(tmp_path)
    assert len(open_reader(str(tmp_path), split="train")) == 6
    assert "masks in SegmentationClass, which format='masks' reads" in caplog.text
    assert open_reader(str(tmp_path), split="train", masks=True).format == "voc"
    options: dict[str, Any] = {"image_size": None, "tiers": "none"}
    with pytest.raises(UsageError, match="has the splits train, val: choose one"):
        dlio.open(tmp_path, format="masks", **options)
    for split, k in (("train", 4), ("val", 1)):
        with dlio.open(tmp_path, format="masks", split=split, **options) as data:
            assert len(data) == 1
            assert data[0][1].unique().tolist() == [10 + k, 255]
            assert data[0][1].shape == ROWS[k][:2]
    options |= {"images": "JPEGImages", "masks": "SegmentationObject", "format": "masks"}
    with dlio.open(tmp_path, split="all", **options) as data:
        assert [data[k][1].unique().tolist() for k in range(2)] == [[1, 255], [1, 255]]


def _write_objects(root: Path, sample: int) -> list[np.ndarray[Any, Any]]:
    """Write the mask of a picture's objects, and return that of each; the box of an object of no
    area lies before them in the XML file."""
    name = f"2007_{sample:06d}"
    height, width, boxes = ROWS[sample]
    numbers = np.zeros((height, width), np.uint8)
    for k, (left, top, right, bottom) in enumerate(boxes):
        numbers[int(top) : int(bottom), int(left) : int(right)] = k + 1
    numbers[0] = 255
    made = [(numbers == k + 1).astype(np.uint8) for k in range(len(boxes))]
    (root / "SegmentationObject").mkdir(exist_ok=True)
    mask = Image.fromarray(numbers, "P")
    mask.putpalette(bytes(range(256)) * 3)
    mask.save(root / "SegmentationObject" / f"{name}.png")
    return made


def test_masks_of_objects_are_those_of_their_boxes(tmp_path: Path) -> None:
    write_voc(tmp_path, ROWS)
    with pytest.raises(UsageError, match=r"masks=True: .* has no folder SegmentationObject"):
        open_reader(str(tmp_path), split="train", masks=True)
    wanted = {k: _write_objects(tmp_path, k) for k in (1, 4)}
    _text(tmp_path / "ImageSets" / "Segmentation" / "train.txt", "2007_000004\n2007_000001\n")
    options: dict[str, Any] = {"image_size": None, "tiers": "none", "masks": True}
    with dlio.open(tmp_path, split="train", **options) as data:
        assert len(data) == 2
        for sample, k in enumerate((4, 1)):
            target = data[sample][1]
            assert target["masks"].tolist() == [each.tolist() for each in wanted[k]]
            assert len(target["boxes"]) == len(ROWS[k][2])
    with dlio.open(tmp_path, split="train", tiers="none") as data:
        assert "masks" not in data[0][1]
    # An object at the edge has no area: its box is left out, and its mask, too.
    file = tmp_path / "Annotations" / "2007_000004.xml"
    height, width, boxes = ROWS[4]
    edges = [(left + 1, top + 1, right, bottom) for left, top, right, bottom in boxes]
    flat = (width + 1, 1, width + 1, 9)
    file.write_text(note(height, width, one("dog", flat), *[one("cat", each) for each in edges]))
    path = tmp_path / "SegmentationObject" / "2007_000004.png"
    numbers = np.asarray(Image.open(path)).copy()
    numbers[(numbers > 0) & (numbers < 255)] += 1
    Image.fromarray(numbers).save(path)
    with dlio.open(tmp_path, split="train", **options) as data:
        assert data[0][1]["masks"].tolist() == [each.tolist() for each in wanted[4]]
    numbers[5, 5] = 9
    Image.fromarray(numbers).save(path)
    with pytest.raises(SourceError, match=r"000004\.png has the number 9, and the XML file 3 obj"):
        open_reader(str(tmp_path), split="train", masks=True)
    path.unlink()
    with pytest.raises(
        SourceError, match=r"000004\.xml has no mask SegmentationObject/2007_000004"
    ):
        open_reader(str(tmp_path), split="train", masks=True)


@given(data=st.data())
def test_run_lengths_are_those_of_cocos_tools(data: st.DataObject) -> None:
    tools = pytest.importorskip("pycocotools.mask")
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    seed, share = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 0.02, 0.5, 1]))
    mask = np.random.default_rng(seed).random((height, width)) < share
    text = run_lengths(mask)
    assert text == tools.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    shape = {"size": [height, width], "counts": text}
    assert (draw_instance(shape, height, width, "a") == mask).all()


@pytest.mark.parametrize(
    ("text", "number"),
    [("Unspecified", 0), ("False", 0), ("true", 1), ("", 0), ("1.0", 1), (" 0 ", 0)],
)
def test_flags_as_programs_write_them(text: str, number: int, tmp_path: Path) -> None:
    write_voc(tmp_path, [(20, 30, [])])
    more = f"<truncated>{text}</truncated><difficult>{text}</difficult>"
    _text(tmp_path / "Annotations/2007_000000.xml", note(20, 30, one("a", (1, 1, 9, 9), more)))
    made = fields(open_reader(str(tmp_path), split="val"), 0)
    assert (made["box_truncated"].tolist(), made["box_difficult"].tolist()) == ([number], [number])


def test_masks_are_read_of_a_data_set_that_has_nothing_else(tmp_path: Path) -> None:
    write_voc(tmp_path, ROWS)
    write_voc_masks(tmp_path)
    for file in (tmp_path / "Annotations").iterdir():
        file.unlink()
    (tmp_path / "Annotations").rmdir()
    reader = open_reader(str(tmp_path), split="val")
    assert (reader.format, len(reader), reader.name(0)) == (
        "masks",
        1,
        "JPEGImages/2007_000001.png",
    )
    _text(tmp_path / "ImageSets" / "Segmentation" / "val.txt", "2007_000001\n2007_000002\n")
    with pytest.raises(SourceError, match=r"val.txt, line 2: 2007_000002 has no mask in Segment"):
        open_reader(str(tmp_path), split="val")
