"""Files of which each is one sample: volumes, such as scans, whose shapes differ."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.schema import array_kind
from dlio.errors import SourceError, UsageError
from dlio_readers.columns import Column, PlainColumn

Samples = Literal["rows", "files"]
"""Samples are the rows of the files' arrays, or each file is one."""
_VOLUME_DIMENSIONS: Final = 3

_log = logging.getLogger("dlio")


class VolumeColumn:
    """A field whose value in sample i is the whole array of file i.

    Args:
        parts: the array of each file.
    """

    def __init__(self, parts: Sequence[PlainColumn]) -> None:
        self._parts = parts
        shape = parts[0].shape
        self.kind = array_kind(parts[0].dtype, [None] * len(shape))
        self.unit = 1

    def bodies(self) -> npt.NDArray[np.int64]:
        sizes = [int(np.prod(part.shape, dtype=np.int64)) for part in self._parts]
        return np.array(sizes, np.int64) * int(np.dtype(self._parts[0].dtype).itemsize)

    def rows(self, start: int, stop: int) -> list[npt.NDArray[np.generic]]:
        return [part.rows(0, part.shape[0]) for part in self._parts[start:stop]]


def volumes_of(
    path: str, tables: Sequence[Mapping[str, Column]], samples: Samples | None
) -> dict[str, Column] | None:
    """Return the fields of files of which each is one sample; None if samples are their rows.

    By default these are several files whose arrays, without labels, have three dimensions or more
    and other shapes than in other files. If only the number of rows differs, the files could hold
    pictures as well: arrays of three dimensions that are not all bytes are taken for volumes then.

    Args:
        path: of the data set, for errors.
        tables: the columns of each file, by name.
        samples: the user's choice.

    Raises UsageError if that is not possible.
    """
    if samples not in (None, "rows", "files"):
        raise UsageError(f"samples={samples!r}: choose rows or files")
    names = list(tables[0])
    able = all(
        list(table) == names and all(isinstance(column, PlainColumn) for column in table.values())
        for table in tables
    )
    plain = [{n: c for n, c in table.items() if isinstance(c, PlainColumn)} for table in tables]
    able = able and all(
        (part[name].dtype, len(part[name].shape))
        == (plain[0][name].dtype, len(plain[0][name].shape))
        for part in plain
        for name in names
    )
    if samples == "rows" or not able:
        if samples == "files":
            raise UsageError(
                f"samples='files': the files of {path} hold arrays of different names or types, "
                "or values of varying length: leave it out"
            )
        return None
    if samples is None and not _are_volumes(plain):
        return None
    if samples is None and _same_rows(plain):
        _log.warning(
            "%s: each of its %d files is read as one sample, a volume; for the rows of their "
            "arrays give samples='rows'",
            path,
            len(plain),
        )
    if any(0 in part[name].shape for part in plain for name in names):
        raise SourceError(f"{path}: a file holds no rows: remove it")
    return {name: VolumeColumn([part[name] for part in plain]) for name in names}


def _same_rows(tables: Sequence[Mapping[str, PlainColumn]]) -> bool:
    """True if the rows of all files have one shape."""
    first = tables[0]
    return all(table[name].shape[1:] == first[name].shape[1:] for table in tables for name in first)


def _are_volumes(tables: Sequence[Mapping[str, PlainColumn]]) -> bool:
    first = tables[0]
    dimensions = [len(column.shape) for column in first.values()]
    if len(tables) < 2 or min(dimensions) < _VOLUME_DIMENSIONS:
        return False
    if not _same_rows(tables):
        return True
    rows = {table[name].shape[0] for table in tables for name in first}
    bytes_only = all(np.dtype(column.dtype) == np.uint8 for column in first.values())
    return len(rows) > 1 and max(dimensions) == _VOLUME_DIMENSIONS and not bytes_only
