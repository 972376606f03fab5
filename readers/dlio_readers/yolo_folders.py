"""Where a data set for YOLO has its pictures and their texts, if not in `images` and `labels`.

a.jpg, a.txt, classes.txt            train/a.jpg, train/a.txt        obj_train_data/a.jpg
                                     valid/b.jpg, valid/b.txt        obj_train_data/a.txt, obj.names

The first is how LabelImg writes it, the second Roboflow for Darknet, the third CVAT.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Final

from dlio.data.source import Source
from dlio.data.splits import chosen_split, how_to_choose, split_of, split_word
from dlio.errors import SourceError
from dlio.util.units import counted
from dlio_readers.fileset import PICTURES, SideFolders, find_sides

TEXT: Final = (".txt",)
CLASSES: Final = "classes.txt"
NAME_LISTS: Final = (".names", ".labels")
"""Suffixes of lists of names of classes, as Darknet and Roboflow write them."""
_LABELS: Final = ("labels",)
_LOOKED_AT: Final = 8
_MOST_EMPTY: Final = 64
"""Texts that are looked into for one that is not empty."""
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
    """True if a folder holds pictures and texts of the names of some of them, of which the first
    have boxes: all of these, if fewer than half of the pictures have a text.

    The reader names a text that has none.
    """
    texts, pictures = texts_of_pictures(source, folder)
    doubts = [_doubt(each) for each in _first_lines(source, texts)]
    boxes = doubts.count("")
    return boxes > 0 and (2 * len(texts) >= pictures or boxes == len(doubts))


def why_no_boxes(source: Source, texts: Sequence[str]) -> str:
    """Return why texts of pictures that have numbers are not YOLO's boxes; "" for other texts."""
    for name, words in _first_lines(source, texts):
        doubt = _doubt((name, words))
        if doubt and all(map(_is_number, words)):
            return f"as boxes of YOLO, {name} {doubt}"
    return ""


def texts_of_pictures(source: Source, folder: str) -> tuple[list[str], int]:
    """Return (the texts in a folder that are named as pictures in it are, number of these, 0
    without any text)."""
    texts = {os.path.splitext(name)[0]: name for name in source.files(folder, TEXT)}
    if not texts:
        return [], 0
    pictures = {os.path.splitext(name)[0] for name in source.files(folder, PICTURES)}
    shared = sorted(texts.keys() & pictures)
    prefix = f"{folder}/" if folder else ""
    return [prefix + texts[stem] for stem in shared], len(pictures)


def _first_lines(source: Source, texts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, words of the first line) of the first texts that are not empty.

    Pictures without boxes have empty ones, of which some are passed over.
    """
    count = 0
    for name in texts[:_MOST_EMPTY]:
        try:
            data = source.read(name, 0, _HEAD + 1)
        except SourceError:
            continue  # The reader says why it cannot be read.
        line = next((each for each in data[:_HEAD].splitlines() if each.strip()), b"")
        if line or len(data) > _HEAD:
            yield name, line.decode("utf-8-sig", "replace").split()
            count += 1
        if count == _LOOKED_AT:
            return


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _doubt(line: tuple[str, list[str]]) -> str:
    """Return why the first line of a text is not a class and shares of a picture's sides; "" if it
    is."""
    _, words = line
    if not words or not all(map(_is_number, words)):
        return "has words in place of numbers"
    first, *rest = map(float, words)
    if first < 0 or first != int(first):
        return f"begins with {words[0][:20]}, which is not the number of a class"
    if len(words) < _NUMBERS:
        return f"has {counted(len(words), 'number')}, and not a class and 4 for its box"
    beyond = [word for word, n in zip(words[1:5], rest, strict=False) if not _is_share(n)]
    if beyond:
        return f"has {beyond[0][:20]}, and not shares of its picture's sides: divide by these"
    return ""


def _is_share(number: float) -> bool:
    return -_BEYOND <= number <= 1 + _BEYOND
