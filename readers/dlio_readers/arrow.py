"""The reader of Arrow files and streams: Feather, and folders that Hugging Face data sets save."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dlio.data.reader_contract import PathRules
from dlio.data.source import File, FilePlace, Source, expand, files_below, inside, own_name
from dlio.errors import SourceError, UsageError
from dlio.util.limits import check_claim, parsing
from dlio.util.structured_text import parse_json
from dlio_readers.path_reader import lie_at, split_paths
from dlio_readers.rowgroups import ArrowTable, RowGroupReader

# Arrow IPC files and streams: where their record batches lie, and their sizes when decompressed
#
# A stream is a sequence of messages: 0xFFFFFFFF, the size of the metadata, metadata (a flatbuffer),
# and a body. A file has magic words at both ends, and a footer with the places of its messages,
# which alone counts: the rest of it need not be a stream. Of the metadata only numbers
# are taken here, bounded by the file's size; pyarrow reads the rest.
#
# Source: arrow.apache.org/docs/format/Columnar.html, Message.fbs, File.fbs.

_FILE_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
_MAGIC_BYTES: Final = 8
_CONTINUED: Final = b"\xff\xff\xff\xff"
_MOST_METADATA: Final = 64 << 20
_MOST_BATCHES: Final = 1 << 22
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_TYPE, _HEADER, _BODY = 1, 2, 3
"""Fields of the table Message."""
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3
"""Fields of the table RecordBatch."""
_DATA: Final = 1
"""The field of the table DictionaryBatch with a RecordBatch."""
_DICTIONARIES, _BATCHES = 2, 3
"""Fields of the table Footer."""
_PAIR: Final = struct.Struct("<qq")
"""Offset and bytes of a buffer in a body."""
_BLOCK: Final = struct.Struct("<qi4xq")
"""Offset, bytes of metadata and bytes of the body of a message in a file."""


@dataclass(frozen=True, slots=True)
class _Message:
    at: int
    """Offset in the file."""
    metadata: int
    """Bytes before the body."""
    body: int
    dictionaries: int
    """How many of the file's dictionaries stand before it."""


