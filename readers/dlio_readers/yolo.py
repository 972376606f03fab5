"""The reader of YOLO's format: images/, and labels/ with a text file for each picture; or both in
one folder (`yolo_folders`).

A line of a label file is `class x y width height`, with the middle of the box, in shares of the
picture's sides; or `class x1 y1 x2 y2 ...`, a polygon; or, where data.yaml has `kpt_shape`, a box
and its keypoints. Pictures without a label file have no boxes.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.interpretation import named_files
from dlio.data.reader_contract import PathRules
from dlio.data.source import File, Source, own_name
from dlio.errors import SourceError
from dlio.util.parallel import each_of
from dlio.util.structured_text import YamlValue, parse_yaml
from dlio.util.units import counted
from dlio_readers.annotations import (
    MAX_BOXES,
    AnnotatedReader,
    Annotations,
    check_boxes,
)
from dlio_readers.fileset import PICTURES, SideFolders, files_in, index_kind
from dlio_readers.foreign_labels import foreign_words
from dlio_readers.yolo_folders import (
    CLASSES,
    NAME_LISTS,
    TEXT,
    folders_of_split,
    label_folders,
    texts_of_pictures,
    why_no_boxes,
)
from dlio_readers.yolosplits import NULLS, YoloSplit, has_labels, label_of, split_lists, yolo_split

_YAML: Final = (".yaml", ".yml")
_TRAIN_LIST: Final = "train.txt"
"""A list of pictures, which some programs write next to labels."""
_HEAD: Final = 1 << 12
_MOST_LABELS: Final = 64 << 20
_MOST_YAML: Final = 1 << 20
_MOST_CLASSES: Final = 1 << 16
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_THREADS: Final = 32


class YoloReader(AnnotatedReader):
    """Read pictures, boxes, polygons and keypoints of a data set for YOLO.

    Args:
        path: its folder, its data.yaml, or the folder of pictures of one split. Texts may also lie
            next to their pictures.
        split: which of several splits, such as `train`, of data.yaml or of folders; `all` for all
            that data.yaml names.
        masks: give a mask of each polygon; of each box that has none, its own area.
        outside: `error` for a box that lies outside of its picture, or `clip`.

    Raises SourceError, with file and line, for labels that are damaged.
    """

    format = "yolo"
    path_rules = PathRules(one_path=True)

    def __init__(
        self,
        path: str,
        split: str | None = None,
        masks: bool = False,
        outside: Literal["error", "clip"] = "error",
    ) -> None:
        listed = _listed_split(path, split)
        if listed is not None:
            sides = SideFolders(_folder_of(path), "images", "labels")
            kind = index_kind("yolo", listed, masks, outside)
            source = Source(sides.root)
        else:
            sides = folders_of_split(label_folders(path := _folder_of(path)), path, split)
            source = Source(sides.root)
            kind = index_kind("yolo", sides.images, masks, outside)
        super().__init__(source, kind, lambda: _annotations(source, sides, masks, outside, listed))

    @staticmethod
    def recognises(path: str) -> str | None:
        folder = _folder_of(path)
        if own_name(path).endswith(_YAML):
            is_data = bool(label_folders(folder)) or _names_labels(folder, [own_name(path)])
            return None if is_data else "is a YAML file without images and labels next to it"
        for _, sides in label_folders(path):
            source = Source(sides.root)
            if any(map(partial(_may_be_boxes, source), _texts_in(source, sides.others))):
                return None
        source = Source(path)
        rows = source.names() if source.is_folder() else []
        if _names_labels(path, _yamls(name for name, inner in rows if not inner)):
            return None
        texts = texts_of_pictures(source, "")[0] if rows else []
        doubt = why_no_boxes(source, texts)
        if doubt:
            return doubt
        return "has no folders images and labels with text files, nor such texts next to pictures"


def _names_labels(path: str, yamls: Sequence[str]) -> bool:
    """True if a data.yaml in a folder names pictures that have label files."""
    source = Source(path)
    for name in yamls:
        try:
            whole = _parsed_yaml(source, name)
        except SourceError:
            continue
        if isinstance(whole, dict) and "names" in whole:
            return has_labels(source, whole)
    return False


def _texts_in(source: Source, folder: str) -> Iterable[str]:
    """Return the texts at and below a folder; of the whole data set, those in it."""
    return files_in(source, folder, TEXT) if folder else _here(source, TEXT)


def _here(source: Source, suffixes: tuple[str, ...]) -> list[str]:
    rows = source.names()
    return [name for name, inner in rows if not inner and name.lower().endswith(suffixes)]


def _may_be_boxes(source: Source, name: str) -> bool:
    """True unless a text is a list of pictures, such as the splits of a data set."""
    try:
        first = source.read(name, 0, _HEAD).split(maxsplit=1)[:1]
    except SourceError:
        return True  # The reader says why it cannot be read.
    return not any(word.decode("utf-8", "replace").lower().endswith(PICTURES) for word in first)


def _folder_of(path: str) -> str:
    return (path.rpartition("/")[0] or ".") if own_name(path).endswith(_YAML) else path


@dataclass(frozen=True, slots=True)
class _DataDescription:
    """Names and keypoints, of data.yaml or classes.txt."""

    names: list[str] = field(default_factory=list)
    points: tuple[int, int] | None = None
    """Keypoints of a box, and numbers of each: 2 or 3."""
    pairs: list[int] | None = None
    files: list[File] = field(default_factory=list)


def _listed_split(path: str, split: str | None) -> YoloSplit | None:
    """Return the split of the data.yaml in a folder; None where it names none of the folder's."""
    source = Source(_folder_of(path))
    if own_name(path).endswith(_YAML):
        yamls = [path.rsplit("/", 1)[-1]]
    else:
        yamls = _yamls(name for name, folder in source.names() if not folder)
    for name in yamls:
        whole = _parsed_yaml(source, name)
        if isinstance(whole, dict) and "names" in whole:
            return yolo_split(source, name, whole, split)
    if yamls or not label_folders(path):
        return None
    lists = split_lists(source, _here(source, TEXT))
    # One list alone may be there by chance, as of CVAT; it is read if it is chosen.
    return yolo_split(source, "", lists, split) if split or len(lists) > 1 else None


