"""The reader of COCO's format: a file of annotations, and a folder of pictures.

coco/annotations/instances_train2017.json
coco/annotations/person_keypoints_train2017.json     if there
coco/train2017/*.jpg                                  or images/train2017, images, or next to it
"""

import json
import math
import os
from collections.abc import Sequence
from typing import Any, Final, Literal, NoReturn
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import PathRules
from dlio.data.source import File, Source, file_at, own_name
from dlio.data.splits import chosen_split
from dlio.errors import SourceError, UsageError
from dlio.image.segmentation_masks import has_area
from dlio.util.printable import log_warning
from dlio.util.structured_text import parse_json
from dlio.util.units import counted
from dlio_readers.annotations import (
    MAX_BOXES,
    AnnotatedReader,
    Annotations,
    check_boxes,
    mirrored_pairs,
)
from dlio_readers.fileset import index_kind
from dlio_readers.foreign_labels import program_of

# The file of annotations, checked record by record

_MOST_BYTES: Final = 4 << 30
_MOST_CLASSES: Final = 1 << 16
_MOST_KEYPOINTS: Final = 255
_MOST_SIDE: Final = 1 << 24
_FURTHEST: Final = 1e9
_MAX_ID: Final = 2**63 - 1
Record = dict[str, Any]
"""A record as JSON has it, whose values may be of any type."""


class CocoFile:
    """The records of one file.

    Raises SourceError if the file is cut off, or a record lacks what it needs.
    """

    def __init__(self, file: File) -> None:
        self.file, self.name = file, file.name
        if file.size > _MOST_BYTES:
            raise SourceError(f"{self.name} has over {_MOST_BYTES} bytes: split it")
        try:
            whole = parse_json(file.read(), self.name)
        except ValueError as error:
            raise SourceError(
                f"{self.name} is not whole JSON: {error}: it was cut off or damaged; copy it again"
            ) from error
        if not isinstance(whole, dict):
            raise SourceError(f"{self.name} is not an object of images and annotations")
        self.images = self._records(whole, "images")
        self.annotations = self._records(whole, "annotations")
        self.categories = self._records(whole, "categories")

    def _records(self, whole: Record, part: str) -> list[Record]:
        records = whole.get(part)
        if not isinstance(records, list):
            raise SourceError(f"{self.name} has no list of {part}: it needs one")
        for k, record in enumerate(records):
            if not isinstance(record, dict):
                self.fail(part, k, "it is not an object")
        return records

    def fail(self, part: str, number: int, reason: str) -> NoReturn:
        """Raise SourceError for a record."""
        raise SourceError(f"{self.at(part, number)}: {reason}: correct the file")

    def at(self, part: str, number: int) -> str:
        """Return the name of a record."""
        records: list[Record] = getattr(self, part, [])  # None before they are checked.
        known = records[number].get("id") if records else None
        about = f" (id {known})" if isinstance(known, int | str) else ""
        return f"{self.name}, {part}[{number}]{about}"

    def whole(self, part: str, k: int, record: Record, key: str, most: int) -> int:
        """Return a whole number of a record, 0 to `most`."""
        value = record.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            shown = "nothing" if key not in record else repr(value)[:40]
            self.fail(part, k, f"its {key} is {shown}, not a whole number")
        if not 0 <= value <= most:
            self.fail(part, k, f"its {key} is {value}, not within 0 to {most}")
        return value


