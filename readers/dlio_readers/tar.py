"""The reader of WebDataset tars: random access through an index, without extracting members.

A sample is a run of members whose base names agree up to the first dot; the rest of the base name,
in lower case, is the field. Members whose base names begin with `__` are ignored, except
`__dlio__.json`, which `dlio pack` writes and which gives exact kinds and classes.

Tars may be compressed as LZ4 frames (`.tar.lz4`). With independent blocks (`lz4 -BI`, the default
of the tool), only the blocks of a sample are decompressed. Frames with linked blocks do not support
random access and are refused.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final

import lz4.block
import numpy as np
import numpy.typing as npt

from dlio.data.index import Arrays, Names, cached_index
from dlio.data.labels import TAR_LABEL_NAMES
from dlio.data.npy import NpyHead, read_npy_head
from dlio.data.open_files import PersistentFile
from dlio.data.reader_contract import Abilities, PathRules
from dlio.data.schema import LABEL, Schema, array_kind
from dlio.data.source import File, files_below, own_name
from dlio.errors import CorruptBlock, SourceError
from dlio.util.limits import parsing
from dlio.util.memory import new_memory
from dlio_readers.path_reader import PathReader, lie_at

# Random access into LZ4 frames of independent blocks

_FRAME_MAGIC: Final = 0x184D2204
_FRAME_BLOCKS: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
_KEPT_BLOCKS: Final = 16


class Lz4Frame:
    """An LZ4 frame of independent blocks; caches the last decompressed ones. Thread-safe.

    `index` are the arrays of `frame_index`.
    """

    def __init__(self, file: File, index: Arrays) -> None:
        self._file = file
        self._at, self._stored = index["frame_at"], index["frame_stored"]
        self._raw_bytes = int(index["frame_raw"][0])
        self.size = int(index["frame_raw"][1])
        self.block = lru_cache(_KEPT_BLOCKS)(self._block)
        """Returns a decompressed block by its number."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with decompressed bytes from `offset` on. Raises SourceError."""
        done = 0
        while done < len(into):
            number, start = divmod(offset + done, self._raw_bytes)
            if number >= len(self._at):
                raise SourceError(f"{self._file.name} ends early: it was cut off; restore it")
            part = self.block(number)[start : start + len(into) - done]
            if not part:
                raise SourceError(f"{self._file.name} ends early: it was cut off; restore it")
            into[done : done + len(part)] = part
            done += len(part)

    def _block(self, number: int) -> bytes:
        stored = int(self._stored[number])
        data = self._file.read(int(self._at[number]), abs(stored))
        if stored > 0:
            try:
                data = lz4.block.decompress(data, uncompressed_size=self._raw_bytes)
            except lz4.block.LZ4BlockError as error:
                raise SourceError(f"{self._file.name}: LZ4 data is damaged; restore it") from error
        return data


def frame_index(file: File) -> Arrays:
    """Index the blocks of an LZ4 frame, for `Lz4Frame`.

    Returns `frame_at`, the offset of each block, `frame_stored`, its stored bytes (negative if it
    is not compressed), and `frame_raw`, (decompressed bytes per block, total).

    Raises SourceError for damaged frames, and for frames with linked blocks.
    """
    head = file.read(0, 19)
    wrong = SourceError(f"{file.name} is not an LZ4 frame, or is damaged: restore it")
    if len(head) < 7 or struct.unpack_from("<I", head)[0] != _FRAME_MAGIC:
        raise wrong
    flags, descriptor = head[4], head[5]
    raw_bytes = _FRAME_BLOCKS.get(descriptor >> 4 & 7)
    if flags >> 6 != 1 or raw_bytes is None:
        raise wrong
    if not flags & 0x20:
        raise SourceError(
            f"{file.name}: its LZ4 blocks are linked, which prevents random access: compress it "
            "with `lz4 -BI`"
        )
    at = 7 + (8 if flags & 8 else 0) + (4 if flags & 1 else 0)
    places, sizes = [], []
    while True:
        word = file.read(at, 4)
        if len(word) < 4:
            raise wrong
        size = struct.unpack("<I", word)[0]
        if size == 0:
            break
        plain, size = bool(size >> 31), size & 0x7FFFFFFF
        if size > raw_bytes + 16 or at + 4 + size > file.size:
            raise wrong
        places.append(at + 4)
        sizes.append(-size if plain else size)
        at += 4 + size + (4 if flags & 0x10 else 0)
    if not places:
        raise wrong
    index = {
        "frame_at": np.array(places, np.int64),
        "frame_stored": np.array(sizes, np.int64),
        "frame_raw": np.array([raw_bytes, raw_bytes * len(places)], np.int64),
    }
    last = Lz4Frame(file, index).block(len(places) - 1)
    index["frame_raw"][1] = raw_bytes * (len(places) - 1) + len(last)
    return index


