"""The reader of MosaicML Streaming's MDS: a folder of raw or compressed shards and an `index.json`.

A shard holds a u32 count, count + 1 u32 offsets, then the samples. A sample holds a u32 size for
each column of variable size, then the bytes of all columns.

Columns that need pickle (`pkl`) are refused. A compressed shard is decompressed whole; the last few
are cached.
"""

import bz2
import gzip
import io
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.index import Arrays, cached_index
from dlio.data.index_memory import GrowingColumn
from dlio.data.labels import (
    LabelColumn,
    check_label,
    field_named,
    first_labels,
    label_names,
    not_scalar,
)
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import PathRules
from dlio.data.schema import Kind, Schema, array_kind
from dlio.data.source import ReadErrors, Source, expand
from dlio.errors import SourceError, printable
from dlio.util.forks import new_lock
from dlio.util.limits import check_claim, parsing
from dlio.util.structured_text import parse_json
from dlio.util.units import counted
from dlio_readers.path_reader import PathReader, neighbours

_VERSION: Final = 2
_INDEX_VERSION: Final = 3
_AT_A_TIME: Final = 1024
"""Samples that are read together while their shard is indexed."""
_INDEX: Final = "index.json"
_MAX_INDEX: Final = 64 << 20
_MAX_SHARD: Final = 4 << 30
_SLACK: Final = 1 << 20
_VARINT: Final = 5
_MAX_COLUMNS: Final = 256
_KEPT_BYTES: Final = 256 << 20
_LONGEST_LABEL: Final = 1 << 12
"""Bytes of the longest text or bytes that may be a label."""
_PLAIN: Final = {
    "bytes": "bytes",
    "str": "text",
    "str_int": "text",
    "str_float": "text",
    "str_decimal": "text",
    "jpeg": "jpeg",
    "png": "png",
    "json": "json",
    "jpeg_array": "bytes",
    "jpegarray": "bytes",
    "list[jpeg]": "bytes",
    "list[png]": "bytes",
}
_CODES: Final = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_NUMBERS: Final = tuple(_CODES.values())


@dataclass(frozen=True, slots=True)
class _MdsColumn:
    name: str
    encoding: str
    size: int | None
    """Bytes per sample; None if variable."""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    """Shape of arrays; None if each value is preceded by its own."""

    @property
    def array(self) -> bool:
        return self.encoding.split(":")[0] == "ndarray"


