"""Advice on folders without pictures where classes are looked for.

det/det.txt, img1/000001.jpg        one folder of pictures, as in MOT
JPEGImages/, Annotations/, ImageSets/   pictures and masks, as in DAVIS
"""

import os
import re
from collections.abc import Sequence, Set
from itertools import islice
from typing import Final

from dlio.data.foreign_formats import words_of
from dlio.data.source import Source
from dlio_readers.fileset import PICTURES, files_in
from dlio_readers.folder_doubts import MASK_FOLDER
from dlio_readers.foreign_labels import foreign_words

_LINE: Final = 1 << 12
_SOME: Final = 1 << 12
"""Pictures of a folder by which texts may be named."""
_NUMBERS: Final = re.compile(rb"[-+.0-9eE, \t]*[0-9][-+.0-9eE, \t]*\r?")
"""The first line of a text of numbers."""


def remedy_of_hollow(source: Source, folder: str, classes: Sequence[str]) -> str:
    """Return advice on a folder without pictures next to others, the `classes`."""
    full = [name for name in classes if any(True for _ in files_in(source, name, PICTURES))]
    masks = [name for name in full if MASK_FOLDER.search(name)]
    if len(full) == 2 and len(masks) == 1:
        images = full[full[0] in masks]
        return f"format='masks', images={images!r}, masks={masks[0]!r} reads the two that have some"
    lone = (
        f"; or open {source.shown(full[0])}, the only folder with images" if len(full) == 1 else ""
    )
    pictures = [name for each in full for name in islice(files_in(source, each, PICTURES), _SOME)]
    stems = {os.path.splitext(name.rpartition("/")[2])[0] for name in pictures}
    return _remedy(source, folder, stems) + lone


def _remedy(source: Source, folder: str, stems: Set[str], depth: int = 6) -> str:
    """Return advice on a folder without pictures: others' data, such as the cache of the Hub with
    its `snapshots/`, are not to be removed."""
    at = folder
    for _ in range(depth):
        entries = sorted(source.names(at))
        files = [name for name, is_folder in entries if not is_folder]
        if files and all(name.lower().endswith(".xml") for name in files):
            return (
                "it holds XML, such as Pascal VOC's boxes, which is read next to a folder "
                "JPEGImages, or where both are called images and annotations: rename them, or open "
                "the folder of pictures alone"
            )
        if words := foreign_words(source, [f"{at}/{name}" for name in files]):
            return f"it holds {words}"
        if files and all(name.lower().endswith(".txt") for name in files):
            if os.path.splitext(files[0])[0] in stems:
                return (
                    f"it holds texts named as pictures are, such as {files[0]}: write boxes as "
                    "COCO's JSON or YOLO's texts, and labels to a labels.csv, of file_name and "
                    "label"
                )
            head = source.read(f"{at}/{files[0]}", 0, _LINE)
            first = next(iter(head.decode("utf-8", "replace").split()), "")
            if os.path.splitext(first.rpartition("/")[2])[0] in stems:
                return (
                    f"it holds lists of pictures, such as {files[0]}: choose one with "
                    f"table={f'{at}/{files[0]}'!r}"
                )
            if _NUMBERS.fullmatch(head.partition(b"\n")[0]):
                return (
                    f"it holds texts of numbers, such as {files[0]}: numpy.loadtxt reads them, and "
                    "numpy.savez('x.npz', x=..., y=...) writes samples and labels"
                )
            return (
                "it holds texts, which are read as a column of a CSV or Parquet file: write them "
                "to one, next to a column label"
            )
        if len(files) == 1 and files[0].lower().endswith((".csv", ".tsv")):
            return f"it holds a table: choose it with table={f'{at}/{files[0]}'!r} if it has labels"
        if files and (words := words_of(files[0])):
            return f"{files[0]} in {source.shown(at)} is {words}"
        if files:
            return (
                f"it holds other files, such as {files[0]} in {source.shown(at)}: name the folder "
                "of the data"
            )
        if not entries:
            break
        at = f"{at}/{entries[0][0]}"
    return "fill it, or remove it"