def joined(
    main: CocoFile,
    others: Sequence[CocoFile],
    masks: bool,
    keypoints: bool | None,
    crowds: bool,
    labels: str,
    outside: str,
) -> Annotations:
    """Return the annotations of a file, with the keypoints of others; see `CocoReader`."""
    names, ids, declared = _pictures(main)
    place = {int(number): k for k, number in enumerate(ids)}
    classes, label_of, points = _categories(main, labels)
    extra: dict[int, Any] = {}
    for other in others:
        _, _, more = _categories(other, labels)
        points = points or more
        for k, record in enumerate(other.annotations):
            if "keypoints" in record and "id" in record:
                extra[other.whole("annotations", k, record, "id", _MAX_ID)] = record["keypoints"]
    if keypoints is False:
        points = []
    elif keypoints and not points:
        raise SourceError(f"{main.name} has no keypoints: its categories name none")
    kept: list[tuple[int, int, int]] = []
    """(number, picture, label) of each annotation."""
    boxes, poses = [], []
    for k, record in enumerate(main.annotations):
        if record.get("iscrowd") and not crowds:
            continue
        image = main.whole("annotations", k, record, "image_id", _MAX_ID)
        if image not in place:
            main.fail("annotations", k, f"its picture {image} is not among the images")
        category = main.whole("annotations", k, record, "category_id", _MAX_ID)
        if category not in label_of:
            main.fail("annotations", k, f"its category {category} is not among the categories")
        kept.append((k, place[image], label_of[category]))
        boxes.append(_box(main, k, record))
        if points:
            poses.append(_pose(main, k, record, extra, len(points)))
    rows = np.array(kept, np.int64).reshape(-1, 3)
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    sides = declared[rows[:, 1]][:, ::-1].astype(np.float64)
    sides[sides == 0] = math.nan
    edges = check_boxes(corners, sides, outside, lambda k: main.at("annotations", int(rows[k, 0])))
    # Boxes of some area, in the order of their pictures.
    stay = np.flatnonzero((edges[:, 2:] > edges[:, :2]).all(axis=1))
    stay = stay[np.argsort(rows[stay, 1], kind="stable")]
    numbers = rows[stay, 0].tolist()
    counts = np.bincount(rows[stay, 1], minlength=len(names)).astype(np.int64)
    if counts.max(initial=0) > MAX_BOXES:
        crowded = int(counts.argmax())
        main.fail("images", crowded, f"it has {counted(counts[crowded], 'box')}, over {MAX_BOXES}")
    made = Annotations(
        names,
        counts,
        edges[stay].astype(np.float32),
        rows[stay, 2],
        classes,
        ids=ids,
        declared=declared,
    )
    if points:
        made.keypoints = np.array(poses, np.float32).reshape(-1, len(points), 3)[stay]
        made.pairs = mirrored_pairs(points)
    if crowds:
        marks = [bool(main.annotations[k].get("iscrowd")) for k in numbers]
        made.flags["box_iscrowd"] = np.array(marks, np.uint8)
    if masks:
        made.segments = _segments(main, numbers, counts)
    return made


def _box(file: CocoFile, number: int, record: Record) -> list[float]:
    box = record.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        if box is None:
            file.fail(
                "annotations",
                number,
                "it has no bbox: if these name classes of whole pictures, as iNaturalist's do, "
                "write file_name and label to a labels.csv",
            )
        shown = repr(box)[:60]
        file.fail("annotations", number, f"its bbox is {shown}, not four numbers")
    return box


def _pose(
    file: CocoFile, number: int, record: Record, extra: dict[int, Any], count: int
) -> list[float]:
    """Return x, y and visibility of each of `count` keypoints; zeros without any."""
    points = record.get("keypoints", extra.get(record.get("id", -1)))
    if points is None:
        return [0.0] * (3 * count)
    fits = isinstance(points, list) and len(points) == 3 * count
    if not fits or not all(map(_is_number, points)):
        file.fail("annotations", number, f"its keypoints are not {3 * count} numbers")
    return list(points)


def _is_number(value: object) -> bool:
    """True for a finite number of a sensible size."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_FURTHEST < value < _FURTHEST


def _pictures(
    file: CocoFile,
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return names, ids and (height, width) of the pictures."""
    names: list[str] = []
    ids = np.zeros(len(file.images), np.int64)
    sizes = np.zeros((len(file.images), 2), np.int64)
    known: dict[int, int] = {}
    seen: set[str] = set()
    for k, record in enumerate(file.images):
        name = record.get("file_name") or _name_of(record.get("coco_url"))
        if not isinstance(name, str) or not name or "\0" in name:
            file.fail("images", k, "it has no file_name, nor a coco_url that ends in one")
        name = os.path.normpath(name.replace("\\", "/"))
        if os.path.isabs(name) or name.startswith("..") or "://" in name:
            file.fail("images", k, f"its file_name {name!r} leads out of the data set's folder")
        if name in seen:
            file.fail("images", k, f"its file_name {name!r} occurs twice")
        seen.add(name)
        names.append(name)
        ids[k] = number = file.whole("images", k, record, "id", _MAX_ID)
        if known.setdefault(number, k) != k:
            file.fail("images", k, f"images[{known[number]}] has the same id")
        for side, key in enumerate(("height", "width")):
            if record.get(key) is not None:
                sizes[k, side] = file.whole("images", k, record, key, _MOST_SIDE)
    if not names:
        raise SourceError(f"{file.name} has no images: nothing can be read")
    return names, ids, sizes


def _name_of(url: object) -> str:
    """Return the name of a picture of LVIS, which has a URL alone: its folder and its file."""
    if not isinstance(url, str):
        return ""
    return "/".join(unquote(urlsplit(url).path).strip("/").split("/")[-2:])


