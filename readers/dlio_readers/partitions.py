"""Folders of partitions as Hive, Spark and pyarrow.dataset write them: `country=DE/part-0.parquet`.

The name of such a folder is a column of all rows below it: a whole number if all its values are,
else text, as in pyarrow.dataset.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote

import numpy as np

from dlio.data.source import File, FilePlace, Source, split_fields
from dlio.errors import SourceError
from dlio_readers.rowgroups import PARTITION, ArrowTable, GroupedFile

_WHOLE: Final = re.compile(r"-?[0-9]{1,10}", re.ASCII)
_WILD: Final = re.compile(r"[*?\[{]")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_DEEPEST: Final = 16
_DELTA: Final = "_delta_log"
_INT32: Final = np.iinfo(np.int32)


def partition_folders(source: Source, folder: str = "") -> list[str]:
    """Return the folders in a folder if all of them are partitions, beyond those of tools, whose
    names begin with `_`; [] if not."""
    names = [name for name, inner in source.names(folder) if inner and not name.startswith("_")]
    return names if all(map(PARTITION.fullmatch, names)) else []


def files_of_partitions(
    url: str, suffixes: tuple[str, ...], most: int | None = None
) -> list[FilePlace]:
    """Return the files with one of some suffixes below the partitions of a folder, sorted, or the
    first `most`; [] if it has no partitions.

    Raises SourceError for partitions too deep, and for a table of Delta Lake.
    """
    source = Source(url)
    if not source.is_folder():
        return []
    if most is None:
        _check_delta(source)
    files: list[FilePlace] = []
    stack = [(name, 1) for name in reversed(partition_folders(source))]
    while stack and (most is None or len(files) < most):
        here, depth = stack.pop()
        if depth > _DEEPEST:
            raise SourceError(f"{source.shown(here)} lies too deep: move its files further up")
        names = source.files(here)
        files += [
            source.file_at(f"{here}/{name}") for name in names if name.lower().endswith(suffixes)
        ]
        below = partition_folders(source, here)
        stack += [(f"{here}/{name}", depth + 1) for name in reversed(below)]
    return files[:most]


def _check_delta(source: Source) -> None:
    """Raise SourceError for a table of Delta Lake, in which rows that were removed lie as well."""
    if (_DELTA, True) in source.names():
        raise SourceError(
            f"{source.shown()} is a table of Delta Lake, whose log says which files are of its "
            "last version: write that one by deltalake.DeltaTable(...).to_pyarrow_table() and "
            "pyarrow.parquet.write_table, or open '*.parquet' in it for the rows of all versions"
        )


class Partitions:
    """The columns in the names of folders between the folder that was opened and some files.

    Of a pattern or a list, that is the folder which all its paths have in common.

    Raises SourceError for a missing value, and for files of other columns.
    """

    def __init__(self, path: str | Sequence[str], files: Sequence[FilePlace]) -> None:
        roots = [
            _literal(split_fields(each)[0]) for each in ([path] if isinstance(path, str) else path)
        ]
        root = _common(roots)
        self._values: dict[str, dict[str, str]] = {}
        self.folders: set[str] = set()
        for file in files:
            inner = file.url[len(root) :].split("/")[:-1] if file.url.startswith(root) else []
            matches = [match for part in inner if (match := PARTITION.fullmatch(part))]
            self.folders.update(match[0] for match in matches)
            self._values[file.url] = {match[1]: unquote(match[2]) for match in matches}
            if _NULL in self._values[file.url].values():
                raise SourceError(
                    f"{file.url} lies in a partition without a value ({_NULL}): give it one, or "
                    "open the other partitions by a pattern"
                )
        names = {name: None for own in self._values.values() for name in own}
        self.columns = {
            name: all(_is_whole(own.get(name, "")) for own in self._values.values())
            for name in names
        }
        """True for each column of whole numbers, by name."""

    def opened(self, file: File, groups: GroupedFile) -> GroupedFile:
        """Return an open file with the columns of its folders."""
        own = self._values[file.url]
        added = {name: value for name, value in own.items() if name not in groups.schema.names}
        return _InPartition(groups, added, self.columns) if added else groups


class _InPartition:
    """An open file with further columns, of one value each."""

    def __init__(
        self, file: GroupedFile, values: Mapping[str, str], is_whole: Mapping[str, bool]
    ) -> None:
        import pyarrow as pa

        self._file, self.count, self.schema = file, file.count, file.schema
        self._scalars = {
            name: pa.scalar(int(value), pa.int32()) if is_whole[name] else pa.scalar(value)
            for name, value in values.items()
        }
        for name, scalar in self._scalars.items():
            self.schema = self.schema.append(pa.field(name, scalar.type))

    def check(self, group: int, names: Sequence[str]) -> int:
        return self._file.check(group, names)

    def table(self, group: int, names: Sequence[str]) -> ArrowTable:
        import pyarrow as pa

        table = self._file.table(group, [name for name in names if name not in self._scalars])
        for name, scalar in self._scalars.items():
            if name in names:
                table = table.append_column(name, pa.repeat(scalar, table.num_rows))
        return table

    def close(self) -> None:
        self._file.close()


def _literal(url: str) -> str:
    """Return what a path or pattern has before its first folder with wildcards, with `/` at its
    end; of a single file or folder all of it but a file's name."""
    wild = _WILD.search(url)
    if wild is not None and not Source(url).exists():
        return url[: wild.start()].rpartition("/")[0] + "/"
    return url.rstrip("/") + "/" if Source(url).is_folder() else url.rpartition("/")[0] + "/"


def _common(roots: Sequence[str]) -> str:
    """Return the folder that some folders have in common."""
    first, last = (each.split("/") for each in (min(roots), max(roots)))
    pairs = enumerate(zip(first, last, strict=False))
    at = next((k for k, (one, other) in pairs if one != other), len(first))
    return "/".join(first[:at]).rstrip("/") + "/"


def _is_whole(value: str) -> bool:
    return bool(_WHOLE.fullmatch(value)) and _INT32.min <= int(value) <= _INT32.max
