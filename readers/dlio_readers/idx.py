"""The reader of IDX files, the format of MNIST and its like, compressed or not.

train-images-idx3-ubyte     train-labels-idx1-ubyte     t10k-images-idx3-ubyte.gz     MNIST
train-images.idx3-ubyte     emnist-letters-train-images-idx3-ubyte.gz                 its copies

A file is two bytes of 0, one for the type of its numbers, one for the number of dimensions, the
size of each in 4 bytes, and the numbers, all with the highest byte first.
"""

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from dlio.data.chunked_array import ChunkedArray
from dlio.data.interpretation import named_files
from dlio.data.reader_contract import PathRules
from dlio.data.source import File, FilePlace, Source, expand, file_at, is_remote, own_name
from dlio.data.splits import split_word
from dlio.errors import SourceError, UsageError
from dlio.util.printable import tell_once
from dlio.util.units import counted
from dlio_readers.columns import Column, ColumnReader, ConcatColumn, PlainColumn, Select, slab
from dlio_readers.compressed_files import SUFFIXES as COMPRESSED
from dlio_readers.compressed_files import in_memory
from dlio_readers.path_reader import concurrently
from dlio_readers.ranges import StoredArray

_PACKED: Final = "|".join(re.escape(suffix) for suffix in COMPRESSED)
_TYPES: Final = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_MOST_DIMENSIONS: Final = 31
"""NumPy has arrays of up to 32 dimensions in all versions, and a batch has one more."""
_MOST_BYTES: Final = 1 << 63
"""More than any file has."""
_NAME: Final = re.compile(
    rf"(?P<stem>.*?)[-._](?:idx\d(?:[-_](?:ubyte|byte|short|int|float|double))?|ubyte)"
    rf"(?P<packed>{_PACKED})?",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"[-._ ]*(?<![a-z])(image|img|label)s?(?![a-z])", re.IGNORECASE)
_SPACES: Final = "-._ "
_FIELDS: Final = {"image": "image", "img": "image", "label": "label"}
_OTHER: Final = "data"
"""The field of a file whose name does not say whether it is of pictures or labels."""


def _is_idx(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition("/")[2]) is not None


class IdxReader(ColumnReader):
    """Read the rows of IDX files: `image` and `label` of files whose names say so, else `data`.

    Arrays are read in place, and decompressed whole where they are compressed.

    Args:
        path: a folder, one or several files, or a pattern.
        select: part of every sample of an array to read.

    Raises SourceError for files that are cut off or not of the format, UsageError for several data
    sets, as in the folder of EMNIST.
    """

    format = "idx"
    path_rules = PathRules(owns=_is_idx)

    def __init__(self, path: str | Sequence[str], select: Select = None) -> None:
        places = _places(path)
        files = concurrently(FilePlace.opened, places, places[0].url)
        concurrently(lambda file: file.stamp, files, places[0].url)  # Kept by the files.
        sets = _sets([place.name for place in places], self.path)
        fields = sorted(sets[0])
        _tell_of_others(places[0], fields)
        arrays = concurrently(_array, files, places[0].url)
        counts = []
        for part in sets:
            rows = {files[k].name: arrays[k].shape[0] for k in part.values()}
            if len(set(rows.values())) > 1:
                words = " and ".join(f"{counted(n, 'row')} in {name}" for name, n in rows.items())
                raise SourceError(f"{words}: files of the same samples have as many")
            counts.append(next(iter(rows.values())))
        columns: dict[str, Column] = {}
        self._arrays: dict[str, list[ChunkedArray]] = {}
        for field in fields:
            own = [arrays[part[field]] for part in sets]
            kinds = {(each.dtype, each.shape[1:]) for each in own}
            if len(kinds) > 1:
                shown = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
                raise UsageError(f"{self.path}: {field} is {shown}: open the files one by one")
            own_part = slab(select, field, own[0].shape[1:])
            parts = [PlainColumn(each, 1, own_part) for each in own]
            columns[field] = parts[0] if len(parts) == 1 else ConcatColumn(parts, counts)
            if select is None:
                self._arrays[field] = [each.chunked(f"{self.path}::{field}") for each in own]
        stamps = [f"{file.url} {file.stamp}" for file in files]
        self._setup(columns, sum(counts), [*stamps, repr(select)], select=select)

    @staticmethod
    def recognises(path: str) -> str | None:
        url = expand(path)[0]
        source = Source(url)
        if not source.is_folder():
            names: Sequence[str] = [own_name(url)]
        else:
            names = source.files()
        has = any(map(_is_idx, names))
        return None if has else "has no files named as train-images-idx3-ubyte"

    def _chunked(self) -> Mapping[str, Sequence[ChunkedArray]]:
        return self._arrays


