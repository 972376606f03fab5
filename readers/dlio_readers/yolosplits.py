"""The splits that a data.yaml of YOLO names: folders of pictures, or lists of them (`.txt`); or the
lists alone, as of Darknet.

path: .                        # from where the others count; the file's own folder without it
train: images/train            # a folder, a list of pictures (train.txt), or several of them
val: val.txt
"""

import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from dlio.data.source import Source
from dlio.data.splits import WHOLE, chosen_split, how_to_choose, split_of, split_word
from dlio.errors import SourceError, UsageError, printable
from dlio.util.printable import tell_once
from dlio_readers.fileset import PICTURES, files_in

NULLS: Final = ("", "~", "null", "Null", "NULL")
"""Texts of YAML for no value."""
_MOST_LIST: Final = 128 << 20
_LOOKED_AT: Final = 64
"""Pictures of a place whose label files are looked for."""
_HEAD: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class YoloSplit:
    """The pictures of a split, and where their labels lie."""

    name: str
    pictures: tuple[str, ...]
    files: tuple[str, ...] = ()
    """Lists of pictures that were read, below the source."""


def label_of(picture: str) -> str:
    """Return the label file of a picture: `images` in its path becomes `labels`."""
    parts = posixpath.splitext(picture)[0].split("/")
    places = [k for k, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return "/".join(parts) + ".txt"


def split_lists(source: Source, files: Iterable[str]) -> dict[str, object]:
    """Return the lists of pictures among the files of a folder, by the split in their names."""
    made: dict[str, object] = {}
    for name in files:
        split = split_word(posixpath.splitext(name)[0]) if name.endswith(".txt") else None
        if split and _is_list(source, name):
            made.setdefault(split, name)
    return made


def _is_list(source: Source, name: str) -> bool:
    head = source.read(name, 0, _HEAD).decode("utf-8-sig", "replace").strip()
    return head.partition("\n")[0].strip().lower().endswith(PICTURES)


def has_labels(source: Source, described: Mapping[str, object]) -> bool:
    """True if one of the first pictures that a data.yaml names for its splits has a label file."""
    for key, value in described.items():
        for entry in value if isinstance(value, list) else [value]:
            if not split_of(key, folder=True) or not isinstance(entry, str) or entry in NULLS:
                continue
            place = _place(source, described, entry)
            if place is None:
                continue
            try:
                is_list = place.endswith(".txt")
                names = _listed(source, place) if is_list else files_in(source, place, PICTURES)
                if any(source.exists(label_of(name)) for name in islice(names, _LOOKED_AT)):
                    return True
            except SourceError:
                return True  # The reader tells.
    return False


def yolo_split(
    source: Source, yaml: str, described: Mapping[str, object], split: str | None
) -> YoloSplit | None:
    """Return the split of a data.yaml that is chosen, or None if its splits lie elsewhere.

    Raises UsageError when there are several and none is chosen, SourceError for lists that name
    pictures outside of the folder.
    """
    entries = {key: value for key, value in described.items() if split_of(key, folder=True)}
    known: dict[str, list[str]] = {}
    lost: list[str] = []
    for key, value in entries.items():
        given = value if isinstance(value, list) else [value]
        names = [each for each in given if isinstance(each, str) and each not in NULLS]
        places = [_place(source, described, each) for each in names]
        lost += [each for each, place in zip(names, places, strict=True) if place is None]
        existing = [each for each in places if each is not None]
        if existing:
            known[key] = existing
    shown = source.path(yaml)
    if lost:
        tell_once(
            f"{shown}: {len(lost)} of the places of its splits are not in the data set's folder, "
            f"such as {printable(lost[0])}: left out"
        )
    if not known:
        return None
    if split is None or split == WHOLE:
        keys = list(known)
        if split is None and any(known[key] != known[keys[0]] for key in keys):
            raise UsageError(
                f"{shown} names the splits {', '.join(known)}: {how_to_choose(keys[0])}, or "
                f"split={WHOLE!r} for all of them as one data set"
            )
        name = split or keys[0]
    else:
        name = chosen_split(split, list(known), shown)
        keys = [name]
    pictures: dict[str, None] = {}
    lists: dict[str, None] = {}
    for place in dict.fromkeys(place for key in keys for place in known[key]):
        if place.endswith(".txt"):
            lists[place] = None
            pictures.update(dict.fromkeys(_listed(source, place)))
        else:
            pictures.update(dict.fromkeys(files_in(source, place, PICTURES)))
    if not pictures:
        raise SourceError(f"{shown}: its split {name} has no pictures: correct its {keys[0]}:")
    return YoloSplit(name, tuple(pictures), tuple(lists))


def _place(source: Source, described: Mapping[str, object], entry: str) -> str | None:
    """Return a folder or list below the source that an entry means; None if it is not there."""
    base = described.get("path")
    base = base if isinstance(base, str) else "."
    plain = entry
    while plain.startswith("../"):  # As Roboflow writes them, for a file one folder further down.
        plain = plain[3:]
    for tried in (posixpath.join(base, entry), entry, plain):
        name = _below(source, tried)
        if name is not None and source.exists(name):
            return name
    return None


def _below(source: Source, name: str) -> str | None:
    """Return a path relative to the source, None if it leads out of it."""
    if name.startswith("/"):
        if not source.local:
            return None
        name = os.path.relpath(name, source.root)
    name = posixpath.normpath(name)
    if name == ".." or name.startswith("../"):
        return None
    return "" if name == "." else name


def _listed(source: Source, name: str) -> list[str]:
    """Return the pictures of a list, whose lines count from its own folder, or the source's."""
    data = source.read(name, 0, _MOST_LIST + 1)
    if len(data) > _MOST_LIST:
        raise SourceError(f"{source.path(name)} has over {_MOST_LIST} bytes: it is not a list")
    pictures: list[str] = []
    folder = posixpath.dirname(name)
    cut = 0
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        entry = line.strip().replace("\\", "/")
        if not entry:
            continue
        inside = _below(source, posixpath.join(folder, entry))
        if inside is not None and folder and not source.exists(inside):
            inside = _below(source, entry)
        parts = entry.split("/")
        if cut or inside is None or (not pictures and not source.exists(inside)):
            # Of another machine, or from a folder above, as CVAT and Darknet write them.
            tries = (cut, *range(1, len(parts))) if cut else range(1, len(parts))
            ends = ((k, _below(source, "/".join(parts[k:]))) for k in tries)
            known = ((k, each) for k, each in ends if each and source.exists(each))
            cut, inside = next(known, (0, inside))
        if inside is None:
            raise SourceError(
                f"{source.path(name)}, line {number}: {entry} lies outside of the data set's "
                "folder: name pictures below it"
            )
        pictures.append(inside)
    return pictures
