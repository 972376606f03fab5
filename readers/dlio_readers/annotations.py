"""Pictures with boxes, as the readers of annotation formats share them.

A reader of a format lists `Annotations`; this module keeps them in an index, checks that the files
are the ones that were listed, and makes payloads of the fields of `dlio.loader.picture_targets`.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.boxes import by_name
from dlio.data.index import Arrays
from dlio.data.index_memory import Names
from dlio.data.reader_contract import Abilities
from dlio.data.schema import Schema
from dlio.data.source import File, Source, file_at
from dlio.errors import DecodeError, SourceError
from dlio.image.decoder import image_size
from dlio.image.file_headers import stored_places
from dlio.plan.layout import STORAGE_SEED, shuffled_layout
from dlio.util.printable import tell_once
from dlio.util.structured_text import parse_json
from dlio_readers.fileset import FileSet, ListedReader
from dlio_readers.path_reader import PathReader
from dlio_readers.turned_pictures import TurnedPictures

MAX_BOXES: Final = 1 << 16
"""Boxes of one picture, at most."""
_MOST_SHARE: Final = 4
"""Sides of its picture that a box may reach to, which is cut off then; pixels are more."""
_BEYOND: Final = 0.01
"""Share of a picture's side by which a box may reach beyond it: it is cut off without an error."""
_BEYOND_PIXELS: Final = 2.0
_SIDE: Final = re.compile(r"(?<![a-z])(left|right|l|r)(?![a-z])", re.IGNORECASE)
_OTHER: Final = {"left": "right", "right": "left", "l": "r", "r": "l"}


@dataclass(slots=True)
class Annotations:
    """The annotations of some pictures, n together with m boxes in the order of the pictures."""

    names: list[str]
    """Files of the pictures, below the source's root."""
    counts: npt.NDArray[np.int64]
    """Boxes of each picture; shape (n,)."""
    boxes: npt.NDArray[np.float32]
    """Left, top, right, bottom in pixels, or in shares of the sides; shape (m, 4)."""
    labels: npt.NDArray[np.int64]
    """Class of each box; shape (m,)."""
    classes: list[str]
    relative: bool = False
    """True if coordinates are shares of width and height."""
    keypoints: npt.NDArray[np.float32] | None = None
    """x, y, visibility; shape (m, k, 3)."""
    pairs: list[int] | None = None
    """Number of each keypoint's other side; k numbers."""
    segments: list[str] | None = None
    """JSON of the segments of each picture."""
    flags: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """0 or 1 for each box, by field, such as `box_iscrowd`; each of shape (m,)."""
    ids: npt.NDArray[np.int64] | None = None
    """Number of each picture in its file; shape (n,)."""
    declared: npt.NDArray[np.int64] | None = None
    """Height and width of each picture by its file, 0 if unknown; shape (n, 2)."""
    files: list[File] = field(default_factory=list)
    """The files of annotations."""
    folders: list[str] = field(default_factory=list)
    """Folders whose listings matter, below the source's root."""
    notes: list[str] = field(default_factory=list)
    """Files of annotations of single pictures, below the source's root."""
    doubts: list[str] = field(default_factory=list)
    """Files that are left out, and other doubts: each is told when the data set is opened."""


