"""Readers of boxes and masks: conformance, layouts, and annotations that are damaged."""

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.data.reader import Reader, open_reader
from dlio.data.schema import Value
from dlio.errors import DecodeError, SourceError
from dlio.image.segmentation_masks import decode_mask, draw_instance
from dlio.testing import ReaderTests
from dlio.util import printable
from dlio_readers.annotations import mirrored_pairs
from tests.loader.targets_data import drawn, painted, write, write_coco, write_masks, write_yolo

ROWS = drawn(11, 24, boxes=2)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


class _Annotated(ReaderTests):
    pictures = "images"

    def write(self, folder: Path, shift: int) -> None:
        raise NotImplementedError

    def make(self, folder: Path) -> Reader:
        if not (folder / "data").exists():
            self.write(folder / "data", 0)
        return open_reader(str(folder / "data"))

    def change(self, folder: Path) -> None:
        self.write(folder / "data", 1)
        later = time.time() + 5  # The file system's clock may be coarse.
        for path in (folder / "data").rglob("*"):
            if path.is_file():
                os.utime(path, (later, later))

    def damage(self, folder: Path, sample: int) -> None:
        os.truncate(folder / "data" / self.pictures / f"{sample:04d}.png", 5)

    def expected(self) -> Sequence[Mapping[str, Value]]:
        rows = []
        for _, _, boxes in ROWS:
            rows.append({"boxes": [[float(side) for side in box] for box in boxes]})
        return rows


class TestCoco(_Annotated):
    pictures = "train"

    def write(self, folder: Path, shift: int) -> None:
        write_coco(folder, [(h, w, boxes[shift:]) for h, w, boxes in ROWS])

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [
            {**row, "box_labels": [1, 3], "image_id": 100 + k, "keypoint_pairs": [0, 2, 1]}
            for k, row in enumerate(super().expected())
        ]


