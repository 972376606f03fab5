"""The entries of a folder, which may be millions: packed, and not an object each."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from dlio.data.index_memory import GrowingNames, Names

Row = tuple[str, bool]
"""The name of an entry of a folder, and True if it is a folder."""
Rows = Sequence[Row]
_MANY: Final = 1 << 14
"""Entries that are sorted in memory."""


class FolderNames(Sequence[Row]):
    """The entries of a large folder, sorted by name."""

    def __init__(self, rows: Iterable[Row]) -> None:
        names, folders = GrowingNames(), bytearray()
        for name, is_folder in rows:
            names.add(name)
            folders.append(is_folder)
        self._names, self._folders = names.names(), np.frombuffer(folders, np.bool_)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...

    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        return self._names[number], bool(self._folders[number])

    def __iter__(self) -> Iterator[Row]:
        return zip(self._names, map(bool, self._folders.data), strict=True)

    def __contains__(self, row: object) -> bool:
        if not isinstance(row, tuple):
            return False
        place = bisect_left(self._names, row[0])
        return place < len(self) and self[place] == row

    def files(self) -> Names:
        """Return the names of the files."""
        return self._names.chosen(~self._folders)

    def folders(self) -> list[str]:
        """Return the names of the folders."""
        return [self._names[k] for k in np.flatnonzero(self._folders).tolist()]


def sorted_rows(rows: Iterable[Row]) -> Rows:
    """Return the entries of a folder, sorted by name, packed if they are many."""
    own: list[Row] = []
    parts: list[FolderNames] = []
    for row in rows:
        own.append(row)
        if len(own) == _MANY:
            parts.append(FolderNames(sorted(own)))
            own = []
    own.sort()
    return FolderNames(merge(*parts, own)) if parts else own


def files_among(rows: Rows, suffixes: tuple[str, ...] = ()) -> Sequence[str]:
    """Return the names of the files among entries of a folder: of those with one of some suffixes,
    in small letters or not."""
    if isinstance(rows, FolderNames):
        files = rows.files()
        return files.chosen(files.ending(suffixes)) if suffixes else files
    if not suffixes:
        return [name for name, is_folder in rows if not is_folder]
    return [name for name, is_folder in rows if not is_folder and name.lower().endswith(suffixes)]


def folders_among(rows: Rows) -> list[str]:
    """Return the names of the folders among entries of a folder."""
    if isinstance(rows, FolderNames):
        return rows.folders()
    return [name for name, is_folder in rows if is_folder]


def present(names: Sequence[str], mask: npt.NDArray[np.bool_]) -> Sequence[str]:
    """Return those of some names that a mask of shape (n,) has."""
    if isinstance(names, Names):
        return names.chosen(mask)
    return [names[k] for k in np.flatnonzero(mask).tolist()]