class ArrowStream:
    """The schema of an Arrow file or stream, and the places of its record batches. Thread-safe.

    Raises SourceError for files that are damaged, cut off, or of Feather 1.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        magic = file.read(0, _MAGIC_BYTES)
        if magic[:4] == _FEATHER_1:
            raise SourceError(
                f"{file.name} is of Feather 1, which is not read: write it again with "
                "pyarrow.feather.write_feather(table, path)"
            )
        self._batches: list[_Message] = []
        self._dictionaries: list[_Message] = []
        self.schema: Any = None
        is_file = magic.startswith(_FILE_MAGIC)
        with parsing(file.name):
            if is_file:
                self._read_footer()
            else:
                self._scan()
        if self.schema is None:
            raise SourceError(f"{file.name} is cut off: it has no schema; restore it")
        self.count = len(self._batches)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def check(self, number: int, names: Sequence[str]) -> int:
        """Return the rows of a record batch. Raises SourceError if it claims too many."""
        batch = self._batches[number]
        with parsing(self._where(number)):
            _, table = self._head(batch)
            rows = table.inner(_HEADER).whole(_LENGTH, "<q")
        # Values of no bytes, such as empty lists of a fixed size, take none in a file.
        check_claim(8 * rows, self._file.size, self._where(number))
        return rows

    def table(self, number: int, names: Sequence[str]) -> ArrowTable:
        """Return columns of a record batch, validated. Raises any error of pyarrow."""
        import pyarrow as pa

        batch = self._batch(number)
        columns = [batch.column(batch.schema.names.index(name)) for name in names]
        for column in columns:
            # Offsets are taken as they are otherwise, and lead anywhere.
            column.validate(full=True)
        return pa.table(columns, names=names)

    def _where(self, number: int) -> str:
        return f"{self._file.name}, record batch {number},"

    def _batch(self, number: int) -> Any:
        import pyarrow as pa

        batch = self._batches[number]
        messages = [*self._dictionaries[: batch.dictionaries], batch]
        parts = [self._whole(each, self._where(number)) for each in messages]
        stream = pa.py_buffer(b"".join([self.schema.serialize().to_pybytes(), *parts]))
        return pa.ipc.open_stream(stream).read_next_batch()

    def _whole(self, message: _Message, where: str) -> bytes:
        size = message.metadata + message.body
        data = self._file.read(message.at, size)
        if len(data) < size:
            raise SourceError(f"{where} is cut off: restore the file")
        check_claim(_expanded(data, message.metadata), size, where)
        return data

    def _head(self, message: _Message) -> tuple[int, "_FlatbufferTable"]:
        """Return the kind of a message, and its table."""
        table = _message_of(self._file.read(message.at, message.metadata))
        return table.whole(_TYPE, "<B"), table

    def _read_footer(self) -> None:
        """Take the places of messages from the end of a file."""
        import pyarrow as pa

        file = self._file
        tail = file.read(max(0, file.size - 10), 10)
        size = int.from_bytes(tail[:4], "little", signed=True)
        if file.size < 2 * _MAGIC_BYTES + 4 or tail[4:] != _FILE_MAGIC:
            raise SourceError(f"{file.name} is cut off: it lacks its end; restore it")
        if not 0 < size <= min(_MOST_METADATA, file.size - 10):
            raise SourceError(f"{file.name} is damaged: its footer has {size} bytes; restore it")
        footer = _FlatbufferTable.root(file.read(file.size - 10 - size, size))
        blocks = [footer.structs(field, _BLOCK) for field in (_DICTIONARIES, _BATCHES)]
        if len(blocks[1]) > _MOST_BATCHES:
            raise SourceError(f"{file.name} has over {_MOST_BATCHES} record batches")
        for at, metadata, body in (*blocks[0], *blocks[1]):
            if min(at, metadata, body) < 0 or at + metadata + body > file.size:
                raise SourceError(f"{file.name} is damaged: its footer leads out of it; restore it")
        first, others = blocks
        self._dictionaries = [_Message(*_place(each), k) for k, each in enumerate(first)]
        self._batches = [_Message(*_place(each), len(first)) for each in others]
        with file.open() as stream, pa.ipc.open_file(stream) as opened:
            self.schema = opened.schema

    def _scan(self) -> None:
        """Walk over the messages of a stream, without reading bodies."""
        import pyarrow as pa

        file, at = self._file, 0
        while at < file.size:
            head = file.read(at, 8)
            if len(head) < 4:
                raise SourceError(f"{file.name} is cut off at byte {at}: restore it")
            size, prefix = int.from_bytes(head[:4], "little", signed=True), 4
            if head[:4] == _CONTINUED:  # Which writers before Arrow 0.15 leave out.
                size, prefix = int.from_bytes(head[4:], "little", signed=True), 8
            if size == 0:
                break
            if not at and not 0 < size <= min(_MOST_METADATA, file.size):
                raise SourceError(f"{file.name} is not an Arrow file: check the path")
            if not 0 < size <= min(_MOST_METADATA, file.size):
                raise SourceError(f"{file.name} is damaged at byte {at}: restore it")
            metadata = file.read(at + prefix, size)
            table = _FlatbufferTable.root(metadata)
            body = table.whole(_BODY, "<q")
            if not 0 <= body <= file.size or at + prefix + size + body > file.size:
                raise SourceError(
                    f"{file.name} is cut off: a message at byte {at} has {body} bytes; restore it"
                )
            kind = table.whole(_TYPE, "<B")
            message = _Message(at, prefix + size, body, len(self._dictionaries))
            if kind == _SCHEMA and self.schema is None:
                self.schema = pa.ipc.read_schema(pa.BufferReader(file.read(at, prefix + size)))
            elif kind == _BATCH:
                self._batches.append(message)
            elif kind == _DICTIONARY:
                self._dictionaries.append(message)
            else:
                raise SourceError(f"{file.name} holds more than one table, at byte {at}: divide it")
            if len(self._batches) + len(self._dictionaries) > _MOST_BATCHES:
                raise SourceError(f"{file.name} has over {_MOST_BATCHES} record batches")
            at += prefix + size + body


def _place(block: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (offset, bytes of metadata, bytes of the body) of a message."""
    at, metadata, body = block
    return at, metadata, body


def _message_of(data: bytes) -> "_FlatbufferTable":
    """Return the table of a message's metadata, which older writers mark by its size alone."""
    return _FlatbufferTable.root(data[8:] if data[:4] == _CONTINUED else data[4:])