def _categories(file: CocoFile, labels: str) -> tuple[list[str], dict[int, int], list[str]]:
    """Return class names, label by category, and names of keypoints."""
    named: dict[int, str] = {}
    points: list[str] = []
    for k, record in enumerate(file.categories):
        number = file.whole("categories", k, record, "id", _MAX_ID)
        name = record.get("name")
        if not isinstance(name, str) or not name:
            file.fail("categories", k, "it has no name")
        if number in named:
            file.fail("categories", k, f"its id {number} occurs twice")
        named[number] = name
        own = record.get("keypoints") or []
        if not isinstance(own, list) or not all(isinstance(each, str) for each in own):
            file.fail("categories", k, "its keypoints are not a list of names")
        if own and points and own != points:
            file.fail("categories", k, "its keypoints are not those of the other categories")
        if len(own) > _MOST_KEYPOINTS:
            file.fail("categories", k, f"it has over {_MOST_KEYPOINTS} keypoints")
        points = own or points
    if labels == "contiguous":
        order = sorted(named)
        return [named[k] for k in order], {k: n for n, k in enumerate(order)}, points
    largest = max(named, default=-1)
    if largest >= _MOST_CLASSES:
        raise SourceError(
            f"{file.name}: a category has the id {largest}, over {_MOST_CLASSES}: number the "
            "classes from 0 with labels='contiguous'"
        )
    return [named.get(k, "") for k in range(largest + 1)], {k: k for k in named}, points


def _segments(file: CocoFile, numbers: list[int], counts: npt.NDArray[np.int64]) -> list[str]:
    """Return JSON of the segmentations of each picture."""
    shapes = []
    for number in numbers:
        shape = file.annotations[number].get("segmentation")
        if not isinstance(shape, list | dict):
            file.fail("annotations", number, "it has no segmentation, and masks=True needs one")
        shapes.append(shape)
    poor = [n for n, shape in zip(numbers, shapes, strict=True) if _lacks_area(shape)]
    if poor:
        log_warning(
            "%s: %d of %d instances have polygons of fewer than three points, of which nothing is "
            "drawn, as by COCO's tools; the first is %s",
            *(file.name, len(poor), len(numbers), file.at("annotations", poor[0])),
        )
    ends = np.cumsum(counts).tolist()
    try:
        return [
            json.dumps(shapes[end - count : end], separators=(",", ":"))
            for count, end in zip(counts.tolist(), ends, strict=True)
        ]
    except RecursionError as error:
        raise SourceError(f"{file.name}: a segmentation is nested too deeply") from error


def _lacks_area(shape: list[Any] | Record) -> bool:
    """True if nothing is drawn of a polygon of an instance."""
    polygons = shape if isinstance(shape, list) else []
    return any(isinstance(each, list) and not has_area(each) for each in polygons)


# Samples

_PREFIXES: Final = ("instances_", "person_keypoints_", "_annotations.coco", "annotations")
_MAIN, _KEYPOINTS = "instances_", "person_keypoints_"
_BOXLESS: Final = ("captions_", "image_info_", "panoptic_", "stuff_")
"""Beginnings of the names of files without boxes."""
_HEAD: Final = 1 << 16
_MOST_TEXTS: Final = 16
"""JSON files at the root that are looked into."""
_FOLDER: Final = "annotations"


class CocoReader(AnnotatedReader):
    """Read pictures, boxes, masks and keypoints of a COCO data set.

    Classes are the categories, and labels the categories' own numbers, as torchvision has them:
    COCO's begin at 1 and have gaps, whose names are empty. Boxes of no area are left out, and so
    are crowds unless they are asked for.

    Args:
        path: a file of annotations, or a folder with `annotations/*.json`.
        split: which of several files, such as `train2017`.
        pictures: folder of the pictures, below the data set's, or elsewhere by `..` or a full path;
            found by itself in common layouts.
        masks: give a mask of each box, drawn of its polygons or run lengths.
        keypoints: give keypoints; None to give them if the data set has some.
        crowds: keep boxes around crowds, marked by `iscrowd`.
        labels: `file` for the numbers in the file, `contiguous` for 0 to classes - 1.
        outside: `error` for a box that lies outside of its picture, or `clip`.

    Raises SourceError, with the number of the record, for annotations that are damaged.
    """

    format = "coco"
    path_rules = PathRules(one_path=True)

    def __init__(
        self,
        path: str,
        split: str | None = None,
        pictures: str | None = None,
        masks: bool = False,
        keypoints: bool | None = None,
        crowds: bool = False,
        labels: Literal["file", "contiguous"] = "file",
        outside: Literal["error", "clip"] = "error",
    ) -> None:
        root, file = _annotation_file(path, split)
        origin = Source(root)
        source, wanted = origin, pictures
        options = (masks, keypoints, crowds, labels, outside, pictures, root)
        leads_out = pictures is not None and os.path.normpath(pictures).startswith(("/", ".."))
        if pictures is not None and source.local and leads_out:
            source, wanted = Source(os.path.join(source.root, pictures)), ""

        def build() -> Annotations:
            main = CocoFile(origin.file(file))
            others = []
            name = os.path.basename(file)
            if keypoints is not False and name.startswith(_MAIN):
                other = f"{os.path.dirname(file)}/{name.replace(_MAIN, _KEYPOINTS, 1)}".lstrip("/")
                if origin.exists(other):
                    others.append(CocoFile(origin.file(other)))
            made = joined(main, others, masks, keypoints, crowds, labels, outside)
            folder = _pictures_folder(source, file, wanted, made.names[0], main.name)
            made.names = [f"{folder}/{each}" if folder else each for each in made.names]
            made.files = [each.file for each in (main, *others)]
            made.folders = [] if wanted == "" else [os.path.dirname(file)]
            return made

        super().__init__(source, index_kind("coco", file, options), build)

    @staticmethod
    def recognises(path: str) -> str | None:
        if own_name(path).endswith(".json"):
            head = file_at(path).opened().read(0, _HEAD)
            named = os.path.basename(own_name(path)).startswith(_PREFIXES)
            has = head.lstrip().startswith(b"{") and (
                named or b'"annotations"' in head or b'"images"' in head
            )
            return None if has else "is a JSON file without images and annotations of COCO"
        source = Source(path)
        if source.is_folder() and _files(source):
            return None
        return "is neither annotations of COCO nor a folder with annotations/*.json"