def _yamls(names: Iterable[str]) -> list[str]:
    """Return the YAML files among some names, data.yaml before others."""
    yamls = [name for name in names if name.endswith(_YAML)]
    return sorted(yamls, key=lambda name: (not name.startswith(("data", "dataset")), name))


def _annotations(
    source: Source, sides: SideFolders, masks: bool, outside: str, listed: YoloSplit | None
) -> Annotations:
    described = _described(source, sides)
    doubts: list[str] = []
    if listed is not None:
        pictures = list(listed.pictures)
        notes = [label_of(name) for name in pictures]
        places = {os.path.dirname(name) for name in notes}
        places = {place for place in places if source.is_folder(place)}
        labels = {name for place in places for name in files_in(source, place, TEXT)}
    else:
        pictures = (
            list(files_in(source, sides.images, PICTURES))
            if sides.images
            else _here(source, PICTURES)
        )
        labels = set(_texts_in(source, sides.others))
        notes = [sides.other(name, ".txt") for name in pictures]
        lost = sorted(labels.difference(notes))
        lost = [name for name in lost if name.rpartition("/")[2] not in (CLASSES, _TRAIN_LIST)]
        if lost and len(lost) < len(labels):
            doubts = [
                f"{source.path(sides.others)}: {named_files(lost)} left out: {sides.images} has "
                "no picture of the name"
            ]
    if not pictures:
        raise SourceError(f"{source.path(sides.images)} holds no pictures")
    own = [note if note in labels else None for note in notes]
    if not any(own):
        raise SourceError(
            f"{source.path(sides.others)}: none of its {len(labels)} label files has the name of a "
            f"picture, such as {notes[0]}"
        )
    parts = each_of(
        lambda note: _parsed(source, note, described, outside) if note else _Label(),
        own,
        _THREADS,
        source.path(sides.others),
    )
    numbers = np.concatenate([part.labels for part in parts])
    classes = described.names
    if len(numbers) and int(numbers.max()) >= len(classes):
        if classes:
            k = next(
                k for k, part in enumerate(parts) if part.labels.max(initial=0) >= len(classes)
            )
            raise SourceError(
                f"{source.path(notes[k])}: class {int(parts[k].labels.max())}, and "
                f"{described.files[0].name} names only {len(classes)}: correct either"
            )
        classes = [str(number) for number in range(int(numbers.max()) + 1)]
    folders = {os.path.dirname(name) for name in (*pictures, *filter(None, own))}
    made = Annotations(
        pictures,
        np.array([len(part.labels) for part in parts], np.int64),
        np.concatenate([part.boxes for part in parts]).astype(np.float32),
        numbers,
        list(classes),
        relative=True,
        files=described.files,
        folders=sorted(folders),
        notes=[note for note in own if note is not None],
        doubts=doubts,
    )
    if described.points is not None:
        made.keypoints = np.concatenate([part.keypoints for part in parts]).astype(np.float32)
        made.pairs = described.pairs
    if masks:
        made.segments = [part.segments for part in parts]
    return made