def _expanded(data: bytes, metadata: int) -> int:
    """Return the bytes that a record batch becomes when its buffers are decompressed."""
    message = _message_of(data[:metadata])
    batch = message.inner(_HEADER)
    if message.whole(_TYPE, "<B") == _DICTIONARY:
        batch = batch.inner(_DATA)
    body = len(data) - metadata
    if not batch.offset(_COMPRESSION):
        return body
    total = 0
    for at, size in batch.structs(_BUFFERS, _PAIR):
        if size >= 8 and 0 <= at <= body - 8:
            total += max(0, struct.unpack_from("<q", data, metadata + at)[0])
    return body + total


class _FlatbufferTable:
    """A table of a flatbuffer. Offsets that lead out of it raise struct.error, or IndexError."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - self._number("<i", at)
        self._size = self._number("<H", self._vtable)

    @classmethod
    def root(cls, data: bytes) -> "_FlatbufferTable":
        """Return the table that a flatbuffer holds."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def offset(self, field: int) -> int:
        """Return the place of a field; 0 if it is missing."""
        slot = 4 + 2 * field
        own = self._number("<H", self._vtable + slot) if slot < self._size else 0
        return self._at + own if own else 0

    def whole(self, field: int, code: str) -> int:
        """Return a number; 0 if it is missing."""
        at = self.offset(field)
        return self._number(code, at) if at else 0

    def inner(self, field: int) -> "_FlatbufferTable":
        """Return a table that this one refers to."""
        at = self.offset(field)
        return _FlatbufferTable(self._data, at + self._number("<I", at))

    def structs(self, field: int, layout: struct.Struct) -> list[tuple[int, ...]]:
        """Return a vector of structs."""
        at = self.offset(field)
        if not at:
            return []
        first = at + self._number("<I", at)
        count = self._number("<I", first)
        if count * layout.size > len(self._data):
            raise IndexError("a vector is longer than its flatbuffer")
        return [layout.unpack_from(self._data, first + 4 + layout.size * k) for k in range(count)]

    def _number(self, code: str, at: int) -> int:
        if at < 0:
            raise IndexError("an offset leads out of the flatbuffer")
        return int(struct.unpack_from(code, self._data, at)[0])


# Samples

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
        label: the column that is the label, whatever its name; the field is called `label`.
        columns: columns of numbers to read as one float32 array, `features`, next to the label;
            "*" for all that are numbers.

    Raises SourceError for damaged files, nulls, and column types that samples cannot have.
    """

    format = "arrow"
    path_rules = PathRules(owns=lambda name: name.endswith(_SUFFIXES))

    def __init__(
        self,
        path: str | Sequence[str],
        label: str | None = None,
        columns: Sequence[str] | str | None = None,
    ) -> None:
        files: list[FilePlace] = []
        for url in expand(split_paths(path)[0]):
            files += _saved(url) or _listed(url)
        if not files:
            raise SourceError(f"{self.path} holds no Arrow files")
        self._setup(path, files, ArrowStream, label=label, features=columns)

    @staticmethod
    def recognises(path: str) -> str | None:
        if lie_at(path, _SUFFIXES, marker=_PARTS):
            return None
        return "is neither a .arrow or .feather nor a folder of them"


def _saved(url: str) -> list[FilePlace]:
    """Return the files of a folder that `save_to_disk` wrote, in their order; none for others.

    Raises UsageError for a folder of several parts.
    """
    source = Source(url)
    if own_name(url).endswith(_SUFFIXES) or not source.is_folder():
        return []
    names = source.files()
    if _PARTS in names:
        parts = source.folders()
        raise UsageError(
            f"{url} holds the parts {', '.join(parts[:8])} of a data set: open one, such as "
            f"{inside(url, parts[0] if parts else 'train')}"
        )
    if _STATE not in names:
        return []
    try:
        state = parse_json(source.read(_STATE, 0, _MOST_STATE), source.path(_STATE))
        files = [str(row["filename"]) for row in state["_data_files"]]
        chosen = state.get("_indices_data_files") or state.get("_indices_files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{url}/{_STATE} is damaged: {error!r}; restore it") from error
    if chosen:
        raise SourceError(
            f"{url} is some of the rows of its files, as its {_STATE} says: save it again with "
            "datasets.load_from_disk(...).flatten_indices().save_to_disk(...)"
        )
    for name in files:
        if name not in names:
            raise SourceError(f"{url} lacks {name}, which its {_STATE} names: restore it")
    return [source.file_at(name) for name in files]


def _listed(url: str) -> list[FilePlace]:
    files = files_below(url, _SUFFIXES)
    if len(files) == 1 and files[0].url == url:
        return files
    return [each for each in files if not each.name.startswith(_CACHES)]
