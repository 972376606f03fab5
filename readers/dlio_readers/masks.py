"""The reader of pictures and masks: images/, and masks/ with a file for each.

    images/a.jpg                     masks/a.png, or masks/a_mask.png
    images/a.jpg                     annotations/trimaps/a.png                     Oxford-IIIT Pets
    leftImg8bit/train/x/a_leftImg8bit.png   gtFine/train/x/a_gtFine_labelIds.png   Cityscapes
    JPEGImages/a.jpg          SegmentationClass/a.png, for some of the pictures   Pascal VOC

A mask is an image file whose pixels are numbers of classes: grey values, or numbers of a palette.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from dlio.data.index import Arrays
from dlio.data.reader_contract import Fit, PathRules
from dlio.data.schema import Schema
from dlio.data.source import Source
from dlio.data.splits import WHOLE, chosen_split, how_to_choose, split_of, splits_among
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import STORAGE_SEED, shuffled_layout
from dlio.util.printable import tell_once
from dlio.util.units import counted
from dlio_readers.fileset import (
    PICTURES,
    FileSet,
    ListedReader,
    SideFolders,
    files_in,
    find_sides,
    index_kind,
)
from dlio_readers.path_reader import PathReader
from dlio_readers.picture_lists import find_lists
from dlio_readers.turned_pictures import TurnedPictures
from dlio_readers.voc_folders import (
    chosen_of,
    files_by_stem,
    has_own_lists,
    listed_in,
    lists_of,
    mask_folders,
    note_folders,
)

_MASKS: Final = ("masks", "annotations", "labels", "segmentation")
_MASK_FILES: Final = (*PICTURES, ".gif")
"""Suffixes of masks: GIFs hold numbers as well."""
_MOST_NAMES: Final = 1 << 20
_MOST_FOLDERS: Final = 8
_NUMBERS: Final = "labelids"
"""Part of the suffix of masks of class numbers, in lower case, next to others of colours."""
_SCHEMA: Final = Schema((("image", "image"), ("mask", "image")))


class MaskReader(ListedReader, PathReader):
    """Read pictures and their masks; `classes.txt` at the root may name the classes.

    Args:
        path: the folder of the data set, or the folder of pictures of one split.
        split: which of several splits, such as `train`; of lists of pictures as well.
        images: the folder of pictures, below the path; found for None. With other names than the
            usual ones, give `format="masks"` as well.
        masks: the folder of masks.
        mask_suffix: end of the name of a mask, after the name of its picture, such as `_mask.png`;
            None for the only one, or the one with `labelIds`.

    Of Pascal VOC, the pictures that `ImageSets/Segmentation` names are read, or those with a mask.

    Raises SourceError if a picture has no mask, or a mask no picture; UsageError if there are
    several splits or masks and none is chosen.
    """

    format = "masks"
    path_rules = PathRules(one_path=True)
    version = 2
    prefixes = ("", "mask_")
    schema = _SCHEMA

    def __init__(
        self,
        path: str,
        split: str | None = None,
        images: str | None = None,
        masks: str | None = None,
        mask_suffix: str | None = None,
    ) -> None:
        self._suffix, self._split = mask_suffix, split
        self._sides, self._listed_split = _chosen_sides(path, split, images, masks)
        self._lists: list[str] = []
        """Lists of Pascal VOC that name the pictures."""
        if has_own_lists(self._sides):
            lists = lists_of(Source(path), "Segmentation")
            self._lists = [lists[name] for name in chosen_of(list(lists), split, path)]
        listed = self._listed_split or self._lists
        options = (self._sides.images, self._sides.others, mask_suffix, listed)
        self._open(Source(self._sides.root), index_kind("masks", options))
        self._turns = TurnedPictures()
        count = len(self._files)
        self.labels = np.zeros(count, np.int64)
        bodies = {"image": self._sets[0].sizes, "mask": self._sets[1].sizes}
        self.sizes = self.schema.payload_sizes(count, bodies)
        self.layout = shuffled_layout(self.sizes)

    @staticmethod
    def recognises(path: str) -> str | None:
        for _, sides in _sides_of(path):
            source = Source(sides.root)
            if any(True for _ in files_in(source, sides.others, _MASK_FILES)):
                return None
        return "has no folders images and masks with image files, and no twins such as gtFine"

    @staticmethod
    def fit(path: str, options: Mapping[str, object]) -> Fit:
        """Return how well a folder fits: less than lists of its pictures that have labels."""
        # `masks=True` is an option of pictures with boxes.
        given = [options.get(name) for name in ("images", "masks")]
        named = [each for each in given if each and isinstance(each, str)]
        if named:
            return Fit(f"pictures and masks in {' and '.join(named)}", 1, is_marked=True)
        sides = _sides_of(path)
        source = Source(sides[0][1].root)
        own = [sides[0][1].images, sides[0][1].others]
        words = f"pictures in {own[0]} with masks in {own[1]}"
        if has_own_lists(sides[0][1]):
            return Fit(words, 1, is_marked=not note_folders(path))
        chosen = bool(options.get("mask_suffix"))
        lists = None if chosen or len(sides) > 1 or "/" not in own[1] else find_lists(source)
        labelled = lists is not None and bool(lists.encoding.numbers)
        return Fit(words, 1, is_marked=not labelled)

    def _read(self, sample: int) -> bytes | memoryview:
        picture, mask = (self._content(files, sample) for files in self._sets)
        self._turns.of(picture, self._sets[0].path(sample), "takes their masks")
        return self.schema.join({"image": picture, "mask": mask})

    def _fits(self, index: Arrays, head: dict[str, Any]) -> bool:
        return len(index["name_ends"]) == len(index["mask_name_ends"])

    def _list(self) -> tuple[Arrays, bool]:
        started, source, sides = time.time(), self._source, self._sides
        if has_own_lists(sides):
            images, masks = _of_lists(source, sides, self._lists)
        else:
            images, masks = _matched(source, sides, self._suffix)
        names = {name.rpartition("/")[0] for name in (*images, *masks)} | {*self._lists}
        if self._listed_split:
            lists = find_lists(source)
            assert lists is not None
            own = lists.chosen(self._split, source.shown())
            pairs = [each for each in zip(images, masks, strict=True) if each[0] in own]
            images, masks = [each for each, _ in pairs], [each for _, each in pairs]
            names |= {*lists.files, *(file.rpartition("/")[0] for file in lists.files)}
        index = {**FileSet.listing(source, images), **FileSet.listing(source, masks, "mask_")}
        folders = {name: source.times_ns(name) for name in sorted(names)}
        classes: list[str] = []
        if source.exists("classes.txt"):
            text = source.read("classes.txt", 0, _MOST_NAMES).decode("utf-8-sig", "replace")
            classes = [line.strip() for line in text.splitlines() if line.strip()]
            folders["classes.txt"] = source.times_ns("classes.txt")
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


def _sides_of(path: str) -> list[tuple[str, SideFolders]]:
    """Return (split, its folders) of the data set at a path."""
    sides = mask_folders(path) or find_sides(path, _MASKS)
    if sides:
        return [(split, _with_masks(each)) for split, each in sides]
    return _twins(path)


def _with_masks(sides: SideFolders) -> SideFolders:
    """Return folders whose masks lie in the only folder with pictures of the second."""
    source = Source(sides.root)
    rows = source.names(sides.others)
    if any(name.lower().endswith(_MASK_FILES) for name, folder in rows if not folder):
        return sides
    inner = [f"{sides.others}/{name}" for name, folder in rows if folder]
    full = [name for name in inner if any(True for _ in files_in(source, name, _MASK_FILES))]
    own = source.folders(sides.images)
    if len(full) != 1 or full[0].rpartition("/")[2] in own:
        return sides
    return SideFolders(sides.root, sides.images, full[0])


def _twins(path: str) -> list[tuple[str, SideFolders]]:
    """Return the splits of two folders of the same splits, where files of the second begin with the
    names of those of the first."""
    source = Source(path)
    if not source.is_folder():
        return []
    tops = source.folders()
    if not 2 <= len(tops) <= _MOST_FOLDERS:
        return []
    splits = {
        top: [name for name, inner in source.names(top) if inner and split_of(name, folder=True)]
        for top in tops
    }
    for images in tops:
        for masks in tops:
            both = [name for name in splits[images] if name in splits[masks]]
            if images == masks or not both:
                continue
            first = next(files_in(source, f"{images}/{both[0]}", PICTURES), None)
            if first is None:
                continue
            sides = SideFolders(path, f"{images}/{both[0]}", f"{masks}/{both[0]}")
            place, key = _key(sides, first)
            here = f"{sides.others}/{place}".rstrip("/")
            if not source.is_folder(here):
                continue
            names = source.files(here)
            longer = [name[len(key) :] for name in names if name.startswith(key)]
            # Equal names do not say which are the masks.
            if any(each[0] in "-_" and each.lower().endswith(_MASK_FILES) for each in longer):
                return [
                    (name, SideFolders(path, f"{images}/{name}", f"{masks}/{name}"))
                    for name in both
                ]
    return []


def _chosen_sides(
    path: str, split: str | None, images: str | None, masks: str | None
) -> tuple[SideFolders, bool]:
    """Return the folders of a split, and True if lists of pictures name its members.

    Raises UsageError if there are several splits and none is chosen, or no such one.
    """
    if images is None and masks is None:
        sides = _sides_of(path)
    else:
        if images is None or masks is None:
            raise UsageError("images= and masks= name two folders: give both")
        sides = [("", SideFolders(path, images.strip("/"), masks.strip("/")))]
        source = Source(path)
        for name in (images, masks):
            if not source.is_folder(name):
                raise UsageError(f"{source.shown(name)} is not a folder: check images= and masks=")
        inner = source.folders(images)
        own = [name for each in splits_among(inner, folder=True).values() for name in each]
        own = [name for name in own if source.is_folder(f"{masks}/{name}")]
        if own and split != WHOLE:
            sides = [(n, SideFolders(path, f"{images}/{n}", f"{masks}/{n}")) for n in own]
    names = [name for name, _ in sides]
    if has_own_lists(sides[0][1]):
        return sides[0][1], False
    if names == [""]:
        lists = find_lists(Source(sides[0][1].root))
        if lists is not None and len(lists.splits) > 1:
            lists.chosen(split, path)
            if lists.unlisted:
                tell_once(
                    f"{path}: no split has {counted(len(lists.unlisted), 'picture')}, by "
                    f"{', '.join(lists.files)}, such as {lists.unlisted[0]}"
                )
            return sides[0][1], True
    if split is not None:
        return dict(sides)[chosen_split(split, names, path)], False
    if len(sides) > 1:
        first = sides[0][1]
        raise SourceError(
            f"{path} has the splits {', '.join(names)}: {how_to_choose(names[0])}, or open "
            f"{first.root.rstrip('/')}/{first.images}"
        )
    return sides[0][1], False


def _of_lists(
    source: Source, sides: SideFolders, lists: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the pictures of Pascal VOC that lists name, or that have a mask, and their masks.

    Raises SourceError if one is missing.
    """
    masks = files_by_stem(source, sides.others, (".png",))
    wanted = f"mask in {sides.others}"
    named = [stem for each in lists for stem in listed_in(source, each, masks, wanted)]
    stems = list(dict.fromkeys(named)) if lists else sorted(masks)
    pictures = files_by_stem(source, sides.images, PICTURES)
    names = [pictures.get(stem, [f"{sides.images}/{stem}.jpg"])[0] for stem in stems]
    return names, [masks[stem][0] for stem in stems]


