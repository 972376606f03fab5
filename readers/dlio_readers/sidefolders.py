"""Data sets of two folders side by side, with a file in the second for each picture in the first.

    root/images/a.jpg              root/images/train/a.jpg        root/train/images/a.jpg
    root/labels/a.txt              root/labels/train/a.txt        root/train/labels/a.txt

They are opened by the root, by the root and a split (`train`), or by the folder of pictures.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlio.data.source import Source
from dlio.errors import SourceError

_IMAGES: Final = "images"
_SPLITS: Final = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
"""Folders that are looked into for the two."""


@dataclass(frozen=True, slots=True)
class SideFolders:
    """Where the files of a data set lie."""

    root: str
    """Folder that both lie below; a path or URL."""
    images: str
    """Folder of pictures, below the root."""
    others: str
    """Folder of the files that belong to them, below the root."""

    def other(self, picture: str, extension: str) -> str:
        """Return the name of the file that belongs to a picture."""
        stem = os.path.splitext(picture[len(self.images) + 1 :])[0]
        return f"{self.others}/{stem}{extension}"


def find_sides(path: str, wanted: Sequence[str]) -> list[tuple[str, SideFolders]]:
    """Return (split, its folders) of the data set at a path; split is "" where there is one.

    Args:
        wanted: names that the second folder may have.

    Raises SourceError when a folder cannot be listed.
    """
    source = Source(path)
    if not source.is_folder():
        return []
    folders = [name for name, folder in source.names() if folder]
    sides: list[tuple[str, SideFolders]] = []
    other = next((name for name in wanted if name in folders), None)
    if _IMAGES in folders and other is not None:
        splits = [name for name, folder in source.names(_IMAGES) if folder]
        beside = [name for name, folder in source.names(other) if folder]
        both = [name for name in splits if name in beside]
        if both:
            return [
                (name, SideFolders(path, f"{_IMAGES}/{name}", f"{other}/{name}")) for name in both
            ]
        return [("", SideFolders(path, _IMAGES, other))]
    for name in folders:
        if name.lower() not in _SPLITS:
            continue
        inside = [each for each, folder in source.names(name) if folder]
        other = next((each for each in wanted if each in inside), None)
        if _IMAGES in inside and other is not None:
            sides.append((name, SideFolders(path, f"{name}/{_IMAGES}", f"{name}/{other}")))
    if sides:
        return sides
    return _by_pictures(path, wanted)


def _by_pictures(path: str, wanted: Sequence[str]) -> list[tuple[str, SideFolders]]:
    """Return the folders of a data set that is named by its folder of pictures."""
    parts = os.path.abspath(path).split("/") if Source(path).local else path.split("/")
    parts = [part for k, part in enumerate(parts) if part or k < 3]
    for depth in (1, 2):
        if len(parts) <= depth or parts[-depth] != _IMAGES:
            continue
        root = "/".join(parts[:-depth]) or "/"
        inside = "/".join(parts[len(parts) - depth + 1 :])
        for other in wanted:
            folder = f"{other}/{inside}" if inside else other
            if Source(root).is_folder(folder):
                images = f"{_IMAGES}/{inside}" if inside else _IMAGES
                return [("", SideFolders(root, images, folder))]
    return []


def side_folders(path: str, wanted: Sequence[str], split: str | None) -> SideFolders:
    """Return the folders of a split of the data set at a path.

    Raises SourceError when there are several splits and none is chosen, or no such split.
    """
    sides = find_sides(path, wanted)
    names = [name for name, _ in sides]
    if split is not None:
        for name, folders in sides:
            if name == split:
                return folders
        have = ", ".join(filter(None, names)) or "no splits"
        raise SourceError(f"{path} has {have}: choose one of these in place of split={split!r}")
    if len(sides) > 1:
        first = sides[0][1]
        raise SourceError(
            f"{path} has the splits {', '.join(names)}: choose with split={names[0]!r}, or open "
            f"{first.root.rstrip('/')}/{first.images}"
        )
    return sides[0][1]
