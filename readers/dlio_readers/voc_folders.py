"""Where a data set of Pascal VOC has its pictures, XML files, masks and lists of splits.

VOC2012/JPEGImages/a.jpg                VOC2012/SegmentationClass/a.png
VOC2012/Annotations/a.xml               VOC2012/SegmentationObject/a.png
VOC2012/ImageSets/Main/train.txt        VOC2012/ImageSets/Segmentation/train.txt

images/a.jpg        images/train/a.jpg            train/a.jpg        as programs for drawing boxes
annotations/a.xml   annotations/train/a.xml       train/a.xml        and Roboflow export them
"""

import os
import re
from collections.abc import Collection, Iterable
from typing import Final

from dlio.data.source import Source
from dlio.data.splits import SPLITS, WHOLE, chosen_split, how_to_choose, split_of
from dlio.errors import SourceError, UsageError
from dlio.util.units import counted
from dlio_readers.fileset import PICTURES, SideFolders, files_in, find_sides

PICTURE_FOLDER: Final = "JPEGImages"
OBJECT_FOLDER: Final = "SegmentationObject"
MASK_FOLDERS: Final = ("SegmentationClass", OBJECT_FOLDER)
XML: Final = (".xml",)
_NOTE_FOLDER: Final = "Annotations"
_NOTE_FOLDERS: Final = (_NOTE_FOLDER, "annotations")
_TABLES: Final = ("labels.", "metadata.")
_LISTS: Final = "ImageSets"
_MOST_LIST: Final = 128 << 20
_MOST_TIMES: Final = 16
"""Lines of a list for each file that it may name."""
_LOOKED_AT: Final = 8
_HEAD: Final = 1 << 12
_ROOT: Final = re.compile(rb"<annotation[\s>/]")


def note_folders(path: str) -> list[tuple[str, SideFolders]]:
    """Return (split, folders of pictures and of XML files) of the data set at a path; split is ""
    where folders do not say it. In some layouts both are the same folder.

    Raises SourceError when a folder cannot be listed.
    """
    source = Source(path)
    if not source.is_folder():
        return []
    rows = source.names()
    if (PICTURE_FOLDER, True) in rows and (_NOTE_FOLDER, True) in rows:
        return [("", SideFolders(path, PICTURE_FOLDER, _NOTE_FOLDER))]
    sides = [
        (split, each)
        for split, each in find_sides(path, _NOTE_FOLDERS)
        if _has_notes(Source(each.root), each.others)
    ]
    if sides:
        return sides
    if _lie_together(source, ""):
        return [("", SideFolders(path, "", ""))]
    splits = [name for name, folder in rows if folder and split_of(name, folder=True)]
    return [(n, SideFolders(path, n, n)) for n in splits if _lie_together(source, n)]


def years_in(path: str) -> list[str]:
    """Return the folders below a path that are data sets of Pascal VOC, such as `VOC2007` and
    `VOC2012` of `VOCdevkit`; [] unless there are several."""
    source = Source(path)
    rows = source.names() if source.is_folder() else []
    made = []
    for name in [name for name, folder in rows if folder and name.upper().startswith("VOC")]:
        inner = source.folders(name)
        # Of some copies, each lies in a folder of its own name.
        place = f"{name}/{inner[0]}" if len(inner) == 1 else name
        if source.is_folder(f"{place}/{PICTURE_FOLDER}"):
            made.append(place)
    return made if len(made) > 1 else []


def mask_folders(path: str) -> list[tuple[str, SideFolders]]:
    """Return the folders of pictures and of masks of classes, as `note_folders` does."""
    source = Source(path)
    rows = source.names() if source.is_folder() else []
    if (PICTURE_FOLDER, True) not in rows or (MASK_FOLDERS[0], True) not in rows:
        return []
    return [("", SideFolders(path, PICTURE_FOLDER, MASK_FOLDERS[0]))]


def has_own_lists(sides: SideFolders) -> bool:
    """True for folders of masks of some of the pictures."""
    return sides.images == PICTURE_FOLDER and sides.others in MASK_FOLDERS