# The headers of a tar: names, offsets and sizes of its files, without extracting

_SCAN_BYTES: Final = 1 << 20
_BLOCK: Final = 512
_MAX_NAME: Final = 1 << 16
_MAX_MEMBERS: Final = 1 << 28
_OCTAL: Final = re.compile(rb"[0-7]+")
_SIZE: Final = re.compile(r"[0-9]{1,18}")


class TarMembers:
    """Iterate over the files of a tar; reads it in large chunks and caches one of them.

    `read` returns a number of bytes from an offset.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes], name: str) -> None:
        self._size = size
        self._read = read
        self._name = name
        self._stretch = b""
        self._start = 0

    def bytes_at(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`. Raises SourceError if the tar is too short."""
        if at + count > self._size:
            raise self.damaged(at, "it ends within a member: it was cut off")
        if not self._start <= at or at + count > self._start + len(self._stretch):
            self._start = at
            self._stretch = self._read(at, max(count, min(_SCAN_BYTES, self._size - at)))
        data = self._stretch[at - self._start : at - self._start + count]
        if len(data) != count:
            raise self.damaged(at, "it ends within a member: it was cut off")
        return data

    def damaged(self, at: int, why: str) -> SourceError:
        """Make the error for damage at an offset."""
        return SourceError(f"{self._name} at byte {at}: {why}; restore it")

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, offset, size) of each regular file. Raises SourceError if damaged."""
        at, longer, pax_size = 0, "", -1
        members = 0
        while at + _BLOCK <= self._size:
            head = self.bytes_at(at, _BLOCK)
            if not any(head):
                return
            if _octal(head[148:156], self, at) != sum(head[:148]) + 8 * 32 + sum(head[156:]):
                raise self.damaged(at, "is not a tar header: the file is damaged, or not a tar")
            size = _octal(head[124:136], self, at)
            kind = head[156:157]
            if pax_size >= 0 and kind not in b"xgLK":
                size = pax_size
            body = at + _BLOCK
            if body + size > self._size:
                raise self.damaged(at, "a member is longer than the file: it was cut off")
            if kind in (b"L", b"x"):
                if size > _MAX_NAME:
                    raise self.damaged(at, f"a header of {size} bytes")
                data = self.bytes_at(body, size)
                if kind == b"L":
                    longer = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
                else:
                    pax = _pax(data, self, at)
                    longer = pax.get("path", longer)
                    if "GNU.sparse.major" in pax or "GNU.sparse.size" in pax:
                        raise self.damaged(at, "a sparse member, which dlio does not read")
                    pax_size = -1
                    if "size" in pax:
                        if _SIZE.fullmatch(pax["size"]) is None:
                            raise self.damaged(at, "an invalid size")
                        pax_size = int(pax["size"])
            else:
                if kind in (b"0", b"\0", b"7"):
                    yield longer or _name(head), body, size
                members += 1
                if members > _MAX_MEMBERS:
                    raise self.damaged(at, "too many members")
                longer, pax_size = "", -1
            at = body + -(-size // _BLOCK) * _BLOCK
        if at > self._size:
            raise self.damaged(self._size, "it ends within a member: it was cut off")


def _octal(field: bytes, members: TarMembers, at: int) -> int:
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if value >= 2**62:
            raise members.damaged(at, "an invalid size")
        return value
    text = field.rstrip(b"\0 ").lstrip(b" ") or b"0"
    if _OCTAL.fullmatch(text) is None:  # int() takes signs, too.
        raise members.damaged(at, "is not a tar header: the file is damaged")
    return int(text, 8)


def _name(head: bytes) -> str:
    name = head[:100].split(b"\0", 1)[0]
    if head[257:262] == b"ustar" and head[345]:
        name = head[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _pax(data: bytes, members: TarMembers, at: int) -> dict[str, str]:
    records = {}
    place = 0
    while place < len(data):
        length, space, _ = data[place : place + 20].partition(b" ")
        if not space or not length.isdigit() or not 0 < int(length) <= len(data) - place:
            raise members.damaged(at, "an invalid extended header")
        record = data[place + len(length) + 1 : place + int(length) - 1]
        key, _, value = record.partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        place += int(length)
    return records


# Samples

SUFFIXES: Final = (".tar", ".tar.lz4")
_VERSION: Final = 1
_SCAN_THREADS: Final = 8
_INTEGER: Final = re.compile(r"-?[0-9]+")
_MAX_NUMBER: Final = 64
"""Most bytes of a member that holds an integer as text."""
_MAX_META: Final = 1 << 20
_GAP: Final = 1 << 16
"""Largest gap between two members that are still read together, in bytes."""
_META: Final = "__dlio__.json"
_KINDS: Final = {
    "jpg": "jpeg",
    "jpeg": "jpeg",
    "png": "png",
    "webp": "webp",
    "bmp": "image",
    "gif": "bytes",
    "tif": "image",
    "tiff": "image",
    "ppm": "image",
    "pgm": "image",
    "json": "json",
    "txt": "text",
    "text": "text",
    "caption": "text",
    "transcript": "text",
}
_NUMBERS: Final = ("cls", "cls2", "index", "inx", "id", "label")


class TarReader(PathReader):
    """Read one or several WebDataset tars. Samples are numbered in the order of the files.

    Args:
        path: a tar, a folder of tars, a pattern with braces or globs, or a list.
        fields: fields to read; by default all fields of the first sample.

    Raises SourceError if a tar is damaged, or if a sample lacks a field.
    """

    format = "tar"
    path_rules = PathRules(owns=lambda name: name.endswith(SUFFIXES))
    abilities = Abilities(random_access=True)

    def __init__(self, path: str | Sequence[str], fields: Sequence[str] | None = None) -> None:
        self._files = [PersistentFile(url) for url in files_below(path, SUFFIXES)]
        if not self._files:
            raise SourceError(f"{self.path} holds no tar")
        chosen = tuple(fields or ())
        kind = "-".join(("tar", *chosen)).replace("/", "_")[:103]

        def index(file: File) -> Arrays:
            return cached_index(kind, _VERSION, [file], lambda: _build(file, chosen))

        with ThreadPoolExecutor(_SCAN_THREADS) as pool:
            parts = list(pool.map(index, self._files))
        first = json.loads(parts[0]["head"].tobytes())
        names = [name for name, _ in first["fields"]]
        kinds = [_joined(name, parts) for name in range(len(names))]
        for file, part in zip(self._files, parts, strict=True):
            own = [name for name, _ in json.loads(part["head"].tobytes())["fields"]]
            if own != names:
                raise SourceError(
                    f"{file.name}: its samples have {', '.join(own)}, those of "
                    f"{self._files[0].name} {', '.join(names)}: choose common fields with fields="
                )
        self.schema = Schema(tuple(zip(names, kinds, strict=True)), first["structure"])
        self.classes: Sequence[str] = first["classes"]
        counts = np.array([len(part["at"]) for part in parts], np.int64)
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._parts = parts
        self._names = [Names(part["names"], part["name_ends"]) for part in parts]
        bodies = {
            name: np.concatenate([part["body"][:, k] for part in parts])
            for k, name in enumerate(names)
        }
        total = int(self._firsts[-1])
        label = next((name for name in TAR_LABEL_NAMES if kinds and name in names), None)
        if label is not None and self.schema.kinds[label].text == "int64":
            k = names.index(label)
            self.labels = np.concatenate([part["number"][:, k] for part in parts])
        else:
            self.labels = np.zeros(total, np.int64)
        self.sizes = self.schema.payload_sizes(total, bodies)
        self._lay_out(_VERSION, self._files, self.sizes)
        self._frames = [
            Lz4Frame(file, part) if "frame_at" in part else None
            for file, part in zip(self._files, parts, strict=True)
        ]

    @staticmethod
    def recognises(path: str) -> str | None:
        is_tar = lie_at(path, SUFFIXES, has_fields=False)
        return None if is_tar else "is neither a .tar nor a folder of them"

    def name(self, sample: int) -> str:
        file = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return self._names[file][sample - int(self._firsts[file])]

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        samples = np.asarray(samples, np.int64)
        payloads: list[bytes | memoryview] = [b""] * len(samples)
        files = np.searchsorted(self._firsts, samples, side="right") - 1
        for number in np.unique(files).tolist():
            slots = np.flatnonzero(files == number)
            rows = samples[slots] - self._firsts[number]
            order = np.argsort(self._parts[number]["at"][rows, 0], kind="stable")
            self._read_file(number, rows[order], slots[order], payloads)
        return payloads

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _read_file(
        self,
        number: int,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.intp],
        payloads: list[bytes | memoryview],
    ) -> None:
        """Read samples of one file, sorted by offset; near ones together."""
        part = self._parts[number]
        begins = part["at"][rows].min(axis=1)
        ends = (part["at"][rows] + part["size"][rows]).max(axis=1)
        start = 0
        for k in range(1, len(rows) + 1):
            if k < len(rows) and begins[k] <= ends[start:k].max() + _GAP:
                continue
            low, high = int(begins[start:k].min()), int(ends[start:k].max())
            memory = new_memory(high - low)
            frame = self._frames[number]
            if frame is None:
                self._files[number].read_into(low, memory)
            else:
                frame.read_into(low, memory)
            for slot, row in zip(slots[start:k].tolist(), rows[start:k].tolist(), strict=True):
                payloads[slot] = self._payload(number, row, memory, low)
            start = k

    def _payload(self, number: int, row: int, memory: memoryview, low: int) -> bytes | memoryview:
        part = self._parts[number]
        values: dict[str, Any] = {}
        for k, (name, _) in enumerate(self.schema.fields):
            kind = self.schema.kinds[name]
            at = int(part["at"][row, k]) - low
            body = memory[at : at + int(part["size"][row, k])]
            if kind.text == "int64" and not part["npy"][k]:
                values[name] = int(part["number"][row, k])
            elif kind.dtype is not None:
                try:
                    values[name] = read_npy_head(body).array(body)
                except (CorruptBlock, ValueError) as error:
                    raise SourceError(
                        f"{self._files[number].name}, sample {self._names[number][row]!r}, "
                        f"{name}: {error}"
                    ) from error
            else:
                values[name] = body
        if len(values) == 2 and self.schema.fields[1][1] == "int64" and self.schema._sizes_at == 8:
            image, label = (name for name, _ in self.schema.fields)
            return b"".join((LABEL.pack(values[label]), values[image]))
        with parsing(lambda: f"{self._files[number].name}, sample {self._names[number][row]!r},"):
            return self.schema.join(values)


def _joined(k: int, parts: Sequence[Arrays]) -> str:
    """Kind of field number k over all files; dimensions that differ become `?`."""
    kinds = {json.loads(part["head"].tobytes())["fields"][k][1] for part in parts}
    if len(kinds) == 1:
        return str(kinds.pop())
    names = {kind.partition("[")[0] for kind in kinds}
    shapes = [kind.partition("[")[2].rstrip("]").split(",") for kind in kinds]
    if len(names) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise SourceError(
            f"the tars disagree on a field: it is {' and '.join(sorted(kinds))}; choose others "
            "with fields="
        )
    sizes = [s[0] if len(set(s)) == 1 else "?" for s in zip(*shapes, strict=True)]
    return f"{names.pop()}[{','.join(sizes)}]"


def _build(file: File, fields: tuple[str, ...]) -> Arrays:
    """Index one tar: offset and size of each field of each sample."""
    extra: Arrays = {}
    size, read = file.size, file.read
    if own_name(file.name).endswith(".lz4"):
        extra = frame_index(file)
        frame = Lz4Frame(file, extra)
        size = frame.size

        def read(offset: int = 0, count: int | None = None) -> bytes:
            memory = bytearray(count or 0)
            frame.read_into(offset, memoryview(memory))
            return bytes(memory)

    members = TarMembers(size, read, file.name)
    builder = _Builder(file.name, fields)
    for name, at, length in members:
        builder.add(name, at, length, members)
    return {**builder.arrays(), **extra}


class _Builder:
    """Group members into samples."""

    def __init__(self, file: str, fields: tuple[str, ...]) -> None:
        self._file = file
        self._fields = list(fields)
        self._packed: dict[str, Any] = {}
        self._key = ""
        self._sample: dict[str, tuple[int, int, int, NpyHead | None]] = {}
        self._keys: list[str] = []
        self._rows: list[list[tuple[int, int, int, int]]] = []
        self._shapes: dict[str, tuple[str, list[int | None]]] = {}
        self._texts: dict[str, bool] = {}

    def add(self, name: str, at: int, size: int, members: TarMembers) -> None:
        folder, slash, last = name.rpartition("/")
        if last == _META and size <= _MAX_META:
            self._packed = _meta(members.bytes_at(at, size), members, at)
            self._fields = self._fields or [field for field, _ in self._packed["fields"]]
            return
        if last.startswith("__") or "." not in last:
            return
        stem, _, extension = last.partition(".")
        key = folder + slash + stem
        field = extension.lower()
        field = self._packed.get("members", {}).get(extension, field)
        if key != self._key or field in self._sample:
            self._finish()
            self._key = key
        number, head = 0, None
        if self._is_number(field, size):
            text = members.bytes_at(at, size).decode("ascii", "replace").strip()
            if _INTEGER.fullmatch(text) is None or abs(int(text)) >= 2**63:
                raise members.damaged(at, f"{name} is {text[:20]!r}, not an integer")
            number = int(text)
        elif extension.lower().endswith("npy"):
            try:
                head = read_npy_head(memoryview(members.bytes_at(at, min(size, 1 << 12))), size)
            except CorruptBlock as error:
                raise members.damaged(at, f"{name}: {error}") from error
        self._sample[field] = (at, size, number, head)

    def _is_number(self, field: str, size: int) -> bool:
        if self._packed:
            kind = dict(self._packed["fields"]).get(field)
            return kind == "int64" and 0 < size <= _MAX_NUMBER and field not in self._packed["npy"]
        return field in _NUMBERS and 0 < size <= _MAX_NUMBER

    def _finish(self) -> None:
        if not self._sample:
            return
        if not self._fields:
            self._fields = sorted(self._sample)
        row = []
        for field in self._fields:
            if field not in self._sample:
                raise SourceError(
                    f"{self._file}: sample {self._key!r} has no {field}, which others have: "
                    "choose common fields with fields="
                )
            at, size, number, head = self._sample[field]
            body = size
            if head is not None:
                body = head.nbytes
                kind, shape = self._shapes.setdefault(field, (head.dtype, list(head.shape)))
                if kind != head.dtype or len(shape) != len(head.shape):
                    raise SourceError(
                        f"{self._file}: sample {self._key!r}, {field}: is {head.dtype}"
                        f"{list(head.shape)}, in others {kind}{shape}"
                    )
                shape[:] = [a if a == b else None for a, b in zip(shape, head.shape, strict=True)]
            row.append((at, size, number, body))
        self._rows.append(row)
        self._keys.append(self._key)
        self._sample = {}

    def arrays(self) -> Arrays:
        self._finish()
        if not self._rows:
            raise SourceError(f"{self._file} holds no samples: members are named key.extension")
        packed = dict(self._packed.get("fields", []))
        kinds = []
        for field in self._fields:
            if field in packed:
                kinds.append((field, packed[field]))
            elif field in self._shapes:
                dtype, shape = self._shapes[field]
                kinds.append((field, array_kind(dtype, shape)))
            elif field in _NUMBERS:
                kinds.append((field, "int64"))
            else:
                kinds.append((field, _KINDS.get(field.rpartition(".")[2], "bytes")))
        head = {
            "fields": kinds,
            "classes": self._packed.get("classes", []),
            "structure": self._packed.get("structure") if len(kinds) == len(packed) else None,
        }
        table = np.array(self._rows, np.int64)
        names = Names.of(self._keys)
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "at": table[:, :, 0],
            "size": table[:, :, 1],
            "number": table[:, :, 2],
            "body": table[:, :, 3],
            "npy": np.array([field in self._shapes for field in self._fields]),
            "names": names.blob,
            "name_ends": names.ends,
        }


def _meta(data: bytes, members: TarMembers, at: int) -> dict[str, Any]:
    """Parse the metadata that `dlio pack` writes: schema, classes, members of each field."""
    try:
        packed = json.loads(data)
        schema = Schema.from_rows(packed["schema"])
        return {
            "fields": [list(row) for row in schema.fields],
            "structure": schema.structure,
            "classes": [str(name) for name in packed["classes"]],
            "members": {str(key): str(value) for key, value in packed["members"].items()},
            "npy": [str(name) for name in packed["npy"]],
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptBlock):
        raise members.damaged(at, f"{_META} is invalid") from None
