"""The reader of pictures and masks: images/, and masks/ with a file of the same stem for each.

A mask is an image file whose pixels are numbers of classes: grey values, or numbers of a palette.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, fingerprint_of, kept_index
from dlio.data.reader import reopening
from dlio.data.schema import Schema
from dlio.data.source import Source
from dlio.errors import SourceError
from dlio.plan.layout import cut_blocks
from dlio.plan.order import Order
from dlio_readers.annotations import index_kind
from dlio_readers.fileset import FileSet, files_in
from dlio_readers.sidefolders import PICTURES, SideFolders, find_sides, side_folders

_MASKS: Final = ("masks", "annotations", "labels", "segmentation")
_VERSION: Final = 1
_STORAGE_SEED: Final = 0xD110
_SETTLED_S: Final = 2.0
_MOST_NAMES: Final = 1 << 20
_SCHEMA: Final = Schema((("image", "image"), ("mask", "image")))


class MaskReader:
    """Read pictures and their masks; `classes.txt` at the root may name the classes.

    Args:
        path: the folder of the data set, or the folder of pictures of one split.
        split: which of several splits, such as `train`.

    Raises SourceError if a picture has no mask, or a mask no picture.
    """

    format = "masks"
    objects = True
    single = True

    def __init__(self, path: str, split: str | None = None) -> None:
        self._again = reopening(MaskReader, path, split)
        self.path = path
        self._sides = side_folders(path, _MASKS, split)
        self._source = Source(self._sides.root)
        self._kind = index_kind("masks", self._sides.images)
        index = kept_index(self._kind, _VERSION, self._source.root, self._holds, self._list)
        head = json.loads(index["head"].tobytes())
        self.schema = _SCHEMA
        self.classes: Sequence[str] = head["classes"]
        self.fingerprint: str = head["fingerprint"]
        self._images = FileSet(self._source, index)
        self._masks = FileSet(self._source, index, "mask_")
        count = len(self._images)
        self.labels = np.zeros(count, np.int64)
        bodies = {"image": self._images.sizes, "mask": self._masks.sizes}
        self.sizes = self.schema.payload_sizes(count, bodies)
        self.layout = cut_blocks(self.sizes, Order(count, _STORAGE_SEED, shuffled=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again

    @staticmethod
    def recognises(path: str) -> str | None:
        for _, sides in find_sides(path, _MASKS):
            source = Source(sides.root)
            if any(True for _ in files_in(source, sides.others, PICTURES)):
                return None
        return "has no folders images and masks with image files"

    def __len__(self) -> int:
        return len(self._images)

    def name(self, sample: int) -> str:
        return self._images.names[sample]

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [self._read(int(sample)) for sample in samples]

    def close(self) -> None:
        pass

    def _read(self, sample: int) -> bytes | memoryview:
        values = {}
        for field, files in (("image", self._images), ("mask", self._masks)):
            values[field] = files.read(sample)
            if values[field] is None:
                raise files.changed(sample, self._kind, _VERSION)
        return self.schema.join(values)

    def _holds(self, index: Arrays) -> bool:
        if not self._source.local:
            return False
        try:
            head = json.loads(index["head"].tobytes())
            folders = head["folders"]
            images, masks = FileSet(self._source, index), FileSet(self._source, index, "mask_")
            return (
                len(images) == len(masks)
                and all(self._source.modified_ns(name) == when for name, when in folders.items())
                and images.is_unchanged()
                and masks.is_unchanged()
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            return False

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
        head["fingerprint"] = fingerprint_of(
            "masks",
            _VERSION,
            json.dumps([classes, _STORAGE_SEED]),
            *[array for name, array in sorted(index.items()) if not name.endswith("changed")],
            *FileSet(source, index).content_samples(),
            *FileSet(source, index, "mask_").content_samples(),
        )
        index["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        settled_ns = int((started - _SETTLED_S) * 1e9)
        return index, source.local and all(when < settled_ns for when in folders.values())


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
