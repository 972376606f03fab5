"""The reader of Pascal VOC's boxes: an XML file for each picture, in layouts of `voc_folders`.

    <annotation>
      <size><width>500</width><height>375</height></size>
      <object>
        <name>dog</name> <truncated>0</truncated> <difficult>0</difficult>
        <bndbox><xmin>1</xmin><ymin>1</ymin><xmax>500</xmax><ymax>375</ymax></bndbox>
      </object>
    </annotation>

Pixels count from 1, and a box has its last pixel: this one is the whole picture. As edges, as other
readers give them, it is 0, 0, 500, 375.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.interpretation import named_files
from dlio.data.labels import is_number, whole_number
from dlio.data.reader_contract import Fit, PathRules
from dlio.data.source import Source, inside
from dlio.data.splits import WHOLE
from dlio.errors import SourceError, UsageError
from dlio.image.segmentation_masks import decode_mask, run_lengths
from dlio.util.parallel import each_of
from dlio.util.structured_text import parse_xml
from dlio.util.units import counted
from dlio_readers.annotations import MAX_BOXES, AnnotatedReader, Annotations, check_boxes
from dlio_readers.fileset import PICTURES, SideFolders, index_kind
from dlio_readers.voc_folders import (
    OBJECT_FOLDER,
    XML,
    chosen_of,
    files_by_stem,
    listed_in,
    lists_of,
    note_folders,
    years_in,
)

_MOST_XML: Final = 8 << 20
_THREADS: Final = 32
_SIZE: Final = ("size/width", "size/height")
_OBJECT: Final = "object"
_NAME: Final = "object/name"
_EDGES: Final = tuple(f"object/bndbox/{name}" for name in ("xmin", "ymin", "xmax", "ymax"))
_FLAGS: Final = ("difficult", "truncated")
_FLAG_WORDS: Final = {"true": 1, "yes": 1, "false": 0, "no": 0, "unspecified": 0, "": 0}
_MOST_MASK: Final = 64 << 20
_NO_OBJECT: Final = 255
"""Number of pixels at the edges of objects, which belong to none."""
_OUTLINES: Final = ("object/polygon", "object/robndbox")
_WANTED: Final = frozenset(
    (*_SIZE, _OBJECT, _NAME, *_EDGES, *(f"object/{name}" for name in _FLAGS), *_OUTLINES)
)


_REASON: Final = "has no pictures with XML files of Pascal VOC next to them, or in Annotations"


class VocReader(AnnotatedReader):
    """Read pictures and boxes of Pascal VOC, and whether these are `difficult` and `truncated`.

    Classes are the names of objects in all XML files of the data set, sorted, so that they are the
    same in all splits. Flags that a file lacks are 0.

    Args:
        path: the folder with `JPEGImages` and `Annotations`, or with `images` and `annotations`, or
            of pictures with XML files next to them.
        split: which of several splits, by `ImageSets/Main` or by folders, or `all`.
        outside: `error` for a box that lies outside of its picture, or `clip`.
        masks: give a mask of each box, out of `SegmentationObject`, whose number n is the n-th
            object of the XML file; the pictures are those of `ImageSets/Segmentation`.
        first_pixel: number of the first pixel of a row: 1 as in Pascal VOC, whose boxes have their
            last pixel, or 0 for boxes that are edges as they stand.

    Raises SourceError, with the file and the number of the object, for annotations that are
    damaged.
    """

    format = "voc"
    path_rules = PathRules(one_path=True)

    def __init__(
        self,
        path: str,
        split: str | None = None,
        outside: Literal["error", "clip"] = "error",
        first_pixel: int = 1,
        masks: bool = False,
    ) -> None:
        if first_pixel not in (0, 1):
            raise UsageError(f"first_pixel={first_pixel!r}: give 1 or 0")
        years = years_in(path)
        if years:
            raise UsageError(
                f"{path} holds the data sets {', '.join(years)}: open one of them, such as "
                f"{inside(path, years[-1])}, or several by a list"
            )
        every = note_folders(path)
        if not every:
            raise SourceError(f"{path} {_REASON}")
        source = Source(every[0][1].root)
        if masks and not source.is_folder(OBJECT_FOLDER):
            raise UsageError(
                f"masks=True: {path} has no folder {OBJECT_FOLDER}, of whose numbers masks are made"
            )
        kind = "Segmentation" if masks else "Main"
        lists = lists_of(source, kind) if [name for name, _ in every] == [""] else {}
        chosen = chosen_of(list(lists) or [name for name, _ in every], split, path)
        options = (every, lists and chosen, chosen, outside, first_pixel, masks)

        def build() -> Annotations:
            files = [lists[name] for name in chosen] if lists else []
            parts = [each for each in every if lists or each[0] in chosen]
            notes = _NoteFiles(source, [each for _, each in every], first_pixel)
            is_whole = split in (None, WHOLE)
            return notes.annotations([each for _, each in parts], files, outside, is_whole, masks)

        super().__init__(source, index_kind("voc", options), build)

    @staticmethod
    def recognises(path: str) -> str | None:
        if years_in(path):
            return None  # Which are not classes.
        for _, sides in note_folders(path):
            source = Source(sides.root)
            if any(True for _ in files_by_stem(source, sides.others, XML)):
                return None
        return _REASON

    @staticmethod
    def fit(path: str, _: Mapping[str, object]) -> Fit:
        """Return how well a folder fits."""
        years = years_in(path)
        if years:
            return Fit(f"the data sets {', '.join(years)} of Pascal VOC", 1, is_marked=True)
        every = note_folders(path)
        if not every:  # The format is chosen, and the reader says what is missing.
            return Fit("Pascal VOC", 1, is_marked=True)
        sides = every[0][1]
        where = f"{sides.images} with boxes in {sides.others}" if sides.images else "a folder"
        where = where if sides.images != sides.others else "folders with boxes next to them"
        return Fit(f"pictures of Pascal VOC in {where}", 1, is_marked=True)


@dataclass(frozen=True, slots=True)
class _Note:
    """The objects of one XML file."""

    sides: tuple[float, float]
    """Width and height of the picture; NaN if unknown."""
    names: list[str]
    boxes: npt.NDArray[np.float64]
    """Edges, as the file has them: first column and row, last column and row; shape (n, 4)."""
    flags: npt.NDArray[np.uint8]
    """Shape (n, 2)."""
    outlines: int
    """Objects that have an outline or a turned box, too."""


class _NoteFiles:
    """The XML files of a data set, in several folders."""

    def __init__(self, source: Source, every: Sequence[SideFolders], first_pixel: int) -> None:
        self._source, self._first_pixel = source, first_pixel
        self._doubts: list[str] = []
        self._pictures: dict[SideFolders, dict[str, list[str]]] = {}
        by_folder = {each.others: files_by_stem(source, each.others, XML) for each in every}
        self._files = {
            folder: {stem: files[0] for stem, files in stems.items()}
            for folder, stems in by_folder.items()
        }
        names = [name for files in self._files.values() for name in files.values()]
        shown = source.path(every[0].others)
        if not names:
            raise SourceError(f"{shown} holds no XML files")
        notes = each_of(lambda name: _parsed(source, name), names, _THREADS, shown)
        self._notes = dict(zip(names, notes, strict=True))
        outlines = sum(note.outlines for note in notes)
        if outlines:
            self._doubts.append(
                f"{shown}: {counted(outlines, 'object')} with a polygon or a turned box: only "
                "bndbox is read"
            )

    def annotations(
        self,
        parts: Sequence[SideFolders],
        lists: Sequence[str],
        outside: str,
        is_whole: bool,
        masks: bool,
    ) -> Annotations:
        """Return the annotations of the pictures in some folders, or of those that lists name, by
        choice unless `is_whole`."""
        pictures: list[str] = []
        files: list[str] = []
        for sides in parts:
            for stem in self._stems(sides, lists, is_whole):
                pictures.append(self._picture(sides, stem))
                files.append(self._files[sides.others][stem])
        notes = [self._notes[file] for file in files]
        classes = sorted({name for note in self._notes.values() for name in note.names})
        number = {name: k for k, name in enumerate(classes)}
        counts = np.array([len(note.names) for note in notes], np.int64)
        labels = np.array([number[name] for note in notes for name in note.names], np.int64)
        sides_of = np.array([note.sides for note in notes], np.float64).reshape(-1, 2)
        boxes = np.concatenate([note.boxes for note in notes])
        if self._first_pixel:
            boxes[:, :2] -= 1
            self._note_zeros(boxes, np.repeat(np.arange(len(files)), counts), files)
        owner = np.repeat(np.arange(len(notes)), counts)
        firsts = np.cumsum(counts) - counts

        def where(row: int) -> str:
            k = int(owner[row])
            return f"{self._source.path(files[k])}, object {row - int(firsts[k]) + 1}"

        edges = check_boxes(boxes, sides_of[owner], outside, where)
        stay = np.flatnonzero((edges[:, 2:] > edges[:, :2]).all(axis=1))
        flags = np.concatenate([note.flags for note in notes])[stay]
        segments, drawn = None, list[str]()
        if masks:
            segments, drawn = self._segments(files, counts, np.isin(np.arange(len(owner)), stay))
        every = [name for own in self._files.values() for name in own.values()]
        folders = {os.path.dirname(name) for name in (*pictures, *every, *lists)}
        return Annotations(
            pictures,
            np.bincount(owner[stay], minlength=len(notes)).astype(np.int64),
            edges[stay].astype(np.float32),
            labels[stay],
            classes,
            flags={f"box_{name}": flags[:, k].copy() for k, name in enumerate(_FLAGS)},
            declared=np.nan_to_num(sides_of[:, ::-1]).astype(np.int64),
            files=[self._source.file(name) for name in lists],
            folders=sorted(folders),
            notes=[*every, *drawn],
            segments=segments,
            doubts=self._doubts,
        )

    def _segments(
        self, files: Sequence[str], counts: npt.NDArray[np.int64], stay: npt.NDArray[np.bool_]
    ) -> tuple[list[str], list[str]]:
        """Return (JSON of the masks of each picture's boxes that stay, the files of the masks)."""
        stems = files_by_stem(self._source, OBJECT_FOLDER, PICTURES)
        drawn: list[str] = []
        for file in files:
            stem = os.path.splitext(os.path.basename(file))[0]
            if stem not in stems:
                raise SourceError(
                    f"{self._source.path(file)} has no mask {OBJECT_FOLDER}/{stem}.png: copy it, "
                    "or leave masks=True out"
                )
            drawn.append(stems[stem][0])
        shapes = each_of(
            lambda k: _shapes_in(self._source, drawn[k], int(counts[k])),
            range(len(drawn)),
            _THREADS,
            self._source.path(OBJECT_FOLDER),
        )
        ends = np.cumsum(counts).tolist()
        kept = [
            [each for each, is_kept in zip(own, stay[end - len(own) : end], strict=True) if is_kept]
            for own, end in zip(shapes, ends, strict=True)
        ]
        return [json.dumps(own, separators=(",", ":")) for own in kept], drawn

    def _stems(self, sides: SideFolders, lists: Sequence[str], is_whole: bool) -> list[str]:
        """Return the names of the pictures that are read, without suffix. Notes others to tell."""
        source, known = self._source, self._files[sides.others]
        if lists:
            wanted = f"XML file in {sides.others}"
            # A picture of several lists, such as train and trainval, is one sample.
            named = [stem for each in lists for stem in listed_in(source, each, known, wanted)]
            others = sorted(known.keys() - set(named))
            if others and is_whole:
                words = named_files([known[stem] for stem in others])
                self._doubts.append(
                    f"{source.path()}: {words} left out: no list in ImageSets has it"
                )
            return list(dict.fromkeys(named)) if len(lists) > 1 else named
        pictures = files_by_stem(source, sides.images, PICTURES)
        left = [files[0] for stem, files in sorted(pictures.items()) if stem not in known]
        if left:
            self._doubts.append(
                f"{source.path(sides.images)}: {named_files(left)} left out: no XML file in "
                f"{sides.others or 'the folder'} has the name; one without <object> has no boxes"
            )
        return sorted(known)

    def _picture(self, sides: SideFolders, stem: str) -> str:
        """Return the picture of an XML file; the name that it would have, if it is not there."""
        if sides not in self._pictures:
            self._pictures[sides] = files_by_stem(self._source, sides.images, PICTURES)
        files = self._pictures[sides].get(stem, [])
        if len(files) > 1:
            raise SourceError(
                f"{self._source.path(files[0])} and {files[1]} have one name, and an XML file for "
                "both: rename one of them, and its XML file"
            )
        return files[0] if files else f"{sides.images}/{stem}.jpg".lstrip("/")

    def _note_zeros(
        self, boxes: npt.NDArray[np.float64], owner: npt.NDArray[np.intp], files: Sequence[str]
    ) -> None:
        """Note boxes that begin before the first pixel, to tell."""
        rows = np.flatnonzero((boxes[:, :2] < 0).any(axis=1))
        if len(rows):
            self._doubts.append(
                f"{self._source.path(files[owner[rows[0]]])}: of the data set, "
                f"{counted(len(rows), 'box')} beginning at pixel 0, where Pascal VOC counts from "
                "1: if its boxes count from 0, give first_pixel=0"
            )


def _parsed(source: Source, name: str) -> _Note:
    """Parse an XML file. Raises SourceError with the number of the object."""
    shown = source.path(name)
    root, values = parse_xml(source.read(name, 0, _MOST_XML + 1), shown, _MOST_XML, _WANTED)
    if root != "annotation":
        raise SourceError(f"{shown} is XML of <{root[:40]}>, not an <annotation> of Pascal VOC")
    picture: dict[str, str] = {}
    objects: list[dict[str, str]] = []
    for path, text in values:
        if path == _OBJECT:
            objects.append({})
        # As by ElementTree, the first element of a name counts.
        (objects[-1] if path.startswith(_OBJECT) else picture).setdefault(path, text)
    if len(objects) > MAX_BOXES:
        raise SourceError(f"{shown} has {counted(len(objects), 'box')}, over {MAX_BOXES}")
    sides = [_number(picture.get(path, "0"), f"{shown}: its {path}") for path in _SIZE]
    names, boxes, flags = [], [], []
    for number, each in enumerate(objects, 1):
        where = f"{shown}, object {number}"
        if not each.get(_NAME):
            raise SourceError(f"{where} has no name: correct it")
        lost = [path for path in _EDGES if path not in each]
        if lost:
            raise SourceError(f"{where} has no {lost[0].removeprefix('object/')}: correct it")
        box = [_number(each[path], f"{where}: its {path.rpartition('/')[2]}") for path in _EDGES]
        if box[2] < box[0] or box[3] < box[1]:
            raise SourceError(f"{where}: its box ends before it begins: correct it")
        own = [each.get(f"object/{flag}", "0") for flag in _FLAGS]
        for flag, text in zip(_FLAGS, own, strict=True):
            if _flag(text) is None:
                raise SourceError(f"{where}: its {flag} is {text[:40]!r}, not 0 or 1: correct it")
        names.append(each[_NAME])
        boxes.append(box)
        flags.append([_flag(text) for text in own])
    known = all(side > 0 and side.is_integer() for side in sides)
    return _Note(
        (sides[0], sides[1]) if known else (math.nan, math.nan),
        names,
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(flags, np.uint8).reshape(-1, 2),
        sum(any(path in each for path in _OUTLINES) for each in objects),
    )


def _shapes_in(source: Source, name: str, count: int) -> list[dict[str, object]]:
    """Return the masks of the objects of a picture, as COCO's run lengths; 255 belongs to none.

    Raises SourceError for the number of an object that the XML file does not have.
    """
    numbers = decode_mask(source.read(name, 0, _MOST_MASK), source.path(name))
    most = int(numbers[numbers != _NO_OBJECT].max(initial=0))
    if most > count:
        raise SourceError(
            f"{source.path(name)} has the number {most}, and the XML file "
            f"{counted(count, 'object')}: make both agree"
        )
    size = list(numbers.shape)
    return [{"size": size, "counts": run_lengths(numbers == k + 1)} for k in range(count)]


def _flag(text: str) -> int | None:
    """Return 1 or 0 for a flag as programs write it, 0 for nothing; None for other texts."""
    number = whole_number(text)
    return number if number in (0, 1) else _FLAG_WORDS.get(text.lower())


def _number(text: str, what: str) -> float:
    if not is_number(text) or not math.isfinite(float(text)):
        raise SourceError(f"{what} is {text[:40]!r}, not a number: correct it")
    return float(text)
