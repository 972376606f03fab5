"""Annotations of programs that are not read are told with the way to a format that is."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dlio
from dlio.errors import SourceError, UsageError
from dlio.util import printable

SHAPE = {"label": "cat", "points": [[1, 2], [10, 20]], "shape_type": "rectangle"}
LABELME = {"version": "5.0", "shapes": [SHAPE], "imagePath": "0.png", "imageData": None}
REGION = {"shape_attributes": {"name": "rect"}, "region_attributes": {"type": "cat"}}
VIA = {"0.png9": {"filename": "0.png", "regions": [REGION], "file_attributes": {}}}
SUPERVISELY = {"tags": [], "size": {"height": 3, "width": 4}, "objects": []}
STUDIO = [{"annotations": [{"completed_by": 1, "result": []}], "file_upload": "0.png"}]
CREATEML = [{"image": "0.png", "annotations": [{"label": "cat", "coordinates": {"x": 1}}]}]
BDD = [{"name": "0.png", "labels": [{"category": "car", "box2d": {"x1": 1}}]}]
PICTURE = {"imageData": "A" * (1 << 17), **LABELME}
VIA3 = {"project": {"pid": "x", "data_format_version": "3.1.1"}, "file": {"1": {"fname": "0.png"}}}
STUDIO_MIN = [{"image": "0.png", "label": [{"original_width": 8, "rectanglelabels": ["cat"]}]}]
STUDIO_CSV = "annotation_id,annotator,choice,image,lead_time\n1,1,cat,/data/upload/0.png,2\n"
CREATEML_1 = [{"imagefilename": "0.png", "annotation": CREATEML[0]["annotations"]}]
VOTT = {"assets": {"a": {"asset": {"name": "0.png"}, "regions": [{"tags": ["cat"]}]}}}
LABELBOX = json.dumps({"data_row": {"external_id": "0.png"}, "projects": {}}) + "\n"
DARWIN = {"item": {"name": "0.png"}, "annotations": [{"bounding_box": {"h": 1}, "name": "cat"}]}
KITTI = "Car 0.00 0 1.85 1 2 6 7 1.67 1.87 3.69 -16.53 2.39 58.49 1.57\n"
DOTA = "1.0 1.0 6.0 1.0 6.0 6.0 1.0 6.0 small-vehicle 0\n"
PANOPTIC = {
    "images": [{"id": 0, "file_name": "0.png"}],
    "annotations": [{"image_id": 0, "file_name": "0.png", "segments_info": [{"id": 1}]}],
}
CVAT = '<annotations><version>1.1</version><image id="0" name="0.png"></image></annotations>'


@pytest.fixture(autouse=True)
def _telling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printable, "_told", set())


def _pictures(folder: Path, count: int = 4, prefix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(folder / f"{prefix}{k}.png")


@pytest.mark.parametrize(
    ("program", "name", "value"),
    [
        ("labelme", "{}.json", LABELME),
        ("VGG Image Annotator", "via_region_data.json", VIA),
        ("VGG Image Annotator", "labels_my-project.json", {"_via_img_metadata": VIA}),
        ("Supervisely", "{}.png.json", {**SUPERVISELY, "objects": [{"classTitle": "cat"}]}),
        ("Supervisely", "../ann/{}.png.json", SUPERVISELY),
        ("Label Studio", "annotations.json", STUDIO),
        ("CreateML", "_annotations.createml.json", CREATEML),
        ("BDD100K", "labels.train.json", BDD),
        ("CVAT", "annotations.xml", CVAT),
        ("COCO's panoptic segmentation", "panoptic_val.json", PANOPTIC),
        ("labelme", "{}.json", PICTURE),
        ("VGG Image Annotator", "via3.json", VIA3),
        ("Label Studio", "project-1.json", STUDIO_MIN),
        ("Label Studio", "project-1.csv", STUDIO_CSV),
        ("CreateML", "annotations.json", CREATEML_1),
        ("VoTT", "../img/vott-json-export/x-export.json", VOTT),
        ("VoTT", "x-export.json", VOTT),
        ("Labelbox", "export.ndjson", LABELBOX),
        ("V7 Darwin", "{}.json", DARWIN),
        ("KITTI", "{}.txt", KITTI),
        ("DOTA", "{}.txt", DOTA),
    ],
)
def test_annotations_of_a_program_are_named(
    program: str, name: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "img")
    (tmp_path / "ann").mkdir()
    (tmp_path / "img" / name).parent.mkdir(exist_ok=True)
    for k in range(4):
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / "img" / name.format(k)).write_text(text)
    with caplog.at_level(logging.WARNING, "dlio"), dlio.open(tmp_path / "img") as data:
        assert not data.classes
    assert f"annotations of {program} that are not read" in caplog.text
    assert "COCO" in caplog.text


@pytest.mark.parametrize("folder", ["ann", "annotations", "json"])
def test_a_folder_of_such_annotations_is_no_class(folder: str, tmp_path: Path) -> None:
    _pictures(tmp_path / "images")
    (tmp_path / folder).mkdir()
    for k in range(4):
        (tmp_path / folder / f"{k}.json").write_text(json.dumps(LABELME))
    with pytest.raises(SourceError, match=r"annotations of labelme that are not read: .* COCO"):
        dlio.open(tmp_path)


@pytest.mark.parametrize("folder", ["labels", "label_2", "labelTxt", "annotations"])
@pytest.mark.parametrize(
    ("program", "text"),
    [("KITTI", KITTI), ("DOTA", DOTA), ("DOTA", f"imagesource:GoogleEarth\ngsd:0.1\n{DOTA}")],
)
def test_texts_of_boxes_are_named_by_their_data_set(
    folder: str, program: str, text: str, tmp_path: Path
) -> None:
    _pictures(tmp_path / "images")
    (tmp_path / folder).mkdir()
    for k in range(4):
        (tmp_path / folder / f"{k}.txt").write_text(text)
    with pytest.raises(SourceError, match=rf"annotations of {program} that are not .* YOLO"):
        dlio.open(tmp_path).close()


def test_a_table_of_regions_is_named_by_its_program(tmp_path: Path) -> None:
    _pictures(tmp_path)
    head = (
        "filename,file_size,file_attributes,region_count,region_shape_attributes,region_attributes"
    )
    rows = [f'{k}.png,9,{{}},1,"{{""name"":""rect""}}","{{}}"' for k in range(4)]
    (tmp_path / "via_export_csv.csv").write_text("\n".join([head, *rows]))
    with pytest.raises(UsageError, match=r"VGG Image Annotator .* layout='flat' reads"):
        dlio.open(tmp_path).close()


@pytest.mark.parametrize("name", ["via_region_data.json", "labels.mat", "backup/0_labels.json"])
def test_a_folder_next_to_pictures_hides_none_of_their_labels(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path)
    (tmp_path / "backup").mkdir()
    (tmp_path / name).write_text(json.dumps(VIA))
    with caplog.at_level(logging.WARNING, "dlio"), dlio.open(tmp_path) as data:
        assert len(data) == 4
    assert name in caplog.text


def _download(folder: Path, parts: int) -> None:
    for part in range(parts):
        inner = folder / f"{part:05}"
        _pictures(inner, 3, f"{part:05}000")
        for k in range(3):
            about: dict[str, Any] = {"caption": "a cat", "url": "x", "key": k, "status": "success"}
            (inner / f"{part:05}000{k}.json").write_text(json.dumps(about))
            (inner / f"{part:05}000{k}.txt").write_text("a photo of a cat")


def test_parts_of_a_download_are_no_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _download(tmp_path, 2)
    with pytest.raises(UsageError, match=r"img2dataset, and no classes: .* layout='classes'"):
        dlio.open(tmp_path)
    with dlio.open(tmp_path, layout="classes") as data:
        assert data.classes == ["00000", "00001"]
    with caplog.at_level(logging.WARNING, "dlio"), dlio.open(tmp_path / "00000") as data:
        assert len(data) == 3
        assert not data.classes
    assert "webdataset" in caplog.text
    assert "named as pictures are" in caplog.text


def test_class_folders_of_digits_stay_classes(tmp_path: Path) -> None:
    for k in range(3):
        _pictures(tmp_path / str(k), 2, f"{k}_")
    with dlio.open(tmp_path) as data:
        assert data.classes == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.jsonl", r"JSON Lines: pandas\.read_json"),
        ("a.jsonl.gz", r"JSON Lines: pandas\.read_json"),
        ("a.json", r"JSON, and none of COCO: pandas\.read_json"),
        ("a.txt", "text: write its samples to a column"),
        ("data_batch_1.bin", "CIFAR's binary records"),
    ],
)
def test_texts_and_records_are_refused_with_the_way_to_a_table(
    name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(SourceError, match=told):
        dlio.open(tmp_path / name)


def test_texts_in_class_folders_are_refused_with_the_way_to_a_table(tmp_path: Path) -> None:
    for name in ("neg", "pos"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0_7.txt").write_text("a film")
    with pytest.raises(SourceError, match="it holds texts, which are read as a column of a CSV"):
        dlio.open(tmp_path)


def test_boxes_of_coco_next_to_pictures_are_told_with_their_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path)
    images = [{"id": k, "file_name": f"{k}.png", "width": 8, "height": 8} for k in range(4)]
    box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16}
    whole = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "train.json").write_text(json.dumps(whole))
    with caplog.at_level(logging.WARNING, "dlio"), dlio.open(tmp_path) as data:
        assert len(data) == 4
    assert f"open {tmp_path / 'train.json'} for its boxes" in caplog.text
    with dlio.open(tmp_path / "train.json") as data:
        assert len(data) == 4