class AnnotatedReader(ListedReader, PathReader):
    """Samples of pictures and their boxes, whose annotations `build` lists.

    `kind` names the index, with the options that it depends on.
    """

    version = 2
    prefixes = ("", "note_")

    def __init__(self, source: Source, kind: str, build: Callable[[], Annotations]) -> None:
        self._build, self._turns = build, TurnedPictures()
        index, head = self._open(source, kind)
        self.schema = Schema(tuple((name, kind) for name, kind in head["fields"]))
        self._index, self._relative = index, bool(head["relative"])
        self._pairs: list[int] | None = head["pairs"]
        self._flags: list[str] = head["flags"]
        for text in head["doubts"]:
            tell_once(text)
        self._segments = None
        if "segments" in index:
            self._segments = Names(index["segments"], index["segment_ends"])
        self._ends = np.concatenate([[0], index["box_ends"]]).astype(np.int64)
        self.labels = np.zeros(len(self._files), np.int64)
        self.sizes = self._payload_sizes()
        self.layout = shuffled_layout(self.sizes)

    @property
    def abilities(self) -> Abilities:
        # Not an attribute: it would refer to the reader, which is to go with its last user.
        return Abilities(box_counts=self._box_counts)

    def _box_counts(self) -> dict[str, int]:
        return by_name(self.classes, np.bincount(self._index["box_labels"]))

    def _read(self, sample: int) -> bytes | memoryview:
        picture = self._content(self._files, sample)
        doing = "turns their annotations" if self._relative else "takes their annotations"
        turn = self._turns.of(picture, self._files.path(sample), doing)
        index = self._index
        mine = slice(int(self._ends[sample]), int(self._ends[sample + 1]))
        values: dict[str, Any] = {
            "image": picture,
            "boxes": self._in_pixels(sample, picture, index["boxes"][mine], turn),
            "box_labels": index["box_labels"][mine],
        }
        if "keypoints" in index:
            values["keypoints"] = self._in_pixels(sample, picture, index["keypoints"][mine], turn)
        if self._pairs is not None:
            values["keypoint_pairs"] = np.array(self._pairs, np.uint8)
        if self._segments is not None:
            shown = turn if self._relative else 1
            values["segments"] = _turned_segments(self._segments[sample], shown)
        values.update({name: index[name][mine] for name in self._flags})
        if "ids" in index:
            values["image_id"] = int(index["ids"][sample])
        return self.schema.join(values)

    def _in_pixels(
        self,
        sample: int,
        picture: bytes | memoryview,
        values: npt.NDArray[np.float32],
        turn: int,
    ) -> npt.NDArray[np.float32]:
        """Return coordinates in pixels of the picture, whose size must be the declared one; those
        in shares are of the picture as the orientation `turn` shows it."""
        declared = self._index["declared"][sample].tolist() if "declared" in self._index else [0, 0]
        # Of JPEG and PNG a few bytes tell the size.
        is_quick = bytes(picture[:2]) in (b"\xff\xd8", b"\x89P")
        if not self._relative and not (all(declared) and is_quick):
            return values
        try:
            height, width = image_size(picture, self.name(sample))
        except DecodeError:
            return values  # Damage is found, and reported, when the picture is decoded.
        if not self._relative:
            if [height, width] != declared:
                raise SourceError(
                    f"{self._files.path(sample)} has {width} x {height} pixels, and its "
                    f"annotations are for {declared[1]} x {declared[0]}: restore the picture that "
                    "was annotated; turning by EXIF is not applied"
                )
            return values
        if turn != 1:
            values = _turned_back(values, turn)
        scale = [width, height, 1] if values.ndim == 3 else [width, height, width, height]
        return (values * np.array(scale, np.float32)).astype(np.float32)

    def _payload_sizes(self) -> npt.NDArray[np.int64]:
        counts = np.diff(self._ends)
        bodies = {"image": self._files.sizes, "boxes": 16 * counts, "box_labels": 8 * counts}
        if "keypoints" in self._index:
            bodies["keypoints"] = 12 * self._index["keypoints"].shape[1] * counts
        if self._segments is not None:
            bodies["segments"] = np.diff(self._segments.ends, prepend=0)
        bodies.update(dict.fromkeys(self._flags, counts))
        return self.schema.payload_sizes(len(counts), bodies)

    def _fits(self, index: Arrays, head: dict[str, Any]) -> bool:
        return len(index["box_ends"]) == len(index["name_ends"]) and all(
            file_at(url).opened().state == state for url, state in head["states"].items()
        )

    def _list(self) -> tuple[Arrays, bool]:
        started, source = time.time(), self._source
        made = self._build()
        if not made.names:
            raise SourceError(f"{self.path} has annotations of no picture")
        index: Arrays = {
            **FileSet.listing(source, made.names),
            **FileSet.listing(source, made.notes, "note_"),
            "box_ends": np.cumsum(made.counts, dtype=np.int64),
            "boxes": np.ascontiguousarray(made.boxes, np.float32),
            "box_labels": np.ascontiguousarray(made.labels, np.int64),
        }
        fields = [("image", "image"), ("boxes", "float32[?,4]"), ("box_labels", "int64[?]")]
        for name in ("keypoints", "ids", "declared"):
            if (array := getattr(made, name)) is not None:
                index[name] = array
        if made.keypoints is not None:
            fields.append(("keypoints", f"float32[?,{made.keypoints.shape[1]},3]"))
        if made.pairs is not None:
            fields.append(("keypoint_pairs", f"uint8[{len(made.pairs)}]"))
        if made.segments is not None:
            texts = Names.of(made.segments)
            index["segments"], index["segment_ends"] = texts.blob, texts.ends
            fields.append(("segments", "json"))
        index.update(made.flags)
        fields += [(name, "uint8[?]") for name in made.flags]
        if made.ids is not None:
            fields.append(("image_id", "int64"))
        head: dict[str, Any] = {
            "fields": fields,
            "classes": made.classes,
            "pairs": made.pairs,
            "flags": list(made.flags),
            "doubts": made.doubts,
            "relative": made.relative,
            "folders": {name: source.times_ns(name) for name in made.folders},
        }
        head["states"] = {file.url: file.state for file in made.files}
        return self._listed(
            started,
            index,
            head,
            json.dumps([fields, made.classes, made.pairs, STORAGE_SEED]),
            *[file.stamp for file in made.files],
            *[array for name, array in sorted(index.items()) if not name.endswith("changed")],
            *FileSet(source, index).content_samples(),
        )