def _files(source: Source) -> list[str]:
    """Return the files of boxes in a data set's folder, of instances if there are any."""
    rows = source.names()
    texts = [name for name, folder in rows if not folder and name.endswith(".json")]
    has_folders = any(folder for _, folder in rows)
    here = [
        name
        for name in texts[:_MOST_TEXTS]
        if name == "_annotations.coco.json" or (has_folders and _has_boxes(source, name))
    ]
    if (_FOLDER, True) in rows:
        below = source.files(_FOLDER)
        for prefix in (_MAIN, _KEYPOINTS, ""):
            chosen = [name for name in below if name.startswith(prefix)]
            chosen = [n for n in chosen if n.endswith(".json") and not n.startswith(_BOXLESS)]
            files = [f"{_FOLDER}/{name}" for name in chosen]
            if files and (prefix or not program_of(source, files[0])):
                return here + files
    return here


def _has_boxes(source: Source, name: str) -> bool:
    """True for annotations at the root, as LVIS has them."""
    if any(part in name for part in _BOXLESS):
        return False
    try:
        head = source.read(name, 0, _HEAD).lstrip()
    except SourceError:
        return False
    keys = (b'"images"', b'"annotations"')
    return head.startswith(b"{") and b'"bbox"' in head and any(key in head for key in keys)


def _annotation_file(path: str, split: str | None) -> tuple[str, str]:
    """Return (root folder, file of annotations below it)."""
    if own_name(path).endswith(".json"):
        if split is not None:
            raise UsageError(f"split={split!r}: {path} is one file already: leave split out")
        folder, _, name = path.rpartition("/")
        if os.path.basename(folder) == _FOLDER:
            return folder.rpartition("/")[0] or ".", f"{_FOLDER}/{name}"
        return folder or ".", name
    files = _files(Source(path))
    if split is not None:
        chosen = chosen_split(split, [_split_of(name) for name in files], path)
        return path, next(name for name in files if _split_of(name) == chosen)
    if len(files) > 1:
        raise SourceError(
            f"{path} has several files of annotations: open one of them, such as "
            f"{os.path.join(path, files[0])}, or choose with split={_split_of(files[0])!r} of "
            f"{', '.join(map(_split_of, files))}"
        )
    return path, files[0]


def _split_of(file: str) -> str:
    name = os.path.basename(file).removesuffix(".json")
    return name.removeprefix(_MAIN).removeprefix(_KEYPOINTS)


def _pictures_folder(source: Source, file: str, wanted: str | None, first: str, shown: str) -> str:
    """Return the folder, below the root, in which the first picture lies."""
    folder, split = os.path.dirname(file), _split_of(file)
    candidates = [split, f"images/{split}", "images", "", folder, f"{folder}/{split}"]
    candidates += [f"{folder}/images", "data", "train", "val", "test"]
    candidates += ["coco", "train2017", "val2017"]
    if wanted is not None:
        candidates = [wanted.strip("/")]
    for folder in candidates:
        if source.exists(f"{folder}/{first}" if folder else first):
            return folder
    tried = ", ".join(source.path(each) for each in candidates[:5])
    raise SourceError(
        f"{shown}: its first picture {first} is not in {tried}: name the folder of its pictures "
        "with pictures="
    )