class TestYolo(_Annotated):
    def write(self, folder: Path, shift: int) -> None:
        write_yolo(folder, [(h, w, boxes[shift:]) for h, w, boxes in ROWS])

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [{"box_labels": [0, 1]} for _ in ROWS]

    def test_boxes_are_in_pixels(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        for k, payload in enumerate(reader.read(np.arange(len(reader)))):
            boxes = reader.schema.split(payload)["boxes"]
            assert np.abs(boxes - np.array(ROWS[k][2])).max() < 0.01


class TestMasks(_Annotated):
    def write(self, folder: Path, shift: int) -> None:
        write_masks(folder, ROWS, value=7 + shift)

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [{} for _ in ROWS]


# Layouts.


def test_a_split_is_chosen_by_name_or_by_its_file(tmp_path: Path) -> None:
    file = write_coco(tmp_path, ROWS[:3])
    other = file.with_name("instances_val.json")
    other.write_text(file.read_text())
    os.rename(tmp_path / "train", tmp_path / "images")
    file.with_name("captions_val.json").write_text("{}")
    with pytest.raises(SourceError, match=r"several files.*split='train'"):
        open_reader(str(tmp_path))
    assert open_reader(str(tmp_path), split="val").classes == ["", "cat", "", "dog"]
    assert len(open_reader(str(other))) == 3
    with pytest.raises(dlio.UsageError, match="train, val"):
        open_reader(str(tmp_path), split="test")
    with pytest.raises(SourceError, match="pictures="):
        open_reader(str(other), pictures="elsewhere")


def test_keypoints_of_a_file_of_their_own_are_joined(tmp_path: Path) -> None:
    file = write_coco(tmp_path, ROWS[:3])
    whole = json.loads(file.read_text())
    file.with_name("person_keypoints_train.json").write_text(json.dumps(whole))
    for record in (*whole["annotations"], *whole["categories"]):
        record.pop("keypoints", None)
    wanted = fields(open_reader(str(tmp_path)), 1)["keypoints"].tolist()
    file.write_text(json.dumps(whole))
    assert fields(open_reader(str(tmp_path)), 1)["keypoints"].tolist() == wanted
    assert "keypoints" not in open_reader(str(tmp_path), keypoints=False).schema.kinds


def test_classes_may_be_numbered_without_gaps_and_crowds_kept(tmp_path: Path) -> None:
    file = write_coco(tmp_path, ROWS[:3])
    whole = json.loads(file.read_text())
    whole["annotations"][1]["iscrowd"] = 1
    file.write_text(json.dumps(whole))
    reader = open_reader(str(tmp_path), labels="contiguous")
    assert reader.classes == ["cat", "dog"]
    assert fields(reader, 0)["box_labels"].tolist() == [0]
    kept = fields(open_reader(str(tmp_path), crowds=True), 0)
    assert kept["box_iscrowd"].tolist() == [0, 1]


def test_labels_without_a_picture_are_told_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_yolo(tmp_path, ROWS[:3])
    (tmp_path / "labels" / "9.txt").write_text("")
    earlier = time.time() - 100
    for path in tmp_path.rglob("*"):
        os.utime(path, (earlier, earlier))
    for _ in range(2):  # The second one is out of the cache.
        monkeypatch.setattr(printable, "_told", set())
        caplog.clear()
        assert len(open_reader(str(tmp_path))) == 3
        assert "1 file (labels/9.txt) left out: images has no picture of the name" in caplog.text


@pytest.mark.parametrize("layout", ["images/{}", "{}/images"])
def test_splits_of_yolo_and_masks_are_found_in_both_layouts(tmp_path: Path, layout: str) -> None:
    for kind, write_set in (("yolo", write_yolo), ("masks", write_masks)):
        for split in ("train", "val"):
            write_set(tmp_path / "one", ROWS[:2])
            for folder in ("images", "labels" if kind == "yolo" else "masks"):
                to = tmp_path / kind / layout.format(split).replace("images", folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                os.rename(tmp_path / "one" / folder, to)
        with pytest.raises(SourceError, match=r"splits train, val.*split='train'"):
            open_reader(str(tmp_path / kind))
        assert open_reader(str(tmp_path / kind), split="val").format == kind
        inside = open_reader(str(tmp_path / kind / layout.format("train")))
        assert (inside.format, len(inside)) == (kind, 2)


def test_polygons_and_poses_of_yolo(tmp_path: Path) -> None:
    write_yolo(tmp_path, [(100, 200, [(20, 10, 60, 50)])])
    note = tmp_path / "labels" / "0000.txt"
    note.write_text("1 0.1 0.1 0.3 0.1 0.3 0.5 0.1 0.5\n")
    with dlio.open(tmp_path, image_size=None, tiers="none", masks=True) as data:
        _, target = data[0]
    assert np.allclose(target["boxes"], [[20, 10, 60, 50]])
    assert int(target["masks"].sum()) == 40 * 40
    (tmp_path / "data.yaml").write_text("names: {0: person}\nkpt_shape: [2, 2]\nflip_idx: [1, 0]\n")
    note.write_text("0 0.2 0.3 0.2 0.4 0.15 0.2 0.25 0.2\n")
    with dlio.open(tmp_path, image_size=None, tiers="none") as data:
        _, target = data[0]
        assert np.allclose(target["keypoints"][0], [[30, 20, 2], [50, 20, 2]])
        assert data.reader.schema.kinds["keypoint_pairs"].text == "uint8[2]"
    note.write_text("0 0.2 0.3 0.2 0.4 0.15\n")
    with pytest.raises(SourceError, match=r"0000\.txt, line 1.*5 numbers.*2 keypoints of 2"):
        open_reader(str(tmp_path))


def test_the_listing_is_made_anew_when_annotations_change(tmp_path: Path) -> None:
    write_yolo(tmp_path, ROWS[:3])
    past = time.time() - 60
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.utime(path, (past, past))
    before = open_reader(str(tmp_path))
    assert before.fingerprint == open_reader(str(tmp_path)).fingerprint
    (tmp_path / "labels" / "0001.txt").write_text("2 0.5 0.5 0.5 0.5\n")
    after = open_reader(str(tmp_path))
    assert fields(after, 1)["box_labels"].tolist() == [2]
    assert after.fingerprint != before.fingerprint


def test_annotations_behind_fsspec_are_read(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for name, write_set in (("coco", write_coco), ("yolo", write_yolo), ("masks", write_masks)):
        write_set(tmp_path / name, ROWS[:3])
        files.put(str(tmp_path / name), f"/annotated-{name}", recursive=True)
        local, remote = (
            open_reader(path) for path in (str(tmp_path / name), f"memory://annotated-{name}")
        )
        assert remote.format == name
        numbers = np.arange(3)
        assert [bytes(p) for p in local.read(numbers)] == [bytes(p) for p in remote.read(numbers)]


# Damage.


def fields(reader: Reader, sample: int) -> dict[str, Any]:
    return reader.schema.split(reader.read(np.array([sample], np.int64))[0])


def _set(part: str, number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda whole: whole[part][number].update(values)


def _drop(part: str, number: int, key: str) -> Callable[[dict[str, Any]], None]:
    return lambda whole: whole[part][number].pop(key)


@pytest.mark.parametrize(
    ("change", "record", "reason"),
    [
        (_set("annotations", 3, bbox=[1, 1, -5, 5]), "annotations[3] (id 4)", "negative size"),
        (_set("annotations", 3, bbox=[1, 1, float("nan"), 5]), "annotations[3]", "four numbers"),
        (_set("annotations", 3, bbox=[1, 1, 5]), "annotations[3]", "four numbers"),
        (_set("annotations", 3, bbox=["1", 1, 5, 5]), "annotations[3]", "four numbers"),
        (_set("annotations", 3, bbox=[1, 1, 10**400, 5]), "annotations[3]", "four numbers"),
        (_set("annotations", 3, bbox=[1, 1, 5000, 5]), "annotations[3]", "outside of its picture"),
        (_set("annotations", 3, bbox=[-90, 1, 95, 5]), "annotations[3]", "outside='clip'"),
        (_set("annotations", 3, category_id=99), "annotations[3]", "category 99 is not among"),
        (_drop("annotations", 3, "category_id"), "annotations[3]", "category_id is nothing"),
        (_set("annotations", 3, image_id=9), "annotations[3]", "picture 9 is not among"),
        (_set("annotations", 3, keypoints=[1, 2]), "annotations[3]", "keypoints are not 9"),
        (_set("images", 1, file_name="../../etc/passwd"), "images[1] (id 101)", "leads out"),
        (_set("images", 1, file_name="/etc/passwd"), "images[1]", "leads out"),
        (_set("images", 1, file_name="0000.png"), "images[1]", "occurs twice"),
        (_set("images", 1, id=100), "images[1]", "images[0] has the same id"),
        (_set("images", 1, id="x"), "images[1]", "not a whole number"),
        (_set("images", 1, width=10**12), "images[1]", "not within"),
        (_set("images", 1, file_name="gone.png"), "gone.png", "lacks 1 of 4 files"),
        (_set("categories", 1, id=1), "categories[1]", "occurs twice"),
        (_set("categories", 1, id=10**9), "1000000000", "labels='contiguous'"),
        (_drop("categories", 1, "name"), "categories[1]", "no name"),
        (lambda whole: whole.pop("categories"), "instances_train.json", "no list of categories"),
        (lambda whole: whole["annotations"].insert(2, 5), "annotations[2]", "not an object"),
        (lambda whole: whole.update(images=[]), "instances_train.json", ""),
    ],
)
def test_damaged_records_of_coco_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], record: str, reason: str
) -> None:
    file = write_coco(tmp_path, ROWS[:4])
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole))
    with pytest.raises(SourceError) as error:
        open_reader(str(tmp_path))
    assert record in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, share: float) -> None:
    file = write_coco(tmp_path, ROWS[:4])
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(SourceError, match=r"instances_train\.json is not whole JSON.*cut off"):
        open_reader(str(tmp_path))
    file.write_text("[" * 100_000)
    with pytest.raises(SourceError, match=r"instances_train\.json"):
        open_reader(str(file))


