"""Shards: files of blocks, one after another, with a footer that indexes them.

FORMAT.md in this folder specifies the footer. It holds the index that a reader needs before it
reads a block: offsets of the blocks; size, label and name of each sample; classes and schema.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock
from dlio.storage.block import Readable, file_size, read_exactly, write_all

__all__ = ["SUFFIX", "TRAILER_MAGIC", "VERSION", "Footer", "ShardWriter", "read_footer"]

SUFFIX: Final = ".dlio"
TRAILER_MAGIC: Final = b"DLIOSHRD"
VERSION: Final = 1
_TRAILER: Final = struct.Struct("<QQQ8s")
_META_LENGTH: Final = struct.Struct("<Q")
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Footer:
    """The index of one shard of a data set."""

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
    offsets: npt.NDArray[np.uint64]
    """File offset of each block, and of the footer; shape (blocks + 1,)."""
    counts: npt.NDArray[np.uint32]
    """Samples in each block; shape (blocks,)."""
    sizes: npt.NDArray[np.uint32]
    """Payload bytes of each sample; shape (samples,)."""
    labels: npt.NDArray[np.int64]
    """Class of each sample; shape (samples,)."""
    names: Buffer
    """Sample names, UTF-8, one after another."""
    name_ends: npt.NDArray[np.uint64]
    """End of each name in `names`; shape (samples,)."""
    payload_bytes: int = 0
    """Sum of `sizes`; computed by readers, not written."""

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
        text = json.dumps(meta, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        # Widest first, so that every array is aligned.
        arrays = [
            self.offsets.astype("<u8"),
            self.labels.astype("<i8"),
            self.name_ends.astype("<u8"),
            self.counts.astype("<u4"),
            self.sizes.astype("<u4"),
        ]
        body = b"".join(array.tobytes() for array in arrays)
        return _META_LENGTH.pack(len(text)) + text + body + bytes(self.names)


class ShardWriter:
    """Writes one shard file: blocks, then the footer. Works as a context manager.

    The file is complete only after `finish`. Until then it has no trailer, and every reader
    rejects it.

    Raises OSError, also when the file exists.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
        self.offsets = [0]
        """File offsets of the blocks so far, and of the next block or the footer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write_block(self, pieces: Sequence[Buffer]) -> None:
        """Append a block, as `encode_block` makes it."""
        write_all(self._descriptor, pieces)
        self.offsets.append(self.offsets[-1] + sum(len(piece) for piece in pieces))

    def finish(self, footer: Footer) -> None:
        """Write footer and trailer, and sync the file to disk."""
        text = footer.encode()
        trailer = _TRAILER.pack(
            self.offsets[-1], len(text), xxhash.xxh3_64_intdigest(text), TRAILER_MAGIC
        )
        write_all(self._descriptor, [text, trailer])
        os.fsync(self._descriptor)


def read_footer(descriptor: int | Readable, path: str) -> Footer:
    """Read and check the footer of an open shard file.

    The arrays of a local file are memory-mapped, so that a footer of ten million samples takes
    little memory.

    Raises CorruptBlock.
    """
    size = file_size(descriptor)
    if size < _TRAILER.size:
        raise CorruptBlock(
            f"{path}: has {size} bytes, too few for a shard: it is truncated or empty; restore "
            "the file"
        )
    trailer = bytearray(_TRAILER.size)
    read_exactly(descriptor, memoryview(trailer), size - _TRAILER.size, path)
    start, length, digest, magic = _TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC:
        raise CorruptBlock(
            f"{path}: does not end as a shard does: it is truncated, or not a shard of dlio"
        )
    if length > size or start + length + _TRAILER.size != size:
        raise CorruptBlock(f"{path}: its trailer points outside of the file: restore the file")
    if _digest(descriptor, path, start, length) != digest:
        raise CorruptBlock(f"{path}: its footer does not match its checksum: restore the file")
    text: Buffer

    def forget() -> None:
        """Do nothing: no memory is mapped."""

    if isinstance(descriptor, int):
        page = start - start % mmap.PAGESIZE
        mapped = mmap.mmap(
            descriptor, start + length - page, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=page
        )
        text = memoryview(mapped)[start - page :]

        def forget() -> None:
            mapped.madvise(mmap.MADV_DONTNEED)

    else:
        text = bytearray(length)
        read_exactly(descriptor, memoryview(text), start, path)
    try:
        return _decode(memoryview(text), start, forget)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise CorruptBlock(f"{path}: its footer is invalid: {error}; restore the file") from error


def _digest(descriptor: int | Readable, path: str, start: int, length: int) -> int:
    digest = xxhash.xxh3_64()
    chunk = memoryview(bytearray(min(length, _CHUNK)))
    for done in range(0, length, _CHUNK):
        part = chunk[: min(_CHUNK, length - done)]
        read_exactly(descriptor, part, start + done, path)
        digest.update(part)
    return digest.intdigest()


def _decode(text: memoryview, footer_start: int, forget: Callable[[], None]) -> Footer:
    """Parse a footer.

    Args:
        forget: drops mapped pages from memory; called after each part that was checked.
    """
    (meta_length,) = _META_LENGTH.unpack_from(text)
    if meta_length > len(text) - _META_LENGTH.size:
        raise ValueError("its JSON is longer than the footer")
    at = _META_LENGTH.size + meta_length
    meta = json.loads(bytes(text[_META_LENGTH.size : at]))
    if meta["version"] != VERSION:
        raise ValueError(
            f"format {meta['version']} is unknown to this version of dlio: upgrade dlio"
        )
    blocks, samples = _count(meta["blocks"]), _count(meta["samples"])
    fixed = 8 * (blocks + 1) + 16 * samples + 4 * blocks + 4 * samples
    if at + fixed > len(text):
        raise ValueError(f"it is too short for {blocks} blocks and {samples} samples")
    arrays = {}
    for name, kind, count in (
        ("offsets", "<u8", blocks + 1),
        ("labels", "<i8", samples),
        ("name_ends", "<u8", samples),
        ("counts", "<u4", blocks),
        ("sizes", "<u4", samples),
    ):
        arrays[name] = np.frombuffer(text, kind, count, at)
        at += arrays[name].nbytes
    names = text[at:]
    offsets, ends = arrays["offsets"], arrays["name_ends"]
    if int(arrays["counts"].sum(dtype=np.uint64)) != samples:
        raise ValueError("its blocks do not add up to its samples")
    if (offsets[1:] < offsets[:-1]).any() or int(offsets[-1]) != footer_start:
        raise ValueError("its blocks overlap")
    if (int(ends[-1]) if samples else 0) != len(names) or not _rises(ends, forget):
        raise ValueError("its names do not add up")
    payload_bytes = 0
    for first in range(0, samples, _CHUNK):
        payload_bytes += int(arrays["sizes"][first : first + _CHUNK].sum(dtype=np.int64))
        forget()
    return Footer(
        fingerprint=_fingerprint(meta["fingerprint"]),
        schema=Schema.from_rows(meta["schema"]),
        classes=tuple(str(name) for name in meta["classes"]),
        shard=_count(meta["shard"]),
        shards=_count(meta["shards"]),
        first=_count(meta["first"]),
        total=_count(meta["total"]),
        names=names,
        payload_bytes=payload_bytes,
        **arrays,
    )


def _rises(ends: npt.NDArray[np.uint64], forget: Callable[[], None]) -> bool:
    """True if no value is less than the one before; checked in chunks."""
    for first in range(0, len(ends), _CHUNK):
        part = ends[first : first + _CHUNK + 1]
        if (part[1:] < part[:-1]).any():
            return False
        forget()
    return True


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a count")
    return value


def _fingerprint(value: Any) -> str:
    text = str(value)
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise ValueError("its fingerprint is not 32 hex digits")
    return text
