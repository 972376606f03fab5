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
    ],
)
def test_annotations_of_a_program_are_named(
    program: str, name: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pictures(tmp_path / "img")
    (tmp_path / "ann").mkdir()
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