class MdsReader(PathReader):
    """Read a folder with an `index.json`. Samples are numbered in the order of shards in the index.

    Args:
        path: the folder.
        label: the column that is the label, whatever its name; the field is called `label`.

    Raises SourceError for damaged files, and for columns that need pickle.
    """

    format = "mds"
    path_rules = PathRules(one_path=True)

    def __init__(self, path: str, label: str | None = None) -> None:
        self._source = Source(path)
        self._label = label
        shards = _shards(self._source)
        self._fields = _fields(shards[0], self._source)
        self._shards = []
        for shard in shards:
            if _fields(shard, self._source) != self._fields:
                raise SourceError(f"{self._source.path(_INDEX)}: its shards differ in columns")
            name, opener = _file_of(shard, self._source)
            file = self._source.file_at(name).opened_as(PersistentFile)
            raw_bytes = _whole(shard["raw_data"]["bytes"], _MAX_SHARD, self._source)
            self._shards.append(_Shard(file, raw_bytes, opener))
        check_label(path, [field.name for field in self._fields], label)
        counts = [_whole(shard["samples"], 1 << 32, self._source) for shard in shards]
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        total = int(self._firsts[-1])
        if not total:
            raise SourceError(f"{path} holds no samples")
        index = cached_index(
            "mds" if label is None else f"mds-{xxhash.xxh3_64_hexdigest(label.encode())}",
            _INDEX_VERSION,
            [shard.file for shard in self._shards],
            lambda: self._build(counts),
        )
        self._starts, self._lengths = index["starts"], index["lengths"]
        head = json.loads(index["head"].tobytes())
        dims, self._named = head["dims"], head["named"]
        self.labels = index["labels"]
        """Label of each sample; shape (samples,)."""
        self.unlabelled = head["unlabelled"]
        kinds = {field.name: _kind(field, dims.get(field.name)) for field in self._fields}
        if self._named is not None:
            kinds[self._named] = "int64"
        names = [field_named(name, label) for name in kinds]
        self.schema = Schema(tuple(zip(names, kinds.values(), strict=True)))
        self._columns = [
            (field, name, self.schema.kinds[name])
            for field, name in zip(self._fields, names, strict=True)
        ]
        """Each column of the files with its field, and the kind of that."""
        known = {
            name: np.broadcast_to(index[f"bodies{k}"], total)
            for k, (_, name, kind) in enumerate(self._columns)
            if not kind.fixed
        }
        self.classes: Sequence[str] = head["classes"]
        files = [shard.file for shard in self._shards]
        self.sizes = self.schema.payload_sizes(total, known)
        self._lay_out(_VERSION, files, self.sizes)

    @staticmethod
    def recognises(path: str) -> str | None:
        source = Source(expand(path)[0])
        if not source.is_folder() or not source.exists(_INDEX):
            return f"holds no {_INDEX}"
        try:
            return None if _shards(source) else "its index.json is not MDS's"
        except SourceError:
            return "its index.json is not MDS's"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        for low, high, slots in neighbours(samples, self._firsts):
            shard = self._shards[int(np.searchsorted(self._firsts, low, side="right")) - 1]
            first = int(self._starts[low])
            data = shard.read(first, int(self._starts[high - 1]) + self._length(high - 1) - first)
            with parsing(lambda: f"{shard.file.name}, sample {samples[slot]},"):  # noqa: B023
                for slot in slots:
                    payloads[slot] = self._payload(int(samples[slot]), data, first)
        return payloads

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _length(self, sample: int) -> int:
        """Stored bytes of a sample, including its column sizes."""
        return int(self._lengths[sample if len(self._lengths) > 1 else 0])

    def _payload(self, sample: int, data: memoryview, first: int) -> bytes | memoryview:
        start = int(self._starts[sample]) - first
        parts = _split(data[start : start + self._length(sample)], self._fields)
        return self.schema.join(
            {
                name: int(self.labels[sample])
                if field.name == self._named
                else _value(field, part, kind)
                for (field, name, kind), part in zip(self._columns, parts, strict=True)
            }
        )

    def _build(self, counts: Sequence[int]) -> Arrays:
        """Index offsets, column sizes and labels of all samples; reads all shards once."""
        starts, lengths = GrowingColumn(), GrowingColumn()
        bodies = [GrowingColumn() for _ in self._fields]
        places = {field.name: k for k, field in enumerate(self._fields)}
        labels = {name: LabelColumn() for name in label_names(places, self._label)}
        dims: dict[str, tuple[str, list[int | None]]] = {}
        for shard, count in zip(self._shards, counts, strict=True):
            head = shard.read(0, 4 * (count + 2))
            numbers = np.frombuffer(head, "<u4")
            ends = numbers[1:].astype(np.int64)
            if int(numbers[0]) != count:
                raise SourceError(
                    f"{shard.file.name} says that it holds {counted(numbers[0], 'sample')}, and "
                    f"its index {count}: write both again"
                )
            if (np.diff(ends) < 0).any() or ends[-1] > shard.raw_bytes:
                raise SourceError(f"{shard.file.name}: its offsets are invalid: write it again")
            data, data_at = memoryview(b""), 0
            values: dict[str, list[memoryview]] = {name: [] for name in labels}
            for k in range(count):
                if k % _AT_A_TIME == 0:
                    data_at = int(ends[k])
                    data = shard.read(data_at, int(ends[min(k + _AT_A_TIME, count)]) - data_at)
                view = data[int(ends[k]) - data_at : int(ends[k + 1]) - data_at]
                try:
                    parts = _split(view, self._fields)
                    row = [_body(f, p, dims) for f, p in zip(self._fields, parts, strict=True)]
                except _Unlike as error:
                    raise SourceError(
                        f"{shard.file.name}: sample {k}: {error}: a field of dlio has one type and "
                        "number of dimensions; write the column as bytes"
                    ) from error
                except (ValueError, IndexError) as error:
                    raise SourceError(
                        f"{shard.file.name}: sample {k} cannot be read ({error}): the shard is not "
                        "as its index describes it; write both again"
                    ) from error
                starts.append(int(ends[k]))
                lengths.append(len(view))
                for column, size in zip(bodies, row, strict=True):
                    column.append(size)
                for name, own in values.items():
                    own.append(parts[places[name]])
                    if len(own) == _AT_A_TIME or k == count - 1:
                        _add_labels(labels[name], self._fields[places[name]], own)
                        own.clear()
        label, labelling = first_labels(labels, lambda k: f"{self._source.path()}, sample {k}")
        is_text = label is not None and _kind_of_label(self._fields[places[label]]) == "text"
        about = {
            "dims": {name: [dtype, shape] for name, (dtype, shape) in dims.items()},
            "classes": labelling.classes,
            "named": label if is_text else None,
            "unlabelled": labelling.reason,
        }
        return {
            "starts": starts.spread(),
            "lengths": lengths.values(),
            **{f"bodies{k}": column.values() for k, column in enumerate(bodies)},
            "head": np.frombuffer(json.dumps(about).encode(), np.uint8),
            "labels": np.zeros(len(starts), np.int64)
            if labelling.numbers is None
            else labelling.numbers,
        }