def test_boxes_beyond_the_picture_are_cut_off_if_wanted(tmp_path: Path) -> None:
    file = write_coco(tmp_path, [(100, 100, [(10, 10, 50, 50), (0, 0, 5, 5)])])
    whole = json.loads(file.read_text())
    whole["annotations"][0]["bbox"] = [-90, 10, 100, 900]
    whole["annotations"][1]["bbox"] = [200, 200, 5, 5]
    file.write_text(json.dumps(whole))
    assert fields(open_reader(str(tmp_path), outside="clip"), 0)["boxes"].tolist() == [
        [0, 10, 10, 100]
    ]


def test_a_picture_of_another_size_than_was_annotated_is_named(tmp_path: Path) -> None:
    write_coco(tmp_path, ROWS[:4])
    write(tmp_path / "train" / "0002.png", painted(33, 44, []))
    reader = open_reader(str(tmp_path))
    with pytest.raises(SourceError, match=r"0002\.png has 44 x 33 pixels.*annotations are for"):
        fields(reader, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0 0.5 0.5 nan 0.5", "not finite"),
        ("0 0.5 0.5 -0.1 0.5", "negative size"),
        ("0 0.5 0.5 0.1", "3 numbers"),
        ("x 0.5 0.5 0.1 0.1", "x"),
        ("-1 0.5 0.5 0.1 0.1", "class"),
        ("1.5 0.5 0.5 0.1 0.1", "class"),
        ("3 0.5 0.5 0.1 0.1", "data.yaml names only 3"),
        ("0 0.9 0.5 0.5 0.1", "outside of its picture"),
        ("0 30 20 10 10", "as if in pixels"),
        ("99999999999999999999 0.5 0.5 0.1 0.1", "class"),
    ],
)
def test_damaged_lines_of_yolo_are_named(tmp_path: Path, line: str, reason: str) -> None:
    write_yolo(tmp_path, ROWS[:3])
    with (tmp_path / "labels" / "0001.txt").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(SourceError) as error:
        open_reader(str(tmp_path))
    assert "0001.txt" in str(error.value)
    assert reason in str(error.value)


