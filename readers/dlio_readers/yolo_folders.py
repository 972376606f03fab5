"""Where a data set for YOLO has its pictures and their texts, if not in `images` and `labels`.

a.jpg, a.txt, classes.txt            train/a.jpg, train/a.txt        obj_train_data/a.jpg
                                     valid/b.jpg, valid/b.txt        obj_train_data/a.txt, obj.names

The first is how LabelImg writes it, the second Roboflow for Darknet, the third CVAT.
"""

import math
import os
from collections.abc import Sequence
from typing import Final

from dlio.data.source import Source
from dlio.data.splits import chosen_split, how_to_choose, split_of, split_word
from dlio.errors import SourceError
from dlio_readers.fileset import PICTURES, SideFolders, find_sides

TEXT: Final = (".txt",)
CLASSES: Final = "classes.txt"
NAME_LISTS: Final = (".names", ".labels")
"""Suffixes of lists of names of classes, as Darknet and Roboflow write them."""
_LABELS: Final = ("labels",)
_LOOKED_AT: Final = 8
_MOST_FOLDERS: Final = 64
_HEAD: Final = 1 << 12
_NUMBERS: Final = 5
"""Numbers of a line, at least: a class, and a box or a polygon."""
_BEYOND: Final = 0.1
"""Share of a side by which an outline may lie outside of its picture."""


def label_folders(path: str) -> list[tuple[str, SideFolders]]:
    """Return (split, its folders) of the data set at a path; split is "" where there is one.

    In some layouts both folders are the same one.

    Raises SourceError when a folder cannot be listed.
    """
    sides = find_sides(path, _LABELS)
    source = Source(path)
    if sides or not source.is_folder():
        return sides
    if _lie_together(source, ""):
        return [("", SideFolders(path, "", ""))]
    rows = source.names()
    folders = [name for name, folder in rows if folder][:_MOST_FOLDERS]
    if any(name == CLASSES or name.endswith(NAME_LISTS) for name, folder in rows if not folder):
        together = [name for name in folders if _lie_together(source, name)]
        words = [split_word(name) for name in together]
        if len(together) == 1:
            return [("", SideFolders(path, together[0], together[0]))]
        return [
            (word, SideFolders(path, name, name))
            for word, name in zip(words, together, strict=True)
            if word and words.count(word) == 1
        ]
    splits = [name for name in folders if split_of(name, folder=True)]
    return [(n, SideFolders(path, n, n)) for n in splits if _lie_together(source, n)]


def folders_of_split(
    sides: Sequence[tuple[str, SideFolders]], path: str, split: str | None
) -> SideFolders:
    """Return the folders of a split of the data set at a path.

    Raises SourceError when there are several splits and none is chosen, or no such split.
    """
    names = [name for name, _ in sides]
    if split is not None:
        return dict(sides)[chosen_split(split, names, path)]
    if len(sides) > 1:
        first = sides[0][1]
        raise SourceError(
            f"{path} has the splits {', '.join(names)}: {how_to_choose(names[0])}, or open "
            f"{first.root.rstrip('/')}/{first.images}"
        )
    return sides[0][1]


def _lie_together(source: Source, folder: str) -> bool:
    """True if a folder holds pictures and texts of the names of at least half of them, which are
    boxes."""
    names = [name for name, inner in source.names(folder) if not inner]
    texts = {os.path.splitext(name)[0]: name for name in names if name.lower().endswith(TEXT)}
    if not texts:
        return False
    pictures = {os.path.splitext(name)[0] for name in names if name.lower().endswith(PICTURES)}
    shared = sorted(texts.keys() & pictures)
    if not shared or 2 * len(shared) < len(pictures):
        return False
    files = [f"{folder}/{texts[stem]}" if folder else texts[stem] for stem in shared]
    looked_at = [_are_boxes(source, name) for name in files[:_LOOKED_AT]]
    return True in looked_at and False not in looked_at


def _are_boxes(source: Source, name: str) -> bool | None:
    """True if the first line of a text is a class and shares of a picture's sides, None if it is
    empty."""
    try:
        data = source.read(name, 0, _HEAD + 1)
    except SourceError:
        return None  # The reader says why it cannot be read.
    line = next((each for each in data[:_HEAD].splitlines() if each.strip()), b"")
    if not line:
        return None if len(data) <= _HEAD else False
    try:
        first, *rest = [float(word) for word in line.split()]
    except ValueError:
        return False
    if not math.isfinite(first) or first < 0 or first != int(first) or 1 + len(rest) < _NUMBERS:
        return False
    return all(-_BEYOND <= number <= 1 + _BEYOND for number in rest[:4])