class _Shard:
    """One shard file; decompressed on first use, and cached."""

    _kept: ClassVar[OrderedDict[tuple[str, str], bytes]] = OrderedDict()
    _lock: ClassVar[threading.Lock] = new_lock()

    def __init__(
        self, file: PersistentFile, raw_bytes: int, opener: Callable[[bytes, int], bytes] | None
    ) -> None:
        if opener is None and raw_bytes > file.size:
            raise SourceError(f"{file.name} is shorter than its index says: restore it")
        if opener is not None:
            check_claim(raw_bytes, file.size, file.name)
            if file.size > 2 * raw_bytes + _SLACK:
                raise SourceError(
                    f"{file.name} is longer than its index says: write the index again"
                )
        self.file, self.raw_bytes, self._opener = file, raw_bytes, opener
        self._key = file.url, file.stamp

    def read(self, offset: int, count: int) -> memoryview:
        if offset + count > self.raw_bytes:
            raise SourceError(f"{self.file.name} is shorter than its index says: restore it")
        if self._opener is None:
            memory = memoryview(bytearray(count))
            self.file.read_into(offset, memory)
            return memory
        return memoryview(self._raw())[offset : offset + count]

    def close(self) -> None:
        with _Shard._lock:
            _Shard._kept.pop(self._key, None)
        self.file.close()

    def _raw(self) -> bytes:
        with _Shard._lock:
            if self._key in _Shard._kept:
                _Shard._kept.move_to_end(self._key)
                return _Shard._kept[self._key]
            assert self._opener is not None
            with ReadErrors(self.file.name, "cannot be decompressed"):
                data = self._opener(self.file.read(), self.raw_bytes)
            if len(data) != self.raw_bytes:
                raise SourceError(f"{self.file.name} is not as long as its index says: restore it")
            _Shard._kept[self._key] = data
            while len(_Shard._kept) > 1 and sum(map(len, _Shard._kept.values())) > _KEPT_BYTES:
                _Shard._kept.popitem(last=False)
            return data