def _key(sides: SideFolders, picture: str) -> tuple[str, str]:
    """Return (folder of a picture below the first folder, beginning of the names of its masks)."""
    place, _, name = picture[len(sides.images) + 1 :].rpartition("/")
    stem = os.path.splitext(name)[0]
    return place, stem.removesuffix(f"_{sides.images.partition('/')[0]}")


def _matched(source: Source, sides: SideFolders, suffix: str | None) -> tuple[list[str], list[str]]:
    """Return the pictures, and the mask of each. Raises SourceError if they do not match."""
    images = list(files_in(source, sides.images, PICTURES))
    # Next to other masks, GIFs are those of pictures that are not read.
    files = list(files_in(source, sides.others, PICTURES))
    if not files:
        files = list(files_in(source, sides.others, (".gif",)))
        source.left_out.difference_update(files)
    masks = {name.rpartition(".")[0]: name for name in files}
    wanted = [sides.other(name, "") for name in images]
    if images and files and (suffix is not None or not any(stem in masks for stem in wanted)):
        made = _by_suffix(source, sides, images, files, suffix)
        if made is not None:
            return images, made
    without = [name for name, stem in zip(images, wanted, strict=True) if stem not in masks]
    left = sorted(set(masks) - set(wanted))
    if without or left or not images:
        raise SourceError(
            f"{source.shown()}: {len(without)} of {counted(len(images), 'picture')} in "
            f"{sides.images} have no mask {without[:3]}, {counted(len(left), 'mask')} in "
            f"{sides.others} no picture {[masks[stem] for stem in left[:3]]}: make both agree"
        )
    return images, [masks[stem] for stem in wanted]


