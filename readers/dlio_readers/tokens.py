"""The reader of raw token files (`.bin`): one array of numbers, after another program's tokenizer.

train.bin                      no header: nanoGPT. The type of its numbers is the user's to say.
fineweb_train_000001.bin       256 int32 in front, of which the third counts the tokens: llm.c.
text_document.bin, .idx        Megatron-LM: the index has the type, and the documents' places.
"""

import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dlio.data.chunked_array import ChunkedArray
from dlio.data.foreign_formats import words_of
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import PathRules
from dlio.data.source import File, FilePlace, Source, expand, file_at, is_remote, own_name
from dlio.errors import SourceError, UsageError
from dlio.util.arguments import listed, nearest
from dlio.util.printable import tell_once
from dlio.util.units import counted
from dlio_readers.columns import Column, ColumnReader, ConcatColumn, PlainColumn
from dlio_readers.path_reader import concurrently
from dlio_readers.ranges import StoredArray

_FIELD: Final = "tokens"
_TYPES: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_IDX: Final = re.compile(r"\.bin(?=::|$)", re.IGNORECASE)
_IDX_HEAD: Final = struct.Struct("<9sQBQQ")
"""Magic, version, type, numbers of sequences and of entries that end documents."""
_IDX_MAGIC: Final = b"MMIDIDX\0\0"
_SEQUENCES: Final = 1 << 18
"""Sequences of an index that are looked at at a time."""
_IDX_TYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEAD_BYTES: Final = 1024
_HEADS: Final = {20240520: "uint16", 20240801: "uint32"}
"""Types of the tokens after a header, by its first number, as llm.c writes them."""
_LOOKED_AT: Final = 4096
"""Bytes of a file without a header whose numbers are looked at."""
_MOST_WORDS: Final = 1 << 21
"""Words of a vocabulary, at most, without a notice."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tokens of a file."""

    dtype: np.dtype[np.generic]
    """With its byte order."""
    offset: int
    count: int


class TokensReader(ColumnReader):
    """Read the tokens of `.bin` files in place: `tokens`, one number a sample; `window=` of
    `dlio.open` makes sequences of them.

    Args:
        path: one or several files, or a pattern.
        dtype: type of the numbers of files without a header: `uint16`, `np.uint16` or `<u2`.

    Raises UsageError for a file without a header if `dtype` is missing, or if it is not the one of
    a header or index; SourceError for files that are cut off, and documents that do not lie one
    after another.
    """

    format = "tokens"
    path_rules = PathRules(owns=lambda name: name.endswith(".bin"))

    def __init__(self, path: str | Sequence[str], dtype: object = None) -> None:
        given = None if dtype is None else _dtype_in(dtype)
        places = list(map(file_at, expand(path)))
        files = concurrently(lambda place: place.opened_as(PersistentFile), places, places[0].url)
        concurrently(lambda file: file.stamp, files, places[0].url)  # Kept by the files.
        indexes = concurrently(_index_of, places, places[0].url)
        layouts = [_layout(file, index, given) for file, index in zip(files, indexes, strict=True)]
        other = next((k for k, each in enumerate(layouts) if each.dtype != layouts[0].dtype), None)
        if other is not None:
            raise UsageError(
                f"{files[other].name} is {layouts[other].dtype}, and {files[0].name} "
                f"{layouts[0].dtype}: open them one by one"
            )
        arrays = [
            StoredArray(file, each.offset, (each.count,), each.dtype)
            for file, each in zip(files, layouts, strict=True)
        ]
        parts = [PlainColumn(each, 1) for each in arrays]
        counts = [each.count for each in layouts]
        column: Column = parts[0] if len(parts) == 1 else ConcatColumn(parts, counts)
        self._arrays = [
            array.chunked(f"{file.name}::{_FIELD}")
            for file, array in zip(files, arrays, strict=True)
        ]
        stamps = [f"{file.url} {file.stamp}" for file in files]
        stamps += [f"{index.url} {index.stamp}" for index in indexes if index is not None]
        self._setup({_FIELD: column}, sum(counts), [*stamps, layouts[0].dtype.str])

    @staticmethod
    def recognises(path: str) -> str | None:
        url = expand(path)[0]
        if own_name(url).endswith(".bin") and not Source(url).is_folder():
            words = words_of(own_name(url))
            return f"has {words}" if words else None
        return "does not end in .bin"

    def _chunked(self) -> Mapping[str, Sequence[ChunkedArray]]:
        return {_FIELD: self._arrays}


def _dtype_in(given: object) -> np.dtype[np.generic]:
    """Return a type of whole numbers, as numpy or torch name it. Raises UsageError."""
    name = str(given).removeprefix("torch.")
    try:
        dtype: np.dtype[np.generic] = np.dtype(given if isinstance(given, type) else name)
    except TypeError:
        dtype = np.dtype("void")
    if dtype.name not in _TYPES:
        raise UsageError(f"dtype={name}: give one of {listed(_TYPES)}{nearest(name, _TYPES)}")
    return dtype