@dataclass(slots=True)
class _Label:
    """The boxes of one picture, in shares of its sides."""

    labels: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    boxes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 4)))
    keypoints: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 3)))
    segments: str = "[]"


def _parsed(source: Source, name: str, described: _DataDescription, outside: str) -> _Label:
    """Parse a label file. Raises SourceError with its line."""
    shown = source.path(name)
    data = source.read(name, 0, _MOST_LABELS + 1)
    if len(data) > _MOST_LABELS:
        raise SourceError(f"{shown} has over {_MOST_LABELS} bytes: it is not a label file")
    points, width = described.points or (0, 0)
    labels: list[int] = []
    boxes: list[list[float]] = []
    keypoints: list[list[list[float]]] = []
    shapes: list[list[float]] = []
    lines: list[int] = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        where = f"{shown}, line {number}"
        shape: list[float] = []
        try:
            first, *rest = [float(word) for word in words]
        except ValueError as error:
            if known := foreign_words(source, [name]):
                raise SourceError(f"{source.path()}: {known}") from error
            raise SourceError(f"{where}: {error}: correct it") from error
        if not all(map(math.isfinite, (first, *rest))):
            raise SourceError(f"{where}: it has numbers that are not finite: correct it")
        if first < 0 or first != int(first) or first >= _MOST_CLASSES:
            raise SourceError(f"{where}: {words[0][:20]} is not the number of a class: correct it")
        count = len(rest)
        if points and count == 4 + points * width:
            box = _edges(rest[:4])
            rows = [rest[4 + k * width : 4 + (k + 1) * width] for k in range(points)]
            keypoints.append([row if width == 3 else [*row, 2.0] for row in rows])
        elif count == 4 and not points:
            box = _edges(rest)
        elif count >= 6 and count % 2 == 0 and not points:
            box = [min(rest[::2]), min(rest[1::2]), max(rest[::2]), max(rest[1::2])]
            shape = rest
        else:
            wanted = (
                f"4 and {counted(points, 'keypoint')} of {width}"
                if points
                else "4, or of a polygon"
            )
            raise SourceError(f"{where}: it has {count} numbers after the class, not {wanted}")
        labels.append(int(first))
        boxes.append(box)
        shapes.append(shape)
        lines.append(number)
    if len(boxes) > MAX_BOXES:
        raise SourceError(f"{shown} has {counted(len(boxes), 'box')}, over {MAX_BOXES}")
    sides = np.ones((len(boxes), 2))
    checked = check_boxes(
        np.array(boxes, np.float64).reshape(-1, 4),
        sides,
        outside,
        lambda k: f"{shown}, line {lines[k]}",
    )
    stay = np.flatnonzero((checked[:, 2:] > checked[:, :2]).all(axis=1))
    polygons = ",".join(
        f'{{"relative":[[{",".join(f"{n:.6g}" for n in shapes[k] or _corners(boxes[k]))}]]}}'
        for k in stay.tolist()
    )
    return _Label(
        np.array(labels, np.int64)[stay],
        checked[stay],
        np.array(keypoints, np.float64).reshape(-1, points, 3)[stay]
        if points
        else np.zeros((0, 0, 3)),
        f"[{polygons}]",
    )