def _shards(source: Source) -> list[dict[str, Any]]:
    """Return the entries of index.json. Raises SourceError if it does not describe MDS shards."""
    text = source.read(_INDEX, 0, _MAX_INDEX + 1)
    where = source.path(_INDEX)
    try:
        if len(text) > _MAX_INDEX:
            raise ValueError("too long")
        shards = parse_json(text, where)["shards"]
        if not shards or any(shard["format"] != "mds" for shard in shards):
            raise ValueError("other formats")
        for shard in shards:
            shard["raw_data"]["basename"], shard["raw_data"]["bytes"], shard["samples"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{where} is not an index of MDS shards ({error})") from error
    return list(shards)


def _whole(value: Any, bound: int, source: Source) -> int:
    if type(value) is not int or not 0 <= value < bound:
        raise SourceError(
            f"{source.path(_INDEX)}: {value!r} is not a number in its range: write the index again"
        )
    return value


def _file_of(
    shard: dict[str, Any], source: Source
) -> tuple[str, Callable[[bytes, int], bytes] | None]:
    """Return (file, function to decompress it); prefers the raw file if it exists."""
    raw, packed = shard["raw_data"], shard.get("zip_data")
    for name in [str(part["basename"]) for part in (raw, packed) if part]:
        # Merged indexes name files in folders below: part.0/shard.00000.mds.
        if any(step in ("", ".", "..") for step in name.split("/")):
            raise SourceError(
                f"{source.path(_INDEX)} names the file {printable(name)}, which is not inside its "
                "folder: refused"
            )
    if not packed or source.exists(str(raw["basename"])):
        return str(raw["basename"]), None
    kind = str(shard.get("compression", "")).split(":")[0]
    if (opener := _OPENERS.get(kind)) is not None:
        return str(packed["basename"]), opener
    raise SourceError(
        f"{source.path(_INDEX)}: shards are compressed with {kind!r}: dlio reads "
        f"{', '.join(_OPENERS)}; write them with one of these, or without compression"
    )


def _gunzip(data: bytes, size: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        return stream.read(size + 1)


def _streamed(codec: str) -> Callable[[bytes, int], bytes]:
    def unpack(data: bytes, size: int) -> bytes:
        import pyarrow

        buffer = bytearray(size + 1)  # `read` of pyarrow 26 loses its buffer when it fails.
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), codec) as stream:
            return bytes(memoryview(buffer)[: stream.readinto(buffer)])

    return unpack


def _bunzip(data: bytes, size: int) -> bytes:
    with bz2.BZ2File(io.BytesIO(data)) as stream:
        return stream.read(size + 1)


def _unsnap(data: bytes, size: int) -> bytes:
    import pyarrow

    # Its first bytes tell the size, 7 bits each; pyarrow would fill up missing ones.
    declared = sum((byte & 0x7F) << 7 * k for k, byte in enumerate(data[:_VARINT]))
    for k, byte in enumerate(data[:_VARINT]):
        if byte < 0x80:
            declared &= (1 << 7 * (k + 1)) - 1
            break
    if declared != size:
        return b""
    return bytes(pyarrow.Codec("snappy").decompress(data, size, asbytes=True))


_OPENERS: Final = {
    "gz": _gunzip,
    "zstd": _streamed("zstd"),
    "br": _streamed("brotli"),
    "snappy": _unsnap,
    "bz2": _bunzip,
}
"""Functions that decompress a shard to a number of bytes, by Streaming's names."""


class _Unlike(Exception):
    """A value of a column has another type or number of dimensions than those before it."""


