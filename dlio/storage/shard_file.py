"""Shards: files of blocks, one after another, with a footer that indexes them.

FORMAT.md in this folder specifies the footer. It holds the index that a reader needs before it
reads a block: offsets of the blocks; size, label and name of each sample; classes and schema.
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock
from dlio.storage.block import DescriptorlessFile, file_size, read_exactly, write_all
from dlio.util.closable import Closable
from dlio.util.memory import new_memory
from dlio.util.units import counted
from dlio.util.whole_files import PUBLIC_FILE, open_own

SUFFIX: Final = ".dlio"
TRAILER_MAGIC: Final = b"DLIOSHRD"
VERSION: Final = 1
_TRAILER: Final = struct.Struct("<QQQ8s")
_META_LENGTH: Final = struct.Struct("<Q")
_MAX_FOOTER: Final = 2 << 30
_CHUNK: Final = 1 << 20


class RowArray(Protocol):
    """One value per row, in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The index of one shard of a data set: its footer.

    When it is read, blocks are in memory, and samples may stay in the file: they are read from it
    when they are asked for, never mapped, because touching mapped pages of a file that was
    truncated kills a process.
    """

    fingerprint: str
    """Fingerprint of the whole data set, the same in all its shards; 32 hex digits."""
    schema: Schema
    classes: tuple[str, ...]
    shard: int
    shards: int
    first: int
    """Sample index of the shard's first sample."""
    total: int
    """Samples in all shards."""
    offsets: npt.NDArray[np.integer[Any]]
    """File offset of each block, and of the footer; shape (blocks + 1,)."""
    counts: npt.NDArray[np.integer[Any]]
    """Samples in each block; shape (blocks,)."""
    sizes: RowArray
    """Payload bytes of each sample; uint32."""
    labels: RowArray
    """Class of each sample; int64."""
    names: RowArray
    """Sample names, UTF-8, one after another; uint8."""
    name_ends: RowArray
    """End of each name in `names`; uint64."""
    boxes: tuple[int, ...] | None = None
    """Boxes of each class in the shard, by its number; None without boxes."""

    @property
    def payload_bytes(self) -> int:
        """Sum of `sizes`."""
        firsts = range(0, len(self.sizes), _CHUNK)
        return sum(int(self.sizes[k : k + _CHUNK].sum(dtype=np.int64)) for k in firsts)

    def names_of(self, first: int, stop: int) -> list[bytes]:
        """Return the names of neighbouring samples, in UTF-8. They are those from position `first`
        of the shard up to `stop`.

        Raises SourceError or CorruptBlock if the file has changed.
        """
        ends = self.name_ends[first:stop].tolist()
        start = int(self.name_ends[first - 1 : first][0]) if first else 0
        blob = self.names[start : ends[-1]].tobytes()
        starts = [start, *ends[:-1]]
        return [blob[a - start : b - start] for a, b in zip(starts, ends, strict=True)]

    def encode(self) -> bytes:
        """Return the bytes of the footer."""
        meta = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "schema": json.loads(self.schema.to_json()),
            "classes": list(self.classes),
            "shard": self.shard,
            "shards": self.shards,
            "first": self.first,
            "total": self.total,
            "blocks": len(self.counts),
            "samples": len(self.sizes),
        }
        if self.boxes is not None:
            meta["boxes"] = list(self.boxes)
        text = json.dumps(meta, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        # Widest first, so that every array is aligned.
        arrays = [
            self.offsets.astype("<u8"),
            self.labels[:].astype("<i8"),
            self.name_ends[:].astype("<u8"),
            self.counts.astype("<u4"),
            self.sizes[:].astype("<u4"),
        ]
        body = b"".join(array.tobytes() for array in arrays)
        return _META_LENGTH.pack(len(text)) + text + body + bytes(self.names[:])


class ShardWriter(Closable):
    """Writes one shard file: blocks, then the footer. Works as a context manager.

    The file is complete only after `finish`. Until then it has no trailer, and every reader
    rejects it.

    Raises OSError, also when the file exists.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PUBLIC_FILE)
        self.offsets = [0]
        """File offsets of the blocks so far, and of the next block or the footer."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def write_blocks(self, blocks: Sequence[Sequence[Buffer]]) -> None:
        """Append blocks, as `encode_block` makes them, by few calls of the system."""
        write_all(self._descriptor, [piece for pieces in blocks for piece in pieces])
        for pieces in blocks:
            self.offsets.append(self.offsets[-1] + sum(len(piece) for piece in pieces))

    def finish(self, footer: ShardIndex) -> None:
        """Write footer and trailer, and sync the file to disk."""
        text = footer.encode()
        trailer = _TRAILER.pack(
            self.offsets[-1], len(text), xxhash.xxh3_64_intdigest(text), TRAILER_MAGIC
        )
        # The trailer is the last thing written: without it a reader rejects the file.
        write_all(self._descriptor, [text, trailer])
        os.fsync(self._descriptor)


class _FooterBytes:
    """The bytes of a footer, in memory or left in the file. `file` is open, or opens itself for
    each read."""

    def __init__(self, file: int | DescriptorlessFile, path: str, start: int, length: int) -> None:
        self._file, self._path, self._start = file, path, start
        self.length = length
        self._memory: memoryview | None = None

    def load(self) -> None:
        """Read it all, once."""
        self._memory = self.read(0, self.length)

    def read(self, at: int, count: int) -> memoryview:
        """Return `count` bytes from byte `at` on. Raises SourceError or CorruptBlock."""
        if self._memory is not None:
            return self._memory[at : at + count]
        into = new_memory(count)
        read_exactly(self._file, into, self._start + at, self._path)
        return into

    def digest(self) -> int:
        """Return the xxh3_64 of it all."""
        digest = xxhash.xxh3_64()
        # In parts: the footer of ten million samples is not held in memory, 164 MiB in place of
        # 330.
        for done in range(0, self.length, _CHUNK):
            digest.update(self.read(done, min(_CHUNK, self.length - done)))
        return digest.intdigest()


class _FooterRows:
    """An array in a footer, of which parts are read."""

    def __init__(self, text: _FooterBytes, dtype: str, count: int, at: int) -> None:
        self._text, self._dtype, self._count, self._at = text, np.dtype(dtype), count, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]:
        start, stop, _ = part.indices(self._count)
        size = self._dtype.itemsize
        data = self._text.read(self._at + start * size, max(0, stop - start) * size)
        return np.ndarray((len(data) // size,), self._dtype, data)


def read_footer(
    file: int | DescriptorlessFile, path: str, *, left_in_file: bool = False
) -> ShardIndex:
    """Read and check the footer of a shard file.

    `file` is open, or opens itself for each read. With `left_in_file`, which takes no descriptor,
    only the index of the blocks is kept in memory, such that a data set of any size takes little.

    Raises CorruptBlock, or SourceError if the file cannot be read.
    """
    size = file_size(file)
    if size < _TRAILER.size:
        raise CorruptBlock(
            f"{path}: has {size} bytes, too few for a shard: it is truncated or empty; restore "
            "the file"
        )
    trailer = bytearray(_TRAILER.size)
    read_exactly(file, memoryview(trailer), size - _TRAILER.size, path)
    start, length, digest, magic = _TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC:
        raise CorruptBlock(
            f"{path}: does not end as a shard does: it is truncated, or not a shard of dlio"
        )
    if length > _MAX_FOOTER:
        raise CorruptBlock(f"{path}: a footer of {length} bytes is too large: restore the file")
    if length > size or start + length + _TRAILER.size != size:
        raise CorruptBlock(f"{path}: its trailer points outside of the file: restore the file")
    text = _FooterBytes(file, path, start, length)
    if not left_in_file:
        text.load()
    if text.digest() != digest:
        raise CorruptBlock(f"{path}: its footer does not match its checksum: restore the file")
    try:
        return _decode(text, start)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CorruptBlock(f"{path}: its footer is invalid: {error}; restore the file") from error


def _decode(text: _FooterBytes, footer_start: int) -> ShardIndex:
    (meta_length,) = _META_LENGTH.unpack(text.read(0, min(_META_LENGTH.size, text.length)))
    if meta_length > text.length - _META_LENGTH.size:
        raise ValueError("its JSON is longer than the footer")
    at = _META_LENGTH.size + meta_length
    meta = json.loads(bytes(text.read(_META_LENGTH.size, meta_length)))
    if meta["version"] != VERSION:
        raise ValueError(
            f"format {meta['version']} is unknown to this version of dlio: upgrade dlio"
        )
    blocks, samples = _count(meta["blocks"]), _count(meta["samples"])
    fixed = 8 * (blocks + 1) + 16 * samples + 4 * blocks + 4 * samples
    if at + fixed > text.length:
        raise ValueError(
            f"it is too short for {counted(blocks, 'block')} and {counted(samples, 'sample')}"
        )
    rows = {}
    for name, kind, count in (
        ("offsets", "<u8", blocks + 1),
        ("labels", "<i8", samples),
        ("name_ends", "<u8", samples),
        ("counts", "<u4", blocks),
        ("sizes", "<u4", samples),
        ("names", "u1", text.length - at - fixed),
    ):
        rows[name] = _FooterRows(text, kind, count, at)
        at += count * np.dtype(kind).itemsize
    offsets, counts = rows["offsets"][:], rows["counts"][:]
    if int(counts.sum(dtype=np.uint64)) != samples:
        raise ValueError("its blocks do not add up to its samples")
    if (offsets[1:] < offsets[:-1]).any() or int(offsets[-1]) != footer_start:
        raise ValueError("its blocks overlap")
    if not _rises_to(rows["name_ends"], len(rows["names"])):
        raise ValueError("its names do not add up")
    return ShardIndex(
        fingerprint=_fingerprint(meta["fingerprint"]),
        schema=Schema.from_rows(meta["schema"]),
        classes=tuple(str(name) for name in meta["classes"]),
        shard=_count(meta["shard"]),
        shards=_count(meta["shards"]),
        first=_count(meta["first"]),
        total=_count(meta["total"]),
        offsets=offsets.astype(np.int64),
        counts=counts.astype(np.int64),
        sizes=rows["sizes"],
        labels=rows["labels"],
        names=rows["names"],
        name_ends=rows["name_ends"],
        boxes=tuple(map(_count, meta["boxes"])) if "boxes" in meta else None,
    )


def _rises_to(ends: RowArray, last: int) -> bool:
    """True if no value is less than the one before, and the final one is `last`."""
    before = 0
    for first in range(0, len(ends), _CHUNK):
        part = ends[first : first + _CHUNK]
        if int(part[0]) < before or (part[1:] < part[:-1]).any():
            return False
        before = int(part[-1])
    return before == last


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a count")
    return value


def _fingerprint(value: Any) -> str:
    text = str(value)
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise ValueError("its fingerprint is not 32 hex digits")
    return text
