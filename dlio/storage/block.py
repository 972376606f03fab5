"""Blocks: runs of samples, with a table of their offsets, sizes and checksums.

FORMAT.md in this folder specifies the format. A block has the same bytes in a shard, on a disk
tier and in shared memory. Nothing in it is trusted: every length is compared with the bytes that
exist before memory is allocated for it, and every payload with its checksum.
"""

import errno
import functools
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import lz4.block
import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.requests import fill
from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock
from dlio.util.memory import new_memory

# Format of a block
MAGIC: Final = b"DLIOBLK1"
MAGIC_PART: Final = b"DLIOPCE2"
"""Of a block that lacks samples, in a tier."""
VERSION: Final = 1
MAX_SAMPLE_BYTES: Final = 2**31 - 1
"""Raw bytes of one sample: the limit of one LZ4 call."""
MAX_SCHEMA_BYTES: Final = 1 << 16
MAX_SAMPLES: Final = 1 << 24
"""Samples in one block."""
HEADER: Final = struct.Struct("<8sHHIQQ16sII Q")
"""Magic, version, flags, samples, number, bytes, fingerprint, bytes of schema, 0, checksum."""
ENTRY: Final = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("xxh3", "<u8")])
"""Entry of the table of samples; `offset` is from the start of the block."""
ALIGN: Final = 8
"""Alignment of payloads in a block, in bytes."""


def encode_block(
    payloads: Sequence[Buffer],
    *,
    block: int,
    fingerprint: str,
    schema: Schema,
    compress: bool = False,
    digests: Sequence[int] | None = None,
) -> list[Buffer]:
    """Make a block, as pieces to be written one after another; payloads are not copied. With
    `compress`, each sample is compressed by LZ4 if that saves a sixteenth; `fingerprint` has 32 hex
    digits. `digests` has the xxh3_64 of the payloads, where it is known.

    Raises ValueError when a payload is too large for the format.
    """
    table = np.zeros(len(payloads), ENTRY)
    at = table_offset(len(schema.to_json().encode())) + table.nbytes
    pieces: list[Buffer] = []
    for place, payload in enumerate(payloads):
        if len(payload) > MAX_SAMPLE_BYTES:
            raise ValueError(f"sample {place} of block {block} has {len(payload)} bytes")
        stored = payload
        # Each sample on its own, not the block: one sample is read at random, and would need all of
        # the block decompressed.
        if compress:
            packed = lz4.block.compress(payload, store_size=False)
            if len(packed) <= len(payload) - len(payload) // 16 - 1:
                stored = packed
        # The checksum is that of the raw bytes: it outlives a change of compression, and travels
        # with a payload from rank to rank without being computed again.
        digest = digests[place] if digests is not None else xxhash.xxh3_64_intdigest(payload)
        table[place] = (at, len(stored), len(payload), digest)
        gap = -len(stored) % ALIGN
        pieces.append(stored)
        if gap:
            pieces.append(bytes(gap))
        at += len(stored) + gap
    head = complete_head(table, block=block, length=at, fingerprint=fingerprint, schema=schema)
    return [head, *pieces]


def table_offset(schema_bytes: int) -> int:
    """Return the offset of the table in a block whose schema has `schema_bytes` bytes."""
    head = HEADER.size + schema_bytes
    return head + -head % ALIGN


def complete_head(
    table: npt.NDArray[np.void], *, block: int, length: int, fingerprint: str, schema: Schema
) -> bytes:
    """Return all that comes before the payloads of a block: header, schema and table. `table` has
    dtype ENTRY, and `length` is that of the whole block in bytes."""
    text = schema.to_json().encode()
    padding = table_offset(len(text)) - HEADER.size - len(text)
    fields = (
        MAGIC,
        VERSION,
        0,
        len(table),
        block,
        length,
        bytes.fromhex(fingerprint),
        len(text),
        0,
    )
    rest = text + bytes(padding) + table.tobytes()
    digest = xxhash.xxh3_64_intdigest(HEADER.pack(*fields, 0) + rest)
    return HEADER.pack(*fields, digest) + rest