def _by_suffix(
    source: Source, sides: SideFolders, images: list[str], files: list[str], suffix: str | None
) -> list[str] | None:
    """Return the masks whose names are those of their pictures and a suffix; None if no names are.

    Raises UsageError if there are several for each picture and none is chosen, SourceError if a
    picture has none.
    """
    names: dict[str, list[str]] = {}
    for file in files:
        place, _, name = file[len(sides.others) + 1 :].rpartition("/")
        names.setdefault(place, []).append(name)
    place, key = _key(sides, images[0])
    kinds = [n[len(key) :] for n in names.get(place, ()) if n.startswith(key)]
    kinds = [each for each in kinds if not each[0].isalnum()]
    if suffix is None:
        if not kinds:
            return None
        numbers = [each for each in kinds if _NUMBERS in each.lower()]
        if len(kinds) > 1 and len(numbers) != 1:
            raise UsageError(
                f"{source.shown(images[0])} has the masks {', '.join(kinds)}: choose one with "
                f"mask_suffix={kinds[0]!r}"
            )
        suffix = (numbers or kinds)[0]
        others = [each for each in kinds if each != suffix]
        if others:
            tell_once(
                f"{source.shown(sides.others)}: masks are the files *{suffix}; left out: "
                f"{', '.join('*' + each for each in others)}, which mask_suffix= chooses"
            )
    known = set(files)
    made, without = [], []
    for picture in images:
        place, key = _key(sides, picture)
        mask = "/".join(filter(None, (sides.others, place, key + suffix)))
        made.append(mask)
        if mask not in known:
            without.append(picture)
    left = {file for file in files if file.endswith(suffix)} - set(made)
    if without or left:
        raise SourceError(
            f"{source.shown()}: {len(without)} of {counted(len(images), 'picture')} in "
            f"{sides.images} have no mask *{suffix} {without[:3]}, {counted(len(left), 'mask')} in "
            f"{sides.others} no picture {sorted(left)[:3]}: make both agree"
        )
    return made