def _turned_back(values: npt.NDArray[np.float32], turn: int) -> npt.NDArray[np.float32]:
    """Return boxes or keypoints of a shown picture in its stored pixels, in shares."""
    if values.ndim == 3:
        places = stored_places(values[..., :2].astype(np.float64), turn)
        # What is not labelled lies at 0, 0.
        made = np.where(values[..., 2:] > 0, places, values[..., :2])
        return np.concatenate([made, values[..., 2:]], axis=-1).astype(np.float32)
    corners = stored_places(values.reshape(-1, 2, 2).astype(np.float64), turn)
    ordered = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=-1)
    return ordered.astype(np.float32)


def _turned_segments(text: str, turn: int) -> str:
    """Return polygons of a shown picture in its stored pixels, as JSON."""
    if turn == 1:
        return text
    made = [
        {
            "relative": [
                stored_places(np.reshape(each, (-1, 2)), turn).reshape(-1).tolist()
                for each in shape["relative"]
            ]
        }
        for shape in parse_json(text, "segments")
    ]
    return json.dumps(made, separators=(",", ":"))


def check_boxes(
    boxes: npt.NDArray[np.float64],
    sides: npt.NDArray[np.float64],
    outside: str,
    where: Callable[[int], str],
) -> npt.NDArray[np.float64]:
    """Return boxes (left, top, right, bottom), shape (m, 4), cut off at their pictures' sides.

    `sides` are width and height of each box's picture in the same unit, NaN if unknown, shape
    (m, 2). `outside` is `error` for a box that reaches beyond its picture by more than a hundredth
    of the side and two pixels, or `clip`. `where` names a box, by its number, in errors.

    Raises SourceError for a box that is not numbers, has negative sides, or lies outside.
    """
    wrong = np.flatnonzero(~np.isfinite(boxes).all(axis=1))
    if len(wrong):
        raise SourceError(f"{where(int(wrong[0]))}: its box is not four finite numbers: correct it")
    wrong = np.flatnonzero((boxes[:, 2:] < boxes[:, :2]).any(axis=1))
    if len(wrong):
        size = (boxes[wrong[0], 2:] - boxes[wrong[0], :2]).tolist()
        raise SourceError(
            f"{where(int(wrong[0]))}: its box has a negative size, {size[0]:g} x {size[1]:g}: "
            "correct it"
        )
    known = np.isfinite(sides)
    limits = np.where(known, sides, np.inf)
    slack = np.where(sides > 1, np.maximum(_BEYOND * limits, _BEYOND_PIXELS), _BEYOND)
    pixels = np.flatnonzero((sides <= 1).all(axis=1) & (boxes[:, 2:] > _MOST_SHARE).any(axis=1))
    if len(pixels):
        raise SourceError(
            f"{where(int(pixels[0]))}: its box reaches to ({boxes[pixels[0], 2]:g}, "
            f"{boxes[pixels[0], 3]:g}), as if in pixels: divide it by the picture's width and "
            "height, as YOLO's boxes are shares of these"
        )
    if outside == "error":
        low, high = boxes[:, :2] < -slack, boxes[:, 2:] > limits + slack
        wrong = np.flatnonzero(((low | high) & known).any(axis=1))
        if len(wrong):
            box, side = boxes[wrong[0]].tolist(), sides[wrong[0]].tolist()
            raise SourceError(
                f"{where(int(wrong[0]))}: its box from ({box[0]:g}, {box[1]:g}) to ({box[2]:g}, "
                f"{box[3]:g}) lies outside of its picture of {side[0]:g} x {side[1]:g}: correct "
                "it, or cut such boxes off with outside='clip'"
            )
    low = np.where(known, np.clip(boxes[:, :2], 0, limits), boxes[:, :2])
    high = np.where(known, np.clip(boxes[:, 2:], 0, limits), boxes[:, 2:])
    return np.concatenate([low, high], axis=1)


def mirrored_pairs(names: Sequence[str]) -> list[int]:
    """Return for each keypoint the number of that on the other side, or its own number.

    Names tell sides by a word: left_eye and right_eye, l-knee and r-knee, EarLeft is not split.
    """
    number = {name.lower(): k for k, name in enumerate(names)}

    def other(match: re.Match[str]) -> str:
        return _OTHER[match[0].lower()]

    return [number.get(_SIDE.sub(other, name.lower()), k) for k, name in enumerate(names)]