def _fields(shard: dict[str, Any], source: Source) -> list[_MdsColumn]:
    where = source.path(_INDEX)
    try:
        parts = ("column_names", "column_encodings", "column_sizes")
        rows = list(zip(*(shard[part] for part in parts), strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{where}: its columns are invalid: restore it") from error
    fields = []
    for name, encoding, size in rows[: _MAX_COLUMNS + 1]:
        base, *details = str(encoding).split(":")
        if base in ("pkl", "pil", "list[pil]"):
            raise SourceError(
                f"{where}: column {name!r} is {encoding}, which needs pickle or Pillow to be read: "
                "write it again as jpeg, png, json or ndarray"
            )
        if base not in _PLAIN and base not in (*_NUMBERS, "int", "ndarray"):
            raise SourceError(f"{where}: column {name!r} is {encoding}, which dlio does not know")
        dtype = details[0] if details else ""
        if base == "ndarray" and dtype and dtype not in _NUMBERS:
            raise SourceError(f"{where}: column {name!r} is {encoding}, which is invalid")
        try:
            shape = tuple(int(n) for n in details[1].split(",")) if len(details) > 1 else None
        except ValueError as error:
            raise SourceError(f"{where}: column {name!r} is {encoding}") from error
        width = None if size is None else _whole(size, 1 << 31, source)
        if base in _NUMBERS or base == "int":
            expected = np.dtype("int64" if base == "int" else base).itemsize
        elif base == "ndarray" and shape is not None and dtype:
            expected = math.prod(shape) * np.dtype(dtype).itemsize
        else:
            expected = width if width is not None else -1
        if width is not None and width != expected:
            raise SourceError(f"{where}: column {name!r} of {width} bytes is not {encoding}")
        fields.append(_MdsColumn(str(name), str(encoding), width or None, dtype, shape))
    if not 0 < len(fields) <= _MAX_COLUMNS:
        raise SourceError(f"{where}: {counted(len(rows), 'column')}; expected 1 to {_MAX_COLUMNS}")
    return fields


def _split(view: memoryview, fields: Sequence[_MdsColumn]) -> list[memoryview]:
    """Split a sample into its columns. Raises ValueError if their sizes do not add up."""
    variable = sum(field.size is None for field in fields)
    if len(view) < 4 * variable:
        raise ValueError("too short")
    sizes = iter(np.frombuffer(view[: 4 * variable], "<u4").tolist())
    at = 4 * variable
    parts = []
    for field in fields:
        size = next(sizes) if field.size is None else field.size
        parts.append(view[at : at + size])
        at += size
    if at != len(view):
        raise ValueError("its columns do not add up to its bytes")
    return parts


def _array_head(field: _MdsColumn, part: memoryview) -> tuple[str, tuple[int, ...], int]:
    """Return (dtype, shape, offset of the data) of an array. Raises ValueError or IndexError."""
    at = 0
    dtype = field.dtype
    if not dtype:
        if part[0] not in _CODES:
            raise ValueError(f"array of type {part[0]}")
        dtype, at = _CODES[part[0]], 1
    shape = field.shape
    if shape is None:
        ndim, width = part[at] >> 2, 1 << (part[at] & 3)
        at += 1
        if ndim > 32 or at + ndim * width > len(part):
            raise ValueError("array with too many dimensions")
        sizes = np.frombuffer(part[at : at + ndim * width], f"<u{width}")
        shape = tuple(int(size) for size in sizes)
        at += ndim * width
    if math.prod(shape) * np.dtype(dtype).itemsize != len(part) - at:
        raise ValueError("array whose size does not match its shape")
    return dtype, shape, at


def _body(
    field: _MdsColumn, part: memoryview, dims: dict[str, tuple[str, list[int | None]]]
) -> int:
    """Return the bytes of a column's value, and record shapes of arrays in `dims`."""
    if not field.array:
        return len(part)
    dtype, shape, at = _array_head(field, part)
    kind, known = dims.setdefault(field.name, (dtype, list(shape)))
    if kind != dtype or len(known) != len(shape):
        raise _Unlike(f"{field.name} is {dtype}{list(shape)}, in others {kind}{known}")
    known[:] = [a if a == b else None for a, b in zip(known, shape, strict=True)]
    return len(part) - at


def _kind(field: _MdsColumn, dims: Any) -> str:
    base = field.encoding.split(":")[0]
    if base in _PLAIN:
        return _PLAIN[base]
    if base == "ndarray":
        return array_kind(*(dims or (field.dtype, field.shape)))
    return "int64" if base == "int" else base


def _kind_of_label(field: _MdsColumn) -> str:
    """Return the kind of a column as a label: bytes may be texts."""
    base = field.encoding.split(":")[0]
    if base == "ndarray":
        return base
    kind = _kind(field, None)
    return "text" if base == "bytes" else kind


def _add_labels(labels: LabelColumn, field: _MdsColumn, values: Sequence[memoryview]) -> None:
    """Add the label of each sample of a shard, as it is stored."""
    kind = _kind_of_label(field)
    if kind == "text" and max(map(len, values)) <= _LONGEST_LABEL:
        labels.add_texts(values)
    elif kind in _NUMBERS:
        labels.add_numbers(np.frombuffer(b"".join(values), np.dtype(kind).newbyteorder("<")))
    elif kind == "ndarray":
        heads = [_array_head(field, value) for value in values]
        if any(math.prod(shape) != 1 for _, shape, _ in heads):
            labels.refuse(not_scalar(f"{heads[0][0]}[{','.join(map(str, heads[0][1]))}]"))
            return
        parts = [
            np.frombuffer(value[at:], np.dtype(dtype).newbyteorder("<"))
            for value, (dtype, _, at) in zip(values, heads, strict=True)
        ]
        labels.add_numbers(np.concatenate(parts))
    else:
        labels.refuse(not_scalar(field.encoding))


def _value(field: _MdsColumn, part: memoryview, kind: Kind) -> Any:
    if field.array:
        dtype, shape, at = _array_head(field, part)
        return np.frombuffer(part[at:], np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return part if kind.dtype is None else np.frombuffer(part, kind.dtype)[0].item()
