"""The reader of pictures and masks: images/, and masks/ with a file of the same stem for each.

A mask is an image file whose pixels are numbers of classes: grey values, or numbers of a palette.
"""

import json
import time
from typing import Any, Final

import numpy as np

from dlio.data.index import Arrays
from dlio.data.reader_contract import PathRules
from dlio.data.schema import Schema
from dlio.data.source import Source
from dlio.errors import SourceError
from dlio.plan.layout import STORAGE_SEED, shuffled_layout
from dlio_readers.fileset import (
    PICTURES,
    FileSet,
    ListedReader,
    SideFolders,
    files_in,
    find_sides,
    index_kind,
    side_folders,
)
from dlio_readers.path_reader import PathReader
from dlio_readers.turned_pictures import TurnedPictures

_MASKS: Final = ("masks", "annotations", "labels", "segmentation")
_MOST_NAMES: Final = 1 << 20
_SCHEMA: Final = Schema((("image", "image"), ("mask", "image")))


class MaskReader(ListedReader, PathReader):
    """Read pictures and their masks; `classes.txt` at the root may name the classes.

    Args:
        path: the folder of the data set, or the folder of pictures of one split.
        split: which of several splits, such as `train`.

    Raises SourceError if a picture has no mask, or a mask no picture.
    """

    format = "masks"
    path_rules = PathRules(one_path=True)
    version = 1
    prefixes = ("", "mask_")
    schema = _SCHEMA

    def __init__(self, path: str, split: str | None = None) -> None:
        self._sides = side_folders(path, _MASKS, split)
        self._open(Source(self._sides.root), index_kind("masks", self._sides.images))
        self._turns = TurnedPictures()
        count = len(self._files)
        self.labels = np.zeros(count, np.int64)
        bodies = {"image": self._sets[0].sizes, "mask": self._sets[1].sizes}
        self.sizes = self.schema.payload_sizes(count, bodies)
        self.layout = shuffled_layout(self.sizes)

    @staticmethod
    def recognises(path: str) -> str | None:
        for _, sides in find_sides(path, _MASKS):
            source = Source(sides.root)
            if any(True for _ in files_in(source, sides.others, PICTURES)):
                return None
        return "has no folders images and masks with image files"

    def _read(self, sample: int) -> bytes | memoryview:
        picture, mask = (self._content(files, sample) for files in self._sets)
        self._turns.of(picture, self._sets[0].path(sample), "takes their masks")
        return self.schema.join({"image": picture, "mask": mask})

    def _fits(self, index: Arrays, head: dict[str, Any]) -> bool:
        return len(index["name_ends"]) == len(index["mask_name_ends"])

    def _list(self) -> tuple[Arrays, bool]:
        started, source, sides = time.time(), self._source, self._sides
        images, masks = _matched(source, sides)
        index = {**FileSet.listing(source, images), **FileSet.listing(source, masks, "mask_")}
        names = {name.rpartition("/")[0] for name in (*images, *masks)}
        folders = {name: source.modified_ns(name) for name in sorted(names)}
        classes: list[str] = []
        if source.exists("classes.txt"):
            text = source.read("classes.txt", 0, _MOST_NAMES).decode("utf-8", "replace")
            classes = [line.strip() for line in text.splitlines() if line.strip()]
            folders["classes.txt"] = source.modified_ns("classes.txt")
        head: dict[str, Any] = {"classes": classes, "folders": folders}
        return self._listed(
            started,
            index,
            head,
            json.dumps([classes, STORAGE_SEED]),
            *[array for name, array in sorted(index.items()) if not name.endswith("changed")],
            *FileSet(source, index).content_samples(),
            *FileSet(source, index, "mask_").content_samples(),
        )


def _matched(source: Source, sides: SideFolders) -> tuple[list[str], list[str]]:
    """Return the pictures, and the mask of each. Raises SourceError if they do not match."""
    images = list(files_in(source, sides.images, PICTURES))
    masks = {name.rpartition(".")[0]: name for name in files_in(source, sides.others, PICTURES)}
    wanted = [sides.other(name, "") for name in images]
    without = [name for name, stem in zip(images, wanted, strict=True) if stem not in masks]
    left = sorted(set(masks) - set(wanted))
    if without or left or not images:
        raise SourceError(
            f"{source.path()}: {len(without)} of {len(images)} pictures in {sides.images} have no "
            f"mask {without[:3]}, {len(left)} masks in {sides.others} no picture "
            f"{[masks[stem] for stem in left[:3]]}: make both agree"
        )
    return images, [masks[stem] for stem in wanted]