def _places(path: str | Sequence[str]) -> list[FilePlace]:
    """Return the files at one or several paths; of those that lie there compressed, too, as
    torchvision leaves them, the others."""
    places: dict[str, FilePlace] = {}
    for each in expand(path):
        source = Source(each)
        own = [file_at(each)]
        if source.is_folder():
            names = [name for name, folder in source.names() if not folder and _is_idx(name)]
            own = [source.file_at(name) for name in sorted(names, key=len)]
        for place in own:
            packed = next((end for end in COMPRESSED if place.name.lower().endswith(end)), "")
            key = place.url.lower().removesuffix(packed)
            if key not in places or not packed:
                places[key] = place
    return sorted(places.values(), key=lambda place: place.url)


def _sets(names: Sequence[str], path: str) -> list[dict[str, int]]:
    """Return for each part of a data set, such as `train` and `t10k`, the number of the file of
    each field. Raises UsageError for several data sets, and parts of other fields."""
    sets: dict[str, dict[str, int]] = {}
    families: dict[str, str] = {}
    for number, name in enumerate(names):
        key, field = _parts_of(name)
        families.setdefault(key.replace(split_word(key) or "", "").strip(_SPACES), key)
        if sets.setdefault(key, {}).setdefault(field, number) != number:
            raise UsageError(
                f"{path}: {names[sets[key][field]]} and {name} are both {field}: open one"
            )
    if len(families) > 1:
        raise UsageError(
            f"{path} holds the data sets {', '.join(families.values())}: open one of them by a "
            f"pattern, such as {next(iter(families.values()))}*"
        )
    first = next(iter(sets.values()))
    other = next((key for key, part in sets.items() if part.keys() != first.keys()), None)
    if other is not None:
        raise UsageError(
            f"{path}: {next(iter(sets))} has {' and '.join(sorted(first))}, and {other} has "
            f"{' and '.join(sorted(sets[other]))}: copy the missing file, or open one of them"
        )
    return list(sets.values())


def _parts_of(name: str) -> tuple[str, str]:
    """Return (name of a file without the word for its field and its suffix, field)."""
    match = _NAME.fullmatch(name)
    stem = match["stem"] if match else name
    part = _PART.search(stem)
    return _PART.sub("", stem, count=1), _FIELDS[part[1].lower()] if part else _OTHER


def _tell_of_others(place: FilePlace, fields: Collection[str]) -> None:
    """Warn once of files next to one that is read: its labels, if they are not, and the names of
    EMNIST's classes."""
    folder, _, name = place.url.rpartition("/")
    if is_remote(place.url):
        return
    rows = Source(folder or ".").names()
    texts = [each for each, inner in rows if not inner and each.endswith("mapping.txt")]
    own = [each for each in texts if name.startswith(each.removesuffix("mapping.txt"))]
    if own:
        tell_once(f"{folder}/{own[0]} names the classes, which is not read: labels are numbers")
    labels = [each for each, _ in rows if _is_idx(each)]
    labels = [each for each in labels if _parts_of(each) == (_parts_of(name)[0], "label")]
    if "label" not in fields and labels:
        left = named_files(labels)
        tell_once(f"{place.url}: {left} next to it left out: open the folder, or a list of both")


def _array(file: File) -> StoredArray:
    """Return the array of a file. Raises SourceError for another format, and if it is cut off."""
    plain = in_memory(file)
    head = plain.read(0, 4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or not head[3]:
        raise SourceError(
            f"{file.name} is not an IDX file: it begins with {head.hex(' ') or 'nothing'}, "
            "not with 00 00, a type from 08 to 0e and a number of dimensions"
        )
    if head[3] > _MOST_DIMENSIONS:
        raise SourceError(
            f"{file.name} says that it has {counted(head[3], 'dimension')}; up to "
            f"{_MOST_DIMENSIONS} can be read: it is damaged, restore it"
        )
    sizes = plain.read(4, 4 * head[3])
    start = 4 + 4 * head[3]
    shape = struct.unpack(f">{len(sizes) // 4}I", sizes[: len(sizes) // 4 * 4])
    dtype = np.dtype(_TYPES[head[2]])
    end = start + math.prod(shape) * dtype.itemsize
    if len(shape) < head[3] or end > plain.size:
        wanted = f"{end}" if end < _MOST_BYTES else f"over {_MOST_BYTES}"
        raise SourceError(
            f"{file.name} is cut off: {plain.size} bytes instead of {wanted}: restore it"
        )
    if end < plain.size:
        tell_once(f"{file.name}: {counted(plain.size - end, 'byte')} behind its array left out")
    return StoredArray(plain, start, shape, dtype)