def aligned(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round sizes of payloads up to the bytes that they take in a block."""
    return (sizes + ALIGN - 1) // ALIGN * ALIGN


def block_sizes(
    counts: npt.NDArray[np.int64], payloads: npt.NDArray[np.int64], schema: Schema
) -> npt.NDArray[np.int64]:
    """Return the bytes of uncompressed blocks, which compression only makes smaller. `counts` has
    the samples of each block, and `payloads` the sum of their aligned payload bytes; shape
    (blocks,)."""
    head = table_offset(len(schema.to_json().encode()))
    return head + ENTRY.itemsize * counts + payloads


# Memory that a thread reuses
class PayloadScratch:
    """Memory that one thread reads one payload after another into; it grows to the largest."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = bytearray(1 << 16)

    def view(self, count: int) -> memoryview:
        """Return `count` bytes, which overwrite the contents of earlier views."""
        if len(self._memory) < count:
            # Not resized in place: earlier views keep the smaller memory alive.
            self._memory = bytearray(count + count // 4)
        return memoryview(self._memory)[:count]


class _ThreadScratch(threading.local):
    """Memory of one thread: touching fresh memory costs ten times as much as decompressing."""

    def __init__(self) -> None:
        self.packed = PayloadScratch()
        self.raw = PayloadScratch()


own_scratch: Final = _ThreadScratch()
"""Memory of the calling thread: `packed` for compressed payloads, `raw` for decompressed ones."""
LZ4_HEAD: Final = struct.Struct("<i")
"""Head of LZ4 data as numcodecs expects it: the decompressed size."""


def decompress_exactly(stored: memoryview, raw: memoryview) -> None:
    """Decompress LZ4 data into `raw`, which it has to fill exactly. Raises CorruptBlock."""
    decompress_packed(with_head(stored), raw)


def with_head(stored: memoryview) -> memoryview:
    """Return LZ4 data with room for a head before it, in memory that this thread reuses."""
    # numcodecs wants the size before the data: room is left for it, so that nothing is copied.
    packed = own_scratch.packed.view(LZ4_HEAD.size + len(stored))
    packed[LZ4_HEAD.size :] = stored
    return packed


def decompress_packed(packed: memoryview, raw: memoryview) -> None:
    """Decompress LZ4 data into `raw`, which it has to fill exactly. Raises CorruptBlock. `packed`
    begins with room for a head, which is filled in; `raw` has the decompressed size."""
    # Loaded at first use. The lz4 package cannot decompress into given memory.
    from numcodecs.lz4 import decompress

    LZ4_HEAD.pack_into(packed, 0, len(raw))
    try:
        decompress(packed, raw)
    except (RuntimeError, ValueError) as error:
        raise CorruptBlock("LZ4 data is damaged") from error


def scatter(payload: Buffer, pieces: Sequence[memoryview]) -> None:
    """Copy a payload into pieces of memory, which are together as long."""
    view, at = memoryview(payload), 0
    for piece in pieces:
        piece[:] = view[at : at + len(piece)]
        at += len(piece)


# Reading blocks
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota and full shared memory."""
_LZ4_LIMIT: Final = 256
"""LZ4 cannot expand by more than about 255; a larger claim is damage, or an attack."""
_CHECKED_BYTES: Final = 1 << 19
"""Bytes that are read at a time and then checked, while they are in the processor's cache."""
_MOST_WRITTEN: Final = 1 << 20
"""Bytes of one write. Linux 6.18 caches a file of ext4 in pages as large as a write: 8 MiB at a
time cost two to four times the processor time of 1 MiB, and at worst ten times the seconds."""
_REMEDY: Final = " (the file is damaged: restore it, or make it again)"


class DescriptorlessFile(Protocol):
    """A file without a descriptor, for example one behind fsspec; see `dlio.data.source.File`."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from the file. Raises CorruptBlock or OSError when bytes are missing."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block's header and table, checked; its payloads are read from an open file."""

    path: str
    """Path of the file, for messages."""
    start: int
    """File offset of the block."""
    block: int
    fingerprint: str
    schema: Schema
    digest: int
    """xxh3_64 of header and table. These hold the payloads' checksums, so it covers the block."""
    length: int
    """Bytes of the whole block."""
    table: npt.NDArray[np.void]
    """Fields offset (from `start`), stored, raw, xxh3; shape (samples,)."""

    def __len__(self) -> int:
        return len(self.table)

    def read(
        self,
        descriptor: int | DescriptorlessFile,
        place: int,
        scratch: PayloadScratch | None = None,
        *,
        checked: bool = True,
    ) -> memoryview:
        """Return the raw payload at `place`. It is read into `scratch`, or into memory of its own;
        without `checked`, its checksum is not compared.

        Raises CorruptBlock when bytes are missing or differ from what was written.
        """
        if not 0 <= place < len(self.table):
            raise CorruptBlock(f"{self.path}: block {self.block} has no sample {place}")
        offset, stored, raw, _ = self.table[place].item()
        view = new_memory(raw) if scratch is None else scratch.view(raw)
        if stored != raw:
            self._read_packed(descriptor, place, view)
        else:
            read_exactly(descriptor, view, self.start + offset, lambda: self.where(place))
        return self._compare(view, place, checked)

    def read_into(
        self,
        descriptor: int | DescriptorlessFile,
        place: int,
        pieces: Sequence[memoryview],
        *,
        checked: bool = True,
    ) -> None:
        """Read the raw payload at `place` into `pieces`, one after another.

        It is checked piece by piece, while it is in the processor's cache. The pieces are together
        as long as the payload.

        Raises CorruptBlock as `read` does.
        """
        offset, stored, raw, digest = self.table[place].item()
        size = sum(len(piece) for piece in pieces)
        if size != raw:
            raise CorruptBlock(
                f"{self.where(place)}: has {raw} bytes, not the {size} of its fields{_REMEDY}"
            )
        if stored != raw:
            whole = pieces[0] if len(pieces) == 1 else own_scratch.raw.view(raw)
            self._read_packed(descriptor, place, whole)
            self._compare(whole, place, checked)
            if len(pieces) > 1:
                scatter(whole, pieces)
            return
        hasher, at = xxhash.xxh3_64(), self.start + offset
        for piece in pieces:
            # A pass over the whole payload after reading it would fetch it from memory once more.
            for begin in range(0, len(piece), _CHECKED_BYTES):
                part = piece[begin : begin + _CHECKED_BYTES]
                read_exactly(descriptor, part, at, lambda: self.where(place))
                at += len(part)
                if checked:
                    hasher.update(part)
        if checked and hasher.intdigest() != digest:
            raise CorruptBlock(f"{self.where(place)}: its checksum does not match{_REMEDY}")

    def read_stored(
        self,
        descriptor: int | DescriptorlessFile,
        place: int,
        into: memoryview,
        *,
        checked: bool = True,
    ) -> tuple[int, int]:
        """Read the payload at `place` as it is stored, compressed or not.

        A compressed payload is not checked here but by whoever decompresses it. `into` has the raw
        payload's size; the bytes are put at its beginning.

        Returns (bytes stored, xxh3_64 of the raw payload). Raises CorruptBlock as `read` does.
        """
        offset, stored, raw, digest = self.table[place].item()
        if stored == raw:
            self.read_into(descriptor, place, [into], checked=checked)
        else:
            read_exactly(descriptor, into[:stored], self.start + offset, lambda: self.where(place))
        return stored, digest

    def check(
        self, stored: memoryview, place: int, scratch: PayloadScratch | None = None
    ) -> memoryview:
        """Decompress the stored bytes of `place` if need be, check and return the raw payload. It
        is decompressed into `scratch`, or into memory of its own.

        Raises CorruptBlock.
        """
        _, stored_size, raw_size, _ = self.table[place].item()
        if stored_size == raw_size:
            return self._compare(stored, place, True)
        raw = new_memory(raw_size) if scratch is None else scratch.view(raw_size)
        self._unpack(with_head(stored), raw, place)
        return self._compare(raw, place, True)

    def _read_packed(
        self, descriptor: int | DescriptorlessFile, place: int, raw: memoryview
    ) -> None:
        """Read the compressed payload at `place` and decompress it into `raw`, of its size."""
        offset, stored, _, _ = self.table[place].item()
        packed = own_scratch.packed.view(LZ4_HEAD.size + stored)
        at = self.start + offset
        read_exactly(descriptor, packed[LZ4_HEAD.size :], at, lambda: self.where(place))
        self._unpack(packed, raw, place)

    def _unpack(self, packed: memoryview, raw: memoryview, place: int) -> None:
        try:
            decompress_packed(packed, raw)
        except CorruptBlock as error:
            raise CorruptBlock(f"{self.where(place)}: {error}{_REMEDY}") from error

    def _compare(self, raw: memoryview, place: int, checked: bool) -> memoryview:
        _, _, size, digest = self.table[place].item()
        if len(raw) != size or (checked and xxhash.xxh3_64_intdigest(raw) != digest):
            raise CorruptBlock(f"{self.where(place)}: its checksum does not match{_REMEDY}")
        return raw

    def where(self, place: int) -> str:
        """Name a sample in messages."""
        return f"{self.path}, block {self.block}, sample {place} of it"


_schema_in: Final = functools.lru_cache(16)(Schema.from_json)
"""Parses a schema, which all blocks of a data set have in common: once. Raises CorruptBlock."""


def read_info(
    descriptor: int | DescriptorlessFile, path: str, start: int = 0, length: int | None = None
) -> BlockInfo:
    """Read and check the header and table of the block at `start` of an open file. `length` is that
    of the block according to an index; None if it reaches to the file's end.

    Raises CorruptBlock when the bytes are not a block, or a damaged or truncated one.
    """
    where = path if start == 0 else f"{path} at {start}"
    available = file_size(descriptor) - start
    # A tier has one block a file, a shard has many and an index of them.
    if length is None:
        length = available
    if length > available or length < HEADER.size:
        raise CorruptBlock(f"{where}: truncated to {available} bytes{_REMEDY}")
    header = bytearray(HEADER.size)
    read_exactly(descriptor, memoryview(header), start, where)
    magic, version, flags, count, block, claimed, fingerprint, schema_bytes, zero, digest = (
        HEADER.unpack(header)
    )
    if magic != MAGIC:
        raise CorruptBlock(f"{where}: not a block of dlio{_REMEDY}")
    if version != VERSION or flags or zero:
        raise CorruptBlock(
            f"{where}: block format {version} (flags {flags}) is unknown to this version of "
            "dlio: upgrade dlio"
        )
    rest_bytes = schema_bytes + -(HEADER.size + schema_bytes) % ALIGN + count * ENTRY.itemsize
    if (
        claimed != length
        or schema_bytes > MAX_SCHEMA_BYTES
        or count > MAX_SAMPLES
        or HEADER.size + rest_bytes > length
    ):
        raise CorruptBlock(f"{where}: its header claims more than its {length} bytes{_REMEDY}")
    rest = bytearray(rest_bytes)
    read_exactly(descriptor, memoryview(rest), start + HEADER.size, where)
    header[-8:] = bytes(8)
    if xxhash.xxh3_64_intdigest(bytes(header + rest)) != digest:
        raise CorruptBlock(f"{where}: its header does not match its checksum{_REMEDY}")
    table = np.frombuffer(bytes(rest[rest_bytes - count * ENTRY.itemsize :]), ENTRY)
    _check_table(table, HEADER.size + rest_bytes, length, where)
    schema = _schema_in(bytes(rest[:schema_bytes]))
    return BlockInfo(path, start, block, fingerprint.hex(), schema, digest, length, table)


def check_block(memory: memoryview, path: str, start: int) -> BlockInfo:
    """Check a whole block in memory: its header, its table and every payload.

    `path` and `start` are those of the file it comes from, for messages. Raises CorruptBlock.
    """
    info = read_info(
        _BlockInMemory(memory), path if start == 0 else f"{path} at {start}", 0, len(memory)
    )
    for place in range(len(info)):
        offset, stored, _, _ = info.table[place].item()
        info.check(memory[offset : offset + stored], place, own_scratch.raw)
    return info


class _BlockInMemory:
    """A block in memory, read as if it were a file."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.size = len(memory)

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset : offset + len(into)]


def file_size(file: int | DescriptorlessFile) -> int:
    """Return the bytes of an open file."""
    return os.fstat(file).st_size if isinstance(file, int) else file.size


def read_exactly(
    descriptor: int | DescriptorlessFile,
    into: memoryview,
    offset: int,
    part: str | Callable[[], str],
) -> None:
    """Fill `into` from a file. Raises CorruptBlock, naming `part`, when the file is shorter."""
    if not isinstance(descriptor, int):
        descriptor.read_into(offset, into)
        return
    done = fill(descriptor, offset, into)
    if done < len(into):
        name = part if isinstance(part, str) else part()
        raise CorruptBlock(f"{name}: truncated: {len(into) - done} bytes are missing{_REMEDY}")


def write_all(descriptor: int, pieces: Sequence[Buffer], offset: int | None = None) -> None:
    """Write all pieces in order; the kernel may write less than it is given. They are written from
    `offset` of the file on; for None from where the descriptor is."""
    left = [
        view[start : start + _MOST_WRITTEN]
        for view in [memoryview(piece) for piece in pieces]
        for start in range(0, len(view), _MOST_WRITTEN)
    ]
    done = 0
    while done < len(left):
        # No system that dlio runs on takes fewer than 1,024 pieces (IOV_MAX).
        ends = itertools.accumulate(map(len, left[done : done + 1024]))
        parts = left[done : done + max(1, sum(end <= _MOST_WRITTEN for end in ends))]
        if offset is None:
            written = os.writev(descriptor, parts)
        else:
            written = os.pwritev(descriptor, parts, offset)
            offset += written
        while written and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        if written:
            left[done] = left[done][written:]


def _check_table(table: npt.NDArray[np.void], head: int, length: int, where: str) -> None:
    """Check that every payload lies after the table, after its predecessor and in the block."""
    if not len(table):
        return
    offsets = table["offset"].astype(np.int64)
    stored = table["stored"].astype(np.int64)
    raw = table["raw"].astype(np.int64)
    ends = offsets + stored
    sound = (
        offsets[0] >= head
        and (offsets >= 0).all()
        and (ends <= length).all()
        and (offsets[1:] >= ends[:-1]).all()
        and (stored <= raw).all()
        and (raw <= MAX_SAMPLE_BYTES).all()
        and (raw <= _LZ4_LIMIT * stored).all()
    )
    if not sound:
        raise CorruptBlock(f"{where}: its table points outside of the block{_REMEDY}")
