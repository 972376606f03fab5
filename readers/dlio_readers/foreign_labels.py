"""Annotations of other programs that are not read, known by the head of their files.

a.jpg, a.json                       labelme
via_region_data.json, via_export_csv.csv    VGG Image Annotator
image_2/a.png, label_2/a.txt        KITTI
images/a.png, labelTxt/a.txt        DOTA
img/a.jpg, ann/a.jpg.json           Supervisely
00000/000000000.{jpg,txt,json}      img2dataset, which has captions
"""

import re
from collections.abc import Sequence
from typing import Final

from dlio.data.interpretation import named_files
from dlio.data.source import Source
from dlio.errors import SourceError, UsageError
from dlio_readers.fileset import PICTURES

_SUFFIXES: Final = (".json", ".xml", ".csv", ".ndjson", ".txt")
_HEAD: Final = 1 << 16
_LINES: Final = 1 << 10
_COCO: Final = "export them as COCO there, or convert them to COCO or YOLO, which are read"
_PROGRAMS: Final[Sequence[tuple[str, str, tuple[bytes, ...]]]] = (
    (
        "labelme",
        "convert them by the package labelme2coco or labelme2yolo, as COCO and YOLO are read",
        (b'"shapes"', b'"imagePath"'),
    ),
    ("VGG Image Annotator", _COCO, (b'"regions"', b'"file_attributes"')),
    ("VGG Image Annotator", _COCO, (b"region_shape_attributes", b"region_attributes")),
    ("VGG Image Annotator", _COCO, (b'"project"', b'"data_format_version"')),
    ("Supervisely", _COCO, (b'"classTitle"',)),
    ("Supervisely", _COCO, (b'"objects"', b'"tags"', b'"size"')),
    ("Label Studio", _COCO, (b'"annotations"', b'"completed_by"')),
    ("Label Studio", _COCO, (b'"from_name"', b'"to_name"')),
    ("Label Studio", _COCO, (b"original_width", b"labels", b'"label"')),
    ("Label Studio", _COCO, (b"annotation_id", b"annotator", b"lead_time")),
    ("CreateML", _COCO, (b'"annotation', b'"coordinates"', b'"label"')),
    ("VoTT", _COCO, (b'"asset"', b'"regions"')),
    ("Labelbox", _COCO, (b'"data_row"',)),
    ("V7 Darwin", _COCO, (b'"bounding_box"', b'"name"', b'"item"')),
    ("BDD100K", _COCO, (b'"box2d"',)),
    ("CVAT", _COCO, (b"<annotations>", b"<image ")),
    (
        "COCO's panoptic segmentation",
        "panopticapi's panoptic2detection_coco_format.py makes COCO's boxes and masks of them, and "
        "panoptic2semantic_segmentation.py masks of classes, which are read",
        (b'"segments_info"',),
    ),
    (
        "img2dataset",
        "download as output_format='webdataset', whose tars are read with captions, or write these "
        "to labels.csv",
        (b'"key"', b'"status"', b'"url"'),
    ),
)
"""Program, the way to a format that is read, and texts in the ends of its files."""
_TEXTS: Final = (
    ("KITTI", rb"[A-Za-z_]+(?: +-?[0-9.]+){14,15} *"),
    ("DOTA", rb"(?:-?[0-9.]+ +){8}[A-Za-z][\w-]* +[0-9] *|imagesource:.*|gsd:.*"),
)
"""Data set, and its lines of boxes."""


def is_coco(head: bytes) -> bool:
    """True for the beginning of a file of COCO's annotations."""
    return head.lstrip()[:1] == b"{" and b'"images"' in head and b'"file_name"' in head


def program_of(source: Source, name: str) -> str:
    """Return the program that wrote a file of annotations; "" if none is known."""
    return _known(source, name)[0]


def foreign_words(source: Source, names: Sequence[str]) -> str:
    """Return the words about files of annotations, by the first of them that is of a known program
    or data set; "" if none is."""
    for name in names:
        program, remedy = _known(source, name)
        if program:
            return f"{named_files(names)}, annotations of {program} that are not read: {remedy}"
    return ""


def _known(source: Source, name: str) -> tuple[str, str]:
    if not name.lower().endswith(_SUFFIXES):
        return "", ""
    try:
        ends = source.read(name, 0, _HEAD)
        if len(ends) == _HEAD:  # A picture may lie in between, as in labelme's files.
            size = source.file_at(name).opened().size
            ends += source.read(name, max(_HEAD, size - _HEAD), _HEAD)
    except SourceError:
        return "", ""  # Its reader says why it cannot be read.
    if name.lower().endswith(".txt"):
        lines = [line for line in ends[:_LINES].splitlines() if line.strip()][:1]
        known = [each for each, form in _TEXTS if lines and re.fullmatch(form, lines[0])]
        return (known[0], "convert them to COCO or YOLO, which are read") if known else ("", "")
    for program, remedy, marks in _PROGRAMS:
        if all(mark in ends for mark in marks):
            return program, remedy
    return "", ""


def check_downloads(source: Source, folders: Sequence[str]) -> None:
    """Raise UsageError for folders of a download by img2dataset: they do not stand for classes."""
    first = folders[0]
    names = source.files(first)
    pictures = [name for name in names if name.lower().endswith(PICTURES)]
    if not pictures or not all(map(str.isdecimal, folders)) or not pictures[0].startswith(first):
        return
    twin = f"{first}/{pictures[0].rpartition('.')[0]}.json"
    if program_of(source, twin) == "img2dataset":
        raise UsageError(
            f"{source.path()}: {', '.join(folders[:2])} are parts of a download by img2dataset, "
            "and no classes: download as output_format='webdataset', whose tars are read with "
            f"captions, open one of them, such as {source.path(first)}, or choose "
            "layout='classes'"
        )