def _index_of(place: FilePlace) -> File | None:
    """Return the index of Megatron next to a file; None if there is none."""
    url = _IDX.sub(".idx", place.url, count=1)
    if url == place.url:
        return None
    if is_remote(url):
        return file_at(url).opened() if Source(url).exists() else None
    # The user has named the tokens alone: a link of that name is judged.
    folder, name = os.path.split(url)
    source = Source(folder or ".")
    return source.file(name) if source.exists(name) else None


def _layout(file: File, index: File | None, dtype: np.dtype[np.generic] | None) -> _Layout:
    """Return where a file's tokens lie. Raises UsageError, SourceError as `TokensReader`."""
    said = _of_index(file, index) if index is not None else _of_head(file)
    if said is not None:
        where = file.name if index is None else index.name
        if dtype not in (None, said.dtype):
            raise UsageError(f"dtype={dtype}: {where} says {said.dtype}: leave dtype= out")
        return said
    if dtype is None:
        raise UsageError(
            f"{file.name} has no header that tells the type of its tokens: give dtype='uint16' "
            "(--reader-option dtype=uint16; of vocabularies of up to 65,536) or 'uint32', as they "
            "were written"
        )
    itemsize = dtype.itemsize
    if file.size % itemsize:
        raise SourceError(
            f"{file.name} of {counted(file.size, 'byte')} does not hold whole numbers of {dtype}: "
            "it is cut off, or of another type"
        )
    _tell_if_unlikely(file, dtype)
    return _Layout(dtype, 0, file.size // itemsize)


def _tell_if_unlikely(file: File, dtype: np.dtype[np.generic]) -> None:
    """Warn once if the first numbers look like those of a narrower or a wider type."""
    data = file.read(0, _LOOKED_AT)
    values = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    wide = values.size > 1 and not values[1::2].any() and values.any()
    if int(values.max(initial=0)) >= _MOST_WORDS or int(values.min(initial=0)) < 0:
        seen = f"the number {int(values.max()):,}" if values.min() >= 0 else "numbers below 0"
        tell_once(f"{file.name}: read as {dtype} its tokens have {seen}: check dtype=")
    elif wide:
        tell_once(
            f"{file.name}: read as {dtype} every second token is 0, as of a type twice as wide: "
            "check dtype="
        )


def _of_head(file: File) -> _Layout | None:
    """Return the facts of a header in front of the tokens; None if there is none."""
    head = file.read(0, 12)
    if len(head) < 12 or file.size < _HEAD_BYTES:
        return None
    magic, _, count = struct.unpack("<iii", head)
    left = file.size - _HEAD_BYTES
    # Other programs write other first numbers: a count that agrees with the size is a header, too.
    dtype = _HEADS.get(magic)
    if dtype is None and count > 0 and left in (2 * count, 4 * count):
        dtype = "uint16" if left == 2 * count else "uint32"
    if dtype is None:
        return None
    if left != count * np.dtype(dtype).itemsize:
        raise SourceError(
            f"{file.name}: its header counts {counted(count, 'token')} of {dtype}, and "
            f"{counted(left, 'byte')} follow: it is cut off; restore it"
        )
    return _Layout(np.dtype(dtype).newbyteorder("<"), _HEAD_BYTES, count)


def _of_index(file: File, index: File) -> _Layout:
    """Return the facts of an index of Megatron, whose sequences follow each other in the file."""
    head = index.read(0, _IDX_HEAD.size)
    if len(head) < _IDX_HEAD.size or not head.startswith(_IDX_MAGIC):
        raise SourceError(
            f"{index.name} next to {file.name} is not an index of Megatron, which begins with "
            "MMIDIDX: move it away to read the file by dtype="
        )
    _, version, code, sequences, documents = _IDX_HEAD.unpack(head)
    if version != 1 or code not in _IDX_TYPES:
        raise SourceError(f"{index.name}: version {version} and type {code} are not read")
    needed = _IDX_HEAD.size + 12 * sequences + 8 * documents
    if index.size < needed:
        raise SourceError(f"{index.name} is cut off: {index.size} bytes instead of {needed}")
    dtype = np.dtype(_IDX_TYPES[code]).newbyteorder("<")
    itemsize = dtype.itemsize
    end = _end_of_sequences(index, sequences, itemsize)
    if file.size != end:
        raise SourceError(
            f"{file.name} of {counted(file.size, 'byte')} is not the file of {index.name}, whose "
            f"sequences have {end}: restore it"
        )
    return _Layout(dtype, 0, file.size // itemsize)


def _end_of_sequences(index: File, sequences: int, itemsize: int) -> int:
    """Return the bytes of the sequences of an index of Megatron, which is read in parts. Raises
    SourceError if they do not follow each other."""
    end = 0
    for first in range(0, sequences, _SEQUENCES):
        count = min(_SEQUENCES, sequences - first)
        data = index.read(_IDX_HEAD.size + 4 * first, 4 * count)
        lengths = np.frombuffer(data, "<i4").astype(np.int64) * itemsize
        places = np.frombuffer(
            index.read(_IDX_HEAD.size + 4 * sequences + 8 * first, 8 * count), "<i8"
        )
        ends = end + np.cumsum(lengths)
        if (lengths < 0).any() or not np.array_equal(places, ends - lengths):
            raise SourceError(
                f"{index.name}: its sequences do not lie one after another: pack it anew"
            )
        end = int(ends[-1])
    return end
