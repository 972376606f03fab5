"""Boxes and labels of drawn COCO files are those of pycocotools, or one line says why not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dlio.data.reader import open_reader
from dlio.errors import SourceError

_SIDES = (20, 30)
"""Height and width of the pictures."""
_ENDS = pytest.param(range(12, 200), marks=pytest.mark.nightly)


def _numbers(rng: np.random.Generator, count: int) -> list[int]:
    """Return ids in no order and with gaps."""
    numbers: list[int] = rng.choice(90, count, replace=False).tolist()
    return numbers


def _box(rng: np.random.Generator) -> list[float]:
    """Return a box of whole or other numbers, of no size or beyond the picture at times."""
    height, width = _SIDES
    x, y = rng.uniform(0, width - 6), rng.uniform(0, height - 6)
    sides = rng.uniform(1, 5, 2)
    kind = rng.integers(8)
    if kind == 0:
        sides[rng.integers(2)] = 0
    if kind == 1:
        x, sides = width - 2.0, sides + 4
    box = [x, y, *sides.tolist()]
    return [float(round(each)) for each in box] if rng.random() < 0.5 else box


def _drawn(rng: np.random.Generator) -> dict[str, Any]:
    pictures, classes = _numbers(rng, 4), _numbers(rng, 3)
    images = [
        {"id": k, "file_name": f"{k}.png", "height": _SIDES[0], "width": _SIDES[1]}
        for k in pictures
    ]
    notes = []
    for number in _numbers(rng, int(rng.integers(9))):
        box = _box(rng)
        note = {
            "id": number,
            "image_id": int(rng.choice(pictures[:3])),  # The last one has none.
            "category_id": int(rng.choice(classes)),
            "bbox": box,
            "area": box[2] * box[3] / 2,
            "iscrowd": int(rng.random() < 0.3),
        }
        if rng.random() < 0.2:
            del note["area"]
        notes.append(note)
    kinds = [{"id": k, "name": f"class {k}"} for k in classes]
    return {"images": images, "annotations": notes, "categories": kinds}


def _right(judge: Any, image: int, crowds: bool) -> list[tuple[list[float], int, int]]:
    """Return (corners, category, crowd) of a picture by pycocotools, boxes limited to the picture
    as `outside="clip"` says, those without a size left out."""
    notes = judge.loadAnns(judge.getAnnIds(imgIds=[image], iscrowd=None if crowds else False))
    made = []
    for note in notes:
        x, y, width, height = note["bbox"]
        corners = [x, y, min(x + width, _SIDES[1]), min(y + height, _SIDES[0])]
        if corners[2] > corners[0] and corners[3] > corners[1]:
            made.append(
                (np.array(corners, np.float32).tolist(), note["category_id"], note["iscrowd"])
            )
    return made


@pytest.mark.parametrize("seeds", [range(12), _ENDS], ids=["some", "all"])
def test_boxes_are_those_of_pycocotools(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coco = pytest.importorskip("pycocotools.coco").COCO
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    for seed in seeds:
        rng = np.random.default_rng(seed)
        whole = _drawn(rng)
        root = tmp_path / str(seed)
        root.mkdir()
        for image in whole["images"]:
            Image.new("RGB", (_SIDES[1], _SIDES[0])).save(root / image["file_name"])
        path = root / "instances_all.json"
        path.write_text(json.dumps(whole))
        judge = coco(str(path))
        crowds = bool(rng.random() < 0.5)
        kept = [note for note in whole["annotations"] if crowds or not note["iscrowd"]]
        beyond = [
            n
            for n in kept
            if n["bbox"][0] + n["bbox"][2] > _SIDES[1] + 1  # A pixel is rounding.
        ]
        if beyond:
            known = "|".join(str(note["id"]) for note in beyond)
            with pytest.raises(SourceError, match=rf"\(id ({known})\)"):
                open_reader(str(path), crowds=crowds)
        reader = open_reader(str(path), crowds=crowds, outside="clip")
        assert len(reader) == len(judge.getImgIds())
        names = {kind["id"]: kind["name"] for kind in judge.loadCats(judge.getCatIds())}
        assert {k: reader.classes[k] for k in names} == names
        for k in range(len(reader)):
            (payload,) = reader.read(np.array([k]))
            fields = reader.schema.split(payload)
            boxes = np.asarray(fields["boxes"]).tolist()
            labels = np.asarray(fields["box_labels"]).tolist()
            marks = np.asarray(fields["box_iscrowd"]).tolist() if crowds else [0] * len(labels)
            own = list(zip(boxes, labels, marks, strict=True))
            assert own == _right(judge, int(fields["image_id"]), crowds), (seed, k)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_id": 9}, r"annotations\[0\] \(id 7\): its picture 9 is not among the images"),
        ({"category_id": 9}, r"annotations\[0\] \(id 7\): its category 9 is not among"),
        ({"image_id": "1"}, r"its image_id is '1', not a whole number: correct the file"),
    ],
)
def test_annotations_that_name_nothing_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    note = {"id": 7, "image_id": 1, "category_id": 2, "bbox": [1, 1, 2, 2], **change}
    whole = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "annotations": [note],
        "categories": [{"id": 2, "name": "x"}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(whole))
    with pytest.raises(SourceError, match=words):
        open_reader(str(tmp_path / "instances.json"))
