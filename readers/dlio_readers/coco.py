"""The reader of COCO's format: a file of annotations, and a folder of pictures.

coco/annotations/instances_train2017.json
coco/annotations/person_keypoints_train2017.json     if there
coco/train2017/*.jpg                                  or images/train2017, images, or next to it
"""

import os
from collections.abc import Sequence
from typing import Final, Literal

from dlio.data.reader_contract import PathRules
from dlio.data.source import File, Source, inside, own_name
from dlio.errors import SourceError, UsageError
from dlio_readers.annotations import AnnotatedReader, Annotations
from dlio_readers.cocofile import CocoFile, joined
from dlio_readers.fileset import index_kind

_PREFIXES: Final = ("instances_", "person_keypoints_", "_annotations.coco", "annotations")
_MAIN, _KEYPOINTS = "instances_", "person_keypoints_"
_HEAD: Final = 1 << 16
_FOLDER: Final = "annotations"


class CocoReader(AnnotatedReader):
    """Read pictures, boxes, masks and keypoints of a COCO data set.

    Classes are the categories, and labels the categories' own numbers, as torchvision has them:
    COCO's begin at 1 and have gaps, whose names are empty. Boxes of no area are left out, and so
    are crowds unless they are asked for.

    Args:
        path: a file of annotations, or a folder with `annotations/*.json`.
        split: which of several files, such as `train2017`.
        pictures: folder of the pictures, below the data set's; found by itself in common layouts.
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
        source = Source(root)
        options = (masks, keypoints, crowds, labels, outside, pictures)

        def build() -> Annotations:
            main = CocoFile(File(inside(root, file)))
            others = []
            name = os.path.basename(file)
            if keypoints is not False and name.startswith(_MAIN):
                other = f"{os.path.dirname(file)}/{name.replace(_MAIN, _KEYPOINTS, 1)}".lstrip("/")
                if source.exists(other):
                    others.append(CocoFile(File(inside(root, other))))
            made = joined(main, others, masks, keypoints, crowds, labels, outside)
            folder = _pictures_folder(source, file, pictures, made.names[0], main.name)
            made.names = [f"{folder}/{each}" if folder else each for each in made.names]
            made.files = [each.url for each in (main, *others)]
            made.folders = [os.path.dirname(file)]
            return made

        super().__init__(source, index_kind("coco", file, options), build)

    @staticmethod
    def recognises(path: str) -> str | None:
        if own_name(path).endswith(".json"):
            head = File(path).read(0, _HEAD)
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
    here = [name for name, folder in rows if not folder and name == "_annotations.coco.json"]
    if (_FOLDER, True) in rows:
        below = [name for name, folder in source.names(_FOLDER) if not folder]
        for prefix in (_MAIN, _KEYPOINTS, ""):
            chosen = [name for name in below if name.startswith(prefix)]
            chosen = [name for name in chosen if name.endswith(".json") and _has_boxes(name)]
            if chosen:
                return here + [f"{_FOLDER}/{name}" for name in chosen]
    return here


def _has_boxes(name: str) -> bool:
    return not name.startswith(("captions_", "image_info_", "panoptic_", "stuff_"))


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
        chosen = [name for name in files if _split_of(name) == split]
        if not chosen:
            have = ", ".join(map(_split_of, files))
            raise UsageError(f"split={split!r}: {path} has {have}: choose one of these")
        return path, chosen[0]
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
    candidates: Sequence[str] = (
        split,
        f"images/{split}",
        "images",
        "",
        folder,
        f"{folder}/{split}",
        f"{folder}/images",
        "data",
        "train",
        "val",
        "test",
    )
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
