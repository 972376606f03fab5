"""The reader of Arrow files and streams: Feather, and folders that Hugging Face data sets save."""

import json
from collections.abc import Sequence
from typing import Any, Final

from dlio.data.source import File, Source, expand, files_below, inside, own_name
from dlio.errors import SourceError, UsageError
from dlio_readers.arrowstream import ArrowStream
from dlio_readers.path_reader import split_paths
from dlio_readers.rowgroups import RowGroupReader, lie_at

_SUFFIXES: Final = (".arrow", ".arrows", ".feather", ".ipc")
_STATE: Final = "state.json"
_PARTS: Final = "dataset_dict.json"
_MOST_STATE: Final = 16 << 20
_CACHES: Final = ("cache-", "tmp")
"""Beginnings of the names of files that Hugging Face's library leaves next to a data set's."""


class ArrowReader(RowGroupReader):
    """Read Arrow IPC files (Feather 2) and streams, compressed or not; decodes record batches.

    Columns become fields as those of Parquet files do.

    Args:
        path: a file, a folder, a pattern or a list, with the names of columns after `::`; also a
            folder of `datasets`' save_to_disk.

    Raises SourceError for damaged files, nulls, and column types that samples cannot have.
    """

    format = "arrow"

    def __init__(self, path: str | Sequence[str]) -> None:
        files: list[str] = []
        for url in expand(split_paths(path)[0]):
            files += _saved(url) or _listed(url)
        if not files:
            raise SourceError(f"{self.path} holds no Arrow files")
        self._setup(path, files)

    @staticmethod
    def recognises(path: str) -> str | None:
        if lie_at(path, _SUFFIXES, marker=_PARTS):
            return None
        return "is neither a .arrow or .feather nor a folder of them"

    def _opened_file(self, file: File) -> ArrowStream:
        return ArrowStream(file)

    def _schema_of(self, opened: ArrowStream) -> Any:
        return opened.schema

    def _count_groups(self, opened: ArrowStream) -> int:
        return len(opened.batches)

    def _check_group(self, number: int, group: int, names: Sequence[str]) -> int:
        rows = self._open(number).rows(group)
        if not 0 <= rows <= 8 * self._files[number].size:
            raise SourceError(
                f"{self._files[number].name}, record batch {group}, claims {rows} rows: it is "
                "damaged; restore it"
            )
        return int(rows)

    def _table(self, opened: ArrowStream, group: int, names: Sequence[str]) -> Any:
        return opened.table(group, list(names))


def _saved(url: str) -> list[str]:
    """Return the files of a folder that `save_to_disk` wrote, in their order; none for others.

    Raises UsageError for a folder of several parts.
    """
    source = Source(url)
    if own_name(url).endswith(_SUFFIXES) or not source.is_folder():
        return []
    names = [name for name, folder in source.names() if not folder]
    if _PARTS in names:
        parts = [name for name, folder in source.names() if folder]
        raise UsageError(
            f"{url} holds the parts {', '.join(parts[:8])} of a data set: open one, such as "
            f"{inside(url, parts[0] if parts else 'train')}"
        )
    if _STATE not in names:
        return []
    try:
        rows = json.loads(source.read(_STATE, 0, _MOST_STATE))["_data_files"]
        files = [str(row["filename"]) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{url}/{_STATE} is damaged: {error!r}; restore it") from error
    for name in files:
        if name not in names:
            raise SourceError(f"{url} lacks {name}, which its {_STATE} names: restore it")
        source.check_link(source.path(name))
    return [inside(url, name) for name in files]


def _listed(url: str) -> list[str]:
    files = files_below(url, _SUFFIXES)
    if len(files) == 1 and files[0] == url:
        return files
    return [each for each in files if not each.rsplit("/", 1)[-1].startswith(_CACHES)]