def _edges(box: list[float]) -> list[float]:
    x, y, width, height = box
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def _corners(box: list[float]) -> list[float]:
    left, top, right, bottom = box
    return [left, top, right, top, right, bottom, left, bottom]


def _described(source: Source, sides: SideFolders) -> _DataDescription:
    """Read data.yaml, or a list of names such as classes.txt, at the root, next to the folders of a
    split or among the labels."""
    beside = os.path.dirname(sides.images)
    for folder in dict.fromkeys(["", beside, sides.others]):
        if folder and not source.is_folder(folder):
            continue  # Of splits that data.yaml names, each has labels of its own.
        names = source.files(folder)
        for name in _yamls(names):
            path = f"{folder}/{name}" if folder else name
            made = _read_yaml(source, path)
            if made is not None:
                return made
        lists = [name for name in names if name == CLASSES or name.endswith(NAME_LISTS)]
        if lists:
            path = f"{folder}/{lists[0]}" if folder else lists[0]
            lines = source.read(path, 0, _MOST_YAML).decode("utf-8-sig", "replace").splitlines()
            named = [line.strip() for line in lines if line.strip()]
            return _DataDescription(named, files=[source.file(path)])
    return _DataDescription()


def _read_yaml(source: Source, name: str) -> _DataDescription | None:
    """Read names and keypoints; None if the file has no names. Raises SourceError."""
    shown = source.path(name)
    whole = _parsed_yaml(source, name)
    if not isinstance(whole, dict) or "names" not in whole:
        return None
    names = whole["names"]
    if isinstance(names, dict):
        numbers = [
            number if _NUMBER.fullmatch(key) and (number := int(key)) < _MOST_CLASSES else -1
            for key in names
        ]
        if min(numbers, default=0) < 0:
            raise SourceError(f"{shown}: its names are not numbered from 0: correct it")
        by_number = dict(zip(numbers, names.values(), strict=True))
        names = [by_number.get(k, "") for k in range(max(numbers, default=-1) + 1)]
    texts = [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
    if not isinstance(names, list) or len(texts) < len(names):
        raise SourceError(f"{shown}: its names are not a list of names: correct it")
    count = whole.get("nc", "")
    is_list = isinstance(whole["names"], list)
    if is_list and isinstance(count, str) and count.isdecimal() and int(count) != len(names):
        raise SourceError(f"{shown}: its nc is {count}, and it has {len(names)} names: correct it")
    points, pairs = None, None
    if whole.get("kpt_shape", "") not in NULLS:
        shape = _whole_numbers(whole["kpt_shape"], 256)
        if shape is None or len(shape) != 2 or not shape[0] or shape[1] not in (2, 3):
            raise SourceError(f"{shown}: kpt_shape is not [keypoints, 2 or 3]: correct it")
        points = shape[0], shape[1]
        if whole.get("flip_idx", "") not in NULLS:
            pairs = _whole_numbers(whole["flip_idx"], shape[0])
            if pairs is None or sorted(pairs) != list(range(shape[0])):
                raise SourceError(f"{shown}: flip_idx is not the numbers 0 to {shape[0] - 1}")
    return _DataDescription(texts, points, pairs, [source.file(name)])


def _whole_numbers(value: YamlValue, bound: int) -> list[int] | None:
    """Return a list of numbers below a bound; None for anything else."""
    if not isinstance(value, list):
        return None
    numbers = [
        int(each)
        for each in value
        if isinstance(each, str) and _NUMBER.fullmatch(each) and int(each) < bound
    ]
    return numbers if len(numbers) == len(value) else None


def _parsed_yaml(source: Source, name: str) -> YamlValue | None:
    return parse_yaml(source.read(name, 0, _MOST_YAML + 1), source.path(name), _MOST_YAML)