def test_label_files_of_no_picture_and_bad_yaml_are_named(tmp_path: Path) -> None:
    write_yolo(tmp_path, ROWS[:3])
    for text in ("names: [a\n", "names: {x: a}\n", "names: 5\n", "names: [a]\nkpt_shape: 3\n"):
        (tmp_path / "data.yaml").write_text(text)
        with pytest.raises(SourceError, match=r"data\.yaml"):
            open_reader(str(tmp_path))
    (tmp_path / "data.yaml").write_text("names: [a, b, c]\n")
    for note in (tmp_path / "labels").iterdir():
        note.rename(note.with_name(f"x{note.name}"))
    with pytest.raises(SourceError, match="none of its 3 label files"):
        open_reader(str(tmp_path))


def test_pictures_without_masks_and_masks_of_another_size_are_named(tmp_path: Path) -> None:
    write_masks(tmp_path, ROWS[:3])
    write(tmp_path / "masks" / "0002.png", np.zeros((9, 9), np.uint8))
    with (
        dlio.open(tmp_path, image_size=32, tiers="none") as data,
        pytest.raises(DecodeError, match=r"0002\.png has 9 x 9 pixels, and the picture"),
    ):
        data[2]
    (tmp_path / "masks" / "0001.png").unlink()
    (tmp_path / "masks" / "odd.png").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"1 of 3 pictures.*0001.*1 mask.*odd"):
        open_reader(str(tmp_path))


# Masks.


def png(colours: int, bits: int, rows: list[bytes], *chunks: tuple[bytes, bytes]) -> bytes:
    width = len(rows[0]) * 8 // bits if colours in (0, 3) else len(rows[0]) // 3

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, len(rows), bits, colours, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    inner = b"".join(chunk(*each) for each in chunks)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + inner
        + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )


def test_masks_are_numbers_of_palettes_and_grey_values() -> None:
    palette = (b"PLTE", bytes(range(255, 255 - 48, -1)) * 16)
    clear = (b"tRNS", bytes(16))
    rows = [bytes([0, 7, 14, 255]), bytes([1, 2, 3, 4])]
    wanted = [list(row) for row in rows]
    assert decode_mask(png(3, 8, rows, palette, clear), "x").tolist() == wanted
    assert decode_mask(png(0, 8, rows), "x").tolist() == wanted
    assert decode_mask(
        png(3, 4, [bytes([0x0F, 0x5A])], (b"PLTE", palette[1][:48])), "x"
    ).tolist() == [[0, 15, 5, 10]]
    assert decode_mask(png(0, 1, [bytes([0b01100001])]), "x").tolist() == [[0, 1, 1, 0, 0, 0, 0, 1]]
    assert decode_mask(png(0, 16, [bytes([0, 200, 0, 3])]), "x").tolist() == [[200, 3]]
    for damaged, reason in (
        (png(0, 16, [bytes([1, 0, 0, 3])]), "the number 256"),
        (png(2, 8, [bytes([1, 2, 3, 4, 5, 6])]), "in colour"),
        (png(3, 8, rows, palette)[:60], "cannot"),
        (b"", "empty"),
    ):
        with pytest.raises(DecodeError, match=reason):
            decode_mask(damaged, "x")


