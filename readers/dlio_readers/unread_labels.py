"""Files next to pictures that may hold their labels and are not read: they are told.

A text counts if it names a picture, or is called as labels are; other tables count in any case, and
so do files that are named as pictures are, one each.
"""

import os
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Final

from dlio.data.interpretation import named_files
from dlio.data.source import Source
from dlio.errors import SourceError, UsageError
from dlio_readers.foreign_labels import foreign_words, is_coco
from dlio_readers.picture_lists import PictureLists, find_lists
from dlio_readers.yolo_folders import why_no_boxes

# fmt: off
_TEXTS: Final = (
    ".csv", ".tsv", ".txt", ".json", ".geojson", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml",
    ".lst",
)
_TABLES: Final = (
    ".xlsx", ".xls", ".ods", ".pkl", ".pickle", ".mat", ".npy", ".npz", ".parquet", ".feather",
    ".arrow", ".db", ".sqlite", ".gz", ".xz", ".bz2",
)
_WORDS: Final = ("label", "annot", "class", "meta", "target", "caption", "truth", "split")
# fmt: on
_SURE: Final = ("label", "annot", "truth")
_RENAMED: Final = (".json", ".jsonl", ".parquet")
_MATLAB: Final = ".mat"
_MOST_FILES: Final = 16
_MOST_PICTURES: Final = 64
_HEAD: Final = 1 << 16


def files_of_labels(
    source: Source, folder: str, pictures: Sequence[str], *, is_strict: bool = False
) -> list[str]:
    """Return the files of a folder that may hold labels of some pictures, and are not read.

    A strict search, of a folder above, leaves out those whose names alone say so weakly.
    """
    likely: Sequence[str] = source.files(folder, (*_TEXTS, *_TABLES))
    own: list[str] = []
    others: list[str] = []
    if likely:
        shown = set(likely).intersection(pictures)
        likely = [name for name in likely if name not in shown]
        own, others = _named_alike(likely, () if is_strict else pictures)
    known = _some_stems(pictures) if others else []
    prefix = f"{folder}/" if folder else ""
    others = others[:_MOST_FILES]
    if is_strict:
        words = [name for name in others if any(word in name.lower() for word in _SURE)]
        texts = [n for n in others if n not in words and n.lower().endswith(_TEXTS)]
        return words + [n for n in texts if _names_pictures(source, prefix + n, known)]
    return own + [name for name in others if _may_label(source, prefix + name, known)]


def unread_labels(source: Source, pictures: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return (words about files next to a folder's pictures, these files)."""
    files: Sequence[str] = source.files("", (*_TEXTS, *_TABLES))
    shown = set(files).intersection(pictures)
    files = [name for name in files if name not in shown]
    own, others = _named_alike([n for n in files if n.lower().endswith(_TEXTS)], pictures)
    likely = sorted([*others, *(name for name in files if name.lower().endswith(_TABLES))])
    names = _some_stems(pictures)
    kept = [name for name in likely[:_MOST_FILES] if _may_label(source, name, names)]
    words = [
        foreign_words(source, [name])
        or f"{named_files([name])}, which may hold labels: {_remedy(source, name)}"
        for name in kept
    ]
    for suffix in _TEXTS:
        alike = [name for name in own if name.lower().endswith(suffix)]
        if alike:
            words.append(foreign_words(source, alike) or _named_as_pictures(source, alike))
    return tuple(words), [*kept, *own]


def lists_classes(source: Source, name: str, folders: Sequence[str]) -> bool:
    """True for a text that names the class folders, a line each, and so labels no picture."""
    try:
        lines = source.read(name, 0, _HEAD).decode("utf-8", "replace").splitlines()
    except SourceError:
        return False
    named = {line.strip() for line in lines} - {""}
    return named == set(folders)


def _some_stems(pictures: Iterable[str]) -> list[bytes]:
    """Return the first names of pictures, without their suffixes, in alphabetical order."""
    stems = (os.path.splitext(name)[0] for name in pictures)
    return [os.fsencode(name) for name in nsmallest(_MOST_PICTURES, stems) if name]


def _named_alike(names: Sequence[str], pictures: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (names that are those of pictures but for the suffix, all others)."""
    alike: tuple[list[str], list[str]] = ([], [])
    stems = {os.path.splitext(name)[0] for name in names}
    if stems:
        stems.intersection_update(os.path.splitext(name)[0] for name in pictures)
    for name in names:
        alike[os.path.splitext(name)[0] not in stems].append(name)
    return alike


def _named_as_pictures(source: Source, files: Sequence[str]) -> str:
    reason = why_no_boxes(source, files)
    remedy = reason or "labels of theirs are read from a labels.csv, of file_name and label"
    return f"{named_files(files)} named as pictures are, one each: {remedy}"


def labels_beside(source: Source, lists: PictureLists) -> tuple[str, ...]:
    """Return the words about files that may label pictures whose lists have no labels."""
    if lists.encoding.numbers:
        return ()
    pictures = [name.rpartition("/")[2] for each in lists.splits.values() for name in each]
    files = [n for n in files_of_labels(source, "", pictures) if n not in lists.files]
    if not files:
        return ()
    return (f"{named_files(files)}, which may hold labels: choose one with table= and label=",)


def _may_label(source: Source, name: str, pictures: Sequence[bytes]) -> bool:
    lower = name.rpartition("/")[2].lower()
    if lower.endswith(_TABLES) or any(word in lower for word in _WORDS):
        return True
    return _names_pictures(source, name, pictures)


def _names_pictures(source: Source, name: str, pictures: Sequence[bytes]) -> bool:
    try:
        head = source.read(name, 0, _HEAD)
    except SourceError:
        return True
    return any(picture in head for picture in pictures)


def _remedy(source: Source, name: str) -> str:
    suffix = os.path.splitext(name)[1].lower()
    if suffix == ".txt" and _is_list(source, name):
        return f"choose it with table={name!r}"
    if suffix == ".json" and is_coco(source.read(name, 0, _HEAD)):
        return f"open {source.path(name)} for its boxes"
    if suffix in _RENAMED:
        return f"call it labels{suffix}, with the columns file_name and label"
    return write_them(source, name)


def _is_list(source: Source, name: str) -> bool:
    try:
        return find_lists(source, name) is not None
    except (SourceError, UsageError):
        return False


def write_them(source: Source, name: str) -> str:
    """Return the words by which labels get into a table that dlio reads."""
    by = " (scipy.io.loadmat reads it)" if name.endswith(_MATLAB) else ""
    return f"write them to {source.path('labels.csv')}, of file_name and label{by}"