def files_by_stem(source: Source, folder: str, suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the files of a folder by their names below it without suffix.

    Those of the folders below it, too, unless it is the whole data set.
    """
    made: dict[str, list[str]] = {}
    start = len(folder) + 1 if folder else 0
    for name in files_in(source, folder, suffixes) if folder else _here(source, suffixes):
        made.setdefault(os.path.splitext(name[start:])[0], []).append(name)
    return made


def lists_of(source: Source, kind: str) -> dict[str, str]:
    """Return the files of `ImageSets/<kind>` that are lists of a split, by its name."""
    for folder in (f"{_LISTS}/{kind}", _LISTS):
        if source.is_folder(folder):
            names = source.files(folder)
            stems = {os.path.splitext(n)[0]: f"{folder}/{n}" for n in names if n.endswith(".txt")}
            splits = {stem: file for stem, file in stems.items() if split_of(stem, folder=True)}
            if splits:
                return splits
    return {}


def chosen_of(names: Collection[str], split: str | None, path: str) -> list[str]:
    """Return those of the names of splits that `split` chooses, all for `all`.

    Raises UsageError if there are several and none is chosen, or no such one.
    """
    known = list(names)
    if split == WHOLE or (split is None and len(known) < 2):
        return known
    if split is not None:
        return [chosen_split(split, known, path)]
    first = next((name for name in known if split_of(name, folder=True) == SPLITS[0]), known[0])
    raise UsageError(
        f"{path} has the splits {', '.join(known)}: {how_to_choose(first)}, or split={WHOLE!r} for "
        "all of them as one data set"
    )


def listed_in(source: Source, file: str, known: Collection[str], wanted: str) -> list[str]:
    """Return the names that a list has, one a line, of those `known`.

    Raises SourceError with the line for another one, which has no file that is `wanted`, and for
    a list that names them again and again: each line is a sample.
    """
    data = source.read(file, 0, _MOST_LIST + 1)
    if len(data) > _MOST_LIST:
        raise SourceError(f"{source.path(file)} has over {_MOST_LIST} bytes: it is not a list")
    made = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        whole = line.strip()
        if whole:
            first = whole.split(maxsplit=1)[0]
            tried = (whole, first, os.path.splitext(whole)[0], os.path.splitext(first)[0])
            name = next((each for each in tried if each in known), None)
            if name is None:
                where = f"{source.path(file)}, line {number}"
                raise SourceError(
                    f"{where}: {first[:80]} has no {wanted}: copy it, or correct the list"
                )
            made.append(name)
            if len(made) > _MOST_TIMES * len(known):
                raise SourceError(
                    f"{source.path(file)} has over {_MOST_TIMES} lines for each of "
                    f"{counted(len(known), 'file')}: name each picture once"
                )
    if not made:
        raise SourceError(f"{source.path(file)} names no picture: correct it")
    return made


def _here(source: Source, suffixes: tuple[str, ...]) -> Iterable[str]:
    rows = source.names()
    return [n for n, folder in rows if not folder and n.lower().endswith(suffixes)]


def _has_notes(source: Source, folder: str) -> bool:
    """True if the first XML files of a folder are annotations of Pascal VOC, or one of them."""
    rows = source.names(folder)
    names = [n for n, inner in rows if not inner and n.lower().endswith(XML)]
    return any(_may_be_note(source, f"{folder}/{n}" if folder else n) for n in names[:_LOOKED_AT])


def _may_be_note(source: Source, name: str) -> bool:
    try:
        return _ROOT.search(source.read(name, 0, _HEAD)) is not None
    except SourceError:
        return True  # The reader says why it cannot be read.


def _lie_together(source: Source, folder: str) -> bool:
    """True if a folder holds pictures and XML files of the names of at least half of them, and no
    table of labels."""
    names = source.files(folder)
    notes = {os.path.splitext(name)[0] for name in names if name.lower().endswith(XML)}
    if not notes or any(name.startswith(_TABLES) for name in names):
        return False
    pictures = {os.path.splitext(name)[0] for name in names if name.lower().endswith(PICTURES)}
    shared = len(notes & pictures)
    return shared > 0 and 2 * shared >= len(pictures) and _has_notes(source, folder)