def test_instances_are_drawn_of_polygons_and_run_lengths() -> None:
    square = [[1, 2, 4, 2, 4, 5, 1, 5]]
    mask = draw_instance(square, 6, 7, "x")
    wanted = np.zeros((6, 7), np.uint8)
    wanted[2:5, 1:4] = 1
    assert np.array_equal(mask, wanted)
    runs = {"size": [6, 7], "counts": [8, 3, 3, 3, 3, 3, 19]}
    assert np.array_equal(draw_instance(runs, 6, 7, "x"), wanted)
    text = {"size": [6, 7], "counts": "833000`0"}
    assert np.array_equal(draw_instance(text, 6, 7, "x"), wanted)
    for damaged in (
        {"size": [6, 7], "counts": [8, 3]},
        {"size": [6, 7], "counts": [-1, 43]},
        {"size": [7, 6], "counts": [42]},
        {"size": [6, 7], "counts": "\x7f"},
        {"counts": [42]},
        [[[1, 2], [3, 4], [5, 6]]],
        [[1, 2, 3, float("nan"), 4, 5]],
        [[0, 0, 1e300, 0, 1, 1]],
        "polygon",
        5,
    ):
        with pytest.raises(DecodeError, match="segmentation"):
            draw_instance(damaged, 6, 7, "x")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_polygons_are_drawn_as_pycocotools_draws_them() -> None:
    tools = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width = rng.integers(5, 120, 2).tolist()
        points = rng.uniform(-5, 125, (int(rng.integers(3, 12)), 2)).round(2).reshape(-1).tolist()
        rles = tools.frPyObjects([points], height, width)
        assert np.array_equal(
            draw_instance([points], height, width, "x"), tools.decode(rles)[..., 0]
        )
        text = {"size": [height, width], "counts": rles[0]["counts"].decode()}
        assert np.array_equal(draw_instance(text, height, width, "x"), tools.decode(rles)[..., 0])


def test_keypoints_are_paired_by_the_words_left_and_right() -> None:
    names = ["nose", "left_eye", "right_eye", "Right Knee", "left knee", "l_hip", "r_hip", "lid"]
    assert mirrored_pairs(names) == [0, 2, 1, 4, 3, 6, 5, 7]
    assert mirrored_pairs(["left_only", "upright"]) == [0, 1]


def test_annotations_of_random_bytes_are_read_or_refused(tmp_path: Path) -> None:
    file = write_coco(tmp_path / "coco", [(30, 40, [(2, 3, 20, 21), (0, 0, 5, 5)])])
    write_yolo(tmp_path / "yolo", [(30, 40, [(2, 3, 20, 21), (0, 0, 5, 5)])])
    note = tmp_path / "yolo" / "labels" / "0000.txt"
    good, lines = file.read_bytes(), note.read_bytes()
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(60):
        for path, data, kind in ((file, good, "coco"), (note, lines, "yolo")):
            path.write_bytes(_mutated(rng, data))
            try:
                options: dict[str, Any] = {"image_size": 16, "masks": True, "tiers": "none"}
                with dlio.open(tmp_path / kind, **options) as opened:
                    opened[0]
                    read += 1
            except dlio.DlioError as error:
                assert "\n" not in str(error)  # noqa: PT017 - most are read
    assert read > 8


def _mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """Return bytes of which a few are changed, left out or doubled."""
    made = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(made)))
        how = int(rng.integers(0, 4))
        if how == 0:
            made[at] = int(rng.integers(32, 127))
        elif how == 1:
            del made[at : at + int(rng.integers(1, 9))]
        elif how == 2:
            made[at:at] = rng.choice([b"9", b"-", b"e9", b"null", b"NaN", b"[]", b"0" * 30])
        else:
            made[at:at] = made[at : at + 12]
    return bytes(made)


def test_masks_of_random_bytes_are_decoded_or_refused() -> None:
    rows = [bytes([0, 7, 14, 255])] * 4
    palette = (b"PLTE", bytes(range(48)))
    rng = np.random.default_rng(0)
    for good in (png(3, 8, rows, palette), png(0, 1, rows), png(3, 2, rows, palette)):
        for _ in range(150):
            made = bytearray(good)
            made[int(rng.integers(0, len(made)))] = int(rng.integers(0, 256))
            del made[len(made) - int(rng.integers(0, 3)) :]
            try:
                assert decode_mask(bytes(made), "x").dtype == np.uint8
            except DecodeError:
                continue
