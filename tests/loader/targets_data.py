"""Small data sets with boxes, masks and keypoints, painted so that pixels tell where they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlio.image.decoder import opencv

GREY, WHITE = 0, 255
Box = tuple[int, int, int, int]
POINTS = ["nose", "left_eye", "right_eye"]


def painted(height: int, width: int, boxes: list[Box]) -> npt.NDArray[np.uint8]:
    """Return a dark picture with a bright rectangle in each box (left, top, right, bottom)."""
    pixels = np.full((height, width, 3), GREY, np.uint8)
    for left, top, right, bottom in boxes:
        pixels[top:bottom, left:right] = WHITE
    return pixels


def write(path: Path, pixels: npt.NDArray[np.uint8], quality: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2 = opencv()
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if path.suffix == ".jpg" else []
    assert cv2.imwrite(str(path), pixels, options)


def drawn(seed: int, count: int = 12, boxes: int = 1) -> list[tuple[int, int, list[Box]]]:
    """Draw (height, width, boxes) of some pictures."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        height, width = (int(side) for side in rng.integers(40, 400, 2))
        inside: list[Box] = []
        for _ in range(boxes):
            left, right = sorted(rng.choice(width + 1, 2, replace=False).tolist())
            top, bottom = sorted(rng.choice(height + 1, 2, replace=False).tolist())
            inside.append((left, top, right, bottom))
        rows.append((height, width, inside))
    return rows


def write_coco(root: Path, rows: list[tuple[int, int, list[Box]]], extension: str = "png") -> Path:
    """Write a data set of COCO: boxes of categories 1, 3, 1, ..., with polygons and keypoints."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for k, (height, width, boxes) in enumerate(rows):
        name = f"{k:04d}.{extension}"
        write(root / "train" / name, painted(height, width, boxes))
        images.append({"id": 100 + k, "file_name": name, "height": height, "width": width})
        for n, (left, top, right, bottom) in enumerate(boxes):
            points = [
                *(left, top, 2),
                *((3 * left + right) / 4, (top + bottom) / 2, 2),
                *((left + 3 * right) / 4, (top + bottom) / 2, 1),
            ]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 100 + k,
                    "category_id": 1 + 2 * (n % 2),
                    "bbox": [left, top, right - left, bottom - top],
                    "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                    "keypoints": points,
                    "iscrowd": 0,
                }
            )
    categories = [
        {"id": 1, "name": "cat", "keypoints": POINTS},
        {"id": 3, "name": "dog", "keypoints": POINTS},
    ]
    file = root / "annotations" / "instances_train.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {"images": images, "annotations": annotations, "categories": categories}
    file.write_text(json.dumps(whole))
    return file


def write_yolo(root: Path, rows: list[tuple[int, int, list[Box]]]) -> None:
    """Write a data set for YOLO; every third picture without boxes has no label file."""
    for k, (height, width, boxes) in enumerate(rows):
        write(root / "images" / f"{k:04d}.png", painted(height, width, boxes))
        lines = [
            f"{n} {(left + right) / 2 / width} {(top + bottom) / 2 / height} "
            f"{(right - left) / width} {(bottom - top) / height}"
            for n, (left, top, right, bottom) in enumerate(boxes)
        ]
        note = root / "labels" / f"{k:04d}.txt"
        note.parent.mkdir(parents=True, exist_ok=True)
        if lines:
            note.write_text("\n".join(lines) + "\n")
    (root / "data.yaml").write_text("names: [cat, dog, cow]\n")


def write_masks(root: Path, rows: list[tuple[int, int, list[Box]]], value: int = 7) -> None:
    """Write pictures, and masks with `value` in the boxes."""
    for k, (height, width, boxes) in enumerate(rows):
        pixels = painted(height, width, boxes)
        write(root / "images" / f"{k:04d}.png", pixels)
        write(root / "masks" / f"{k:04d}.png", (pixels[..., 0] // 255 * value).astype(np.uint8))
