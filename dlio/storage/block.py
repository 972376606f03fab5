"""Blocks: runs of samples with a header that says where each is and what it must hash to.

The format is specified in FORMAT.md beside this file. A block is the same in a shard, on a disk
tier and in shared memory. Nothing in it is believed: every length is checked against the bytes
that are there before memory is allocated for it, and every payload against its checksum.
"""

import errno
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

from dlio.data.schema import Buffer, Schema
from dlio.errors import CorruptBlock

MAGIC: Final = b"DLIOBLK1"
VERSION: Final = 1
MAX_SAMPLE_BYTES: Final = 2**31 - 1
"""Raw bytes of one sample: what one LZ4 call takes."""
MAX_SCHEMA_BYTES: Final = 1 << 16
MAX_SAMPLES: Final = 1 << 24
"""Samples in one block."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the kernel says when a disk, a quota or shared memory is full."""
_LZ4_LIMIT: Final = 256
"""LZ4 cannot expand by more than about 255; a claim beyond that is a bomb or damage."""

_HEADER: Final = struct.Struct("<8sHHIQQ16sII Q")
_ENTRY: Final = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("xxh3", "<u8")])
_ALIGN: Final = 8


class Readable(Protocol):
    """A file that is no descriptor: one behind fsspec, see `dlio.data.source.File`."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, into: memoryview) -> None: ...


def new_memory(count: int) -> memoryview:
    """Memory to be read into; nothing is written into it before."""
    return np.empty(count, np.uint8).data


class Scratch:
    """Memory that one thread reads payload after payload into; grows to the largest."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = bytearray(1 << 16)

    def view(self, count: int) -> memoryview:
        """`count` bytes; what was read into an earlier view is overwritten."""
        if len(self._memory) < count:
            # Earlier views keep the smaller memory alive; it cannot be resized under them.
            self._memory = bytearray(count + count // 4)
        return memoryview(self._memory)[:count]


class _Mine(threading.local):
    """A thread's own memory: fresh memory costs ten times what decompressing into it does."""

    def __init__(self) -> None:
        self.packed = Scratch()
        self.raw = Scratch()


_mine: Final = _Mine()
_LZ4_HEAD: Final = struct.Struct("<i")
"""Of the size that numcodecs wants before a block."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block's header and table, checked; its payloads are read from an open file."""

    path: str
    """Of the file, for messages."""
    start: int
    """File offset of the block."""
    block: int
    fingerprint: str
    schema: Schema
    digest: int
    """Of header and table, which hold the payloads' own; so of all there is."""
    length: int
    """Bytes of the whole block."""
    table: npt.NDArray[np.void]
    """Fields offset (from `start`), stored, raw, xxh3; shape (samples,)."""

    def __len__(self) -> int:
        return len(self.table)

    def read(
        self,
        descriptor: int | Readable,
        place: int,
        scratch: Scratch | None = None,
        *,
        checked: bool = True,
    ) -> memoryview:
        """The raw payload at `place`, checked.

        Args:
            scratch: memory to read into; without it the payload has memory of its own.
            checked: False leaves its checksum out.

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
        descriptor: int | Readable,
        place: int,
        pieces: Sequence[memoryview],
        *,
        checked: bool = True,
    ) -> None:
        """The raw payload at `place` into `pieces`, one after another; checked while it is in the
        processor's cache. Raises CorruptBlock, as `read` does."""
        offset, stored, raw, digest = self.table[place].item()
        if sum(len(piece) for piece in pieces) != raw:
            raise CorruptBlock(f"{self.where(place)}: has {raw} bytes, not what its fields need")
        if stored != raw:
            whole = pieces[0] if len(pieces) == 1 else _mine.raw.view(raw)
            self._read_packed(descriptor, place, whole)
            self._compare(whole, place, checked)
            if len(pieces) > 1:
                scatter(whole, pieces)
            return
        hasher, at = xxhash.xxh3_64(), self.start + offset
        for piece in pieces:
            for begin in range(0, len(piece), _CHECKED_BYTES):
                part = piece[begin : begin + _CHECKED_BYTES]
                read_exactly(descriptor, part, at, lambda: self.where(place))
                at += len(part)
                if checked:
                    hasher.update(part)
        if checked and hasher.intdigest() != digest:
            raise CorruptBlock(f"{self.where(place)}: its checksum does not match{_REMEDY}")

    def read_stored(
        self, descriptor: int | Readable, place: int, into: memoryview, *, checked: bool = True
    ) -> tuple[int, int]:
        """What is stored at `place`, compressed or not, at the beginning of memory of the raw
        payload's size; (bytes stored, xxh3_64 of the raw payload). What is compressed is left to
        be checked by whoever decompresses it. Raises CorruptBlock, as `read` does."""
        offset, stored, raw, digest = self.table[place].item()
        if stored == raw:
            self.read_into(descriptor, place, [into], checked=checked)
        else:
            read_exactly(descriptor, into[:stored], self.start + offset, lambda: self.where(place))
        return stored, digest

    def check(self, stored: memoryview, place: int, scratch: Scratch | None = None) -> memoryview:
        """The raw payload of what is stored at `place`: decompressed if need be, checked.

        Args:
            scratch: memory to decompress into; without it the payload has memory of its own.
        """
        _, stored_size, raw_size, _ = self.table[place].item()
        if stored_size == raw_size:
            return self._compare(stored, place, True)
        raw = new_memory(raw_size) if scratch is None else scratch.view(raw_size)
        self._unpack(_with_head(stored), raw, place)
        return self._compare(raw, place, True)

    def _read_packed(self, descriptor: int | Readable, place: int, raw: memoryview) -> None:
        """Read what is compressed at `place`, and decompress it into memory of its size."""
        offset, stored, _, _ = self.table[place].item()
        packed = _mine.packed.view(_LZ4_HEAD.size + stored)
        at = self.start + offset
        read_exactly(descriptor, packed[_LZ4_HEAD.size :], at, lambda: self.where(place))
        self._unpack(packed, raw, place)

    def _unpack(self, packed: memoryview, raw: memoryview, place: int) -> None:
        try:
            _decompress(packed, raw)
        except CorruptBlock as error:
            raise CorruptBlock(f"{self.where(place)}: {error}{_REMEDY}") from error

    def _compare(self, raw: memoryview, place: int, checked: bool) -> memoryview:
        _, _, size, digest = self.table[place].item()
        if len(raw) != size or (checked and xxhash.xxh3_64_intdigest(raw) != digest):
            raise CorruptBlock(f"{self.where(place)}: its checksum does not match{_REMEDY}")
        return raw

    def where(self, place: int) -> str:
        return f"{self.path}, block {self.block}, sample {place} of it"


def decompress_exactly(stored: memoryview, raw: memoryview) -> None:
    """Decompress an LZ4 block into memory of its size, and no more. Raises CorruptBlock."""
    _decompress(_with_head(stored), raw)


def _with_head(stored: memoryview) -> memoryview:
    """A copy with room for a head before it, in memory of this thread."""
    packed = _mine.packed.view(_LZ4_HEAD.size + len(stored))
    packed[_LZ4_HEAD.size :] = stored
    return packed


def _decompress(packed: memoryview, raw: memoryview) -> None:
    """Decompress what follows room for a head."""
    # Loaded at first use. lz4 itself cannot decompress into memory that is there.
    from numcodecs.lz4 import decompress

    _LZ4_HEAD.pack_into(packed, 0, len(raw))
    try:
        decompress(packed, raw)
    except (RuntimeError, ValueError) as error:
        raise CorruptBlock("LZ4 data is damaged") from error


def scatter(payload: Buffer, pieces: Sequence[memoryview]) -> None:
    """Copy a payload into pieces that have its size together."""
    view, at = memoryview(payload), 0
    for piece in pieces:
        piece[:] = view[at : at + len(piece)]
        at += len(piece)


_CHECKED_BYTES: Final = 1 << 19
"""Read at a time where they are checked at once: they are still in the processor's cache."""
_REMEDY: Final = " (the file is damaged: restore it, or make it again)"


def encode_block(
    payloads: Sequence[Buffer],
    *,
    block: int,
    fingerprint: str,
    schema: Schema,
    compress: bool = False,
) -> list[Buffer]:
    """A block as pieces to be written one after another; payloads are not copied.

    Args:
        fingerprint: of the data set, 32 hex digits.
        compress: with LZ4, each sample for which that saves a sixteenth.

    Raises ValueError when a payload is too large for the format.
    """
    schema_text = schema.to_json().encode()
    table = np.zeros(len(payloads), _ENTRY)
    head = _HEADER.size + len(schema_text)
    padding = -head % _ALIGN
    at = head + padding + table.nbytes
    pieces: list[Buffer] = []
    for place, payload in enumerate(payloads):
        if len(payload) > MAX_SAMPLE_BYTES:
            raise ValueError(f"sample {place} of block {block} has {len(payload)} bytes")
        stored = payload
        if compress:
            packed = lz4.block.compress(payload, store_size=False)
            if len(packed) <= len(payload) - len(payload) // 16 - 1:
                stored = packed
        table[place] = (at, len(stored), len(payload), xxhash.xxh3_64_intdigest(payload))
        gap = -len(stored) % _ALIGN
        pieces.append(stored)
        if gap:
            pieces.append(bytes(gap))
        at += len(stored) + gap
    fields = (
        MAGIC,
        VERSION,
        0,
        len(payloads),
        block,
        at,
        bytes.fromhex(fingerprint),
        len(schema_text),
        0,
    )
    rest = schema_text + bytes(padding) + table.tobytes()
    digest = xxhash.xxh3_64_intdigest(_HEADER.pack(*fields, 0) + rest)
    return [_HEADER.pack(*fields, digest) + rest, *pieces]


def aligned(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that payloads of these sizes take in a block, with the gaps behind them."""
    return (sizes + _ALIGN - 1) // _ALIGN * _ALIGN


def block_sizes(
    counts: npt.NDArray[np.int64], payloads: npt.NDArray[np.int64], schema: Schema
) -> npt.NDArray[np.int64]:
    """Bytes of uncompressed blocks; compressed, at most that.

    Args:
        counts: samples of each block.
        payloads: aligned bytes of its payloads together.
    """
    head = _HEADER.size + len(schema.to_json().encode())
    return head + -head % _ALIGN + _ENTRY.itemsize * counts + payloads


def read_info(
    descriptor: int | Readable, path: str, start: int = 0, length: int | None = None
) -> BlockInfo:
    """Read and check the header and table of the block at `start` of an open file.

    Args:
        length: bytes that the block has according to an index; None: up to the file's end.

    Raises CorruptBlock when it is no block, or a damaged or truncated one.
    """
    where = path if start == 0 else f"{path} at {start}"
    available = file_size(descriptor) - start
    if length is None:
        length = available
    if length > available or length < _HEADER.size:
        raise CorruptBlock(f"{where}: truncated: {available} bytes are there{_REMEDY}")
    header = bytearray(_HEADER.size)
    read_exactly(descriptor, memoryview(header), start, where)
    magic, version, flags, count, block, claimed, fingerprint, schema_bytes, zero, digest = (
        _HEADER.unpack(header)
    )
    if magic != MAGIC:
        raise CorruptBlock(f"{where}: is no block of dlio{_REMEDY}")
    if version != VERSION or flags or zero:
        raise CorruptBlock(
            f"{where}: block format {version} (flags {flags}) is not known to this version of "
            "dlio: upgrade it"
        )
    rest_bytes = schema_bytes + -(_HEADER.size + schema_bytes) % _ALIGN + count * _ENTRY.itemsize
    if (
        claimed != length
        or schema_bytes > MAX_SCHEMA_BYTES
        or count > MAX_SAMPLES
        or _HEADER.size + rest_bytes > length
    ):
        raise CorruptBlock(f"{where}: its header claims more than its {length} bytes{_REMEDY}")
    rest = bytearray(rest_bytes)
    read_exactly(descriptor, memoryview(rest), start + _HEADER.size, where)
    header[-8:] = bytes(8)
    if xxhash.xxh3_64_intdigest(bytes(header + rest)) != digest:
        raise CorruptBlock(f"{where}: its header does not match its checksum{_REMEDY}")
    table = np.frombuffer(bytes(rest[rest_bytes - count * _ENTRY.itemsize :]), _ENTRY)
    _check_table(table, _HEADER.size + rest_bytes, length, where)
    schema = Schema.from_json(bytes(rest[:schema_bytes]))
    return BlockInfo(path, start, block, fingerprint.hex(), schema, digest, length, table)


def check_block(memory: memoryview, path: str, start: int, *, payloads: bool = True) -> BlockInfo:
    """Check a whole block that lies in memory: its header, its table and every payload.

    Args:
        path, start: where it comes from, for messages.
        payloads: False leaves their checksums to whoever reads them later.
    """
    info = read_info(_Memory(memory), path if start == 0 else f"{path} at {start}", 0, len(memory))
    if payloads:
        for place in range(len(info)):
            offset, stored, _, _ = info.table[place].item()
            info.check(memory[offset : offset + stored], place, _mine.raw)
    return info


class _Memory:
    """A block in memory, read as if it were a file."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.size = len(memory)

    def read_into(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset : offset + len(into)]


def file_size(file: int | Readable) -> int:
    """Bytes of an open file."""
    return os.fstat(file).st_size if isinstance(file, int) else file.size


def read_exactly(
    descriptor: int | Readable, into: memoryview, offset: int, what: str | Callable[[], str]
) -> None:
    """Fill `into` from a file. Raises CorruptBlock, naming `what`, when the file is shorter."""
    if not isinstance(descriptor, int):
        descriptor.read_into(offset, into)
        return
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            name = what if isinstance(what, str) else what()
            raise CorruptBlock(f"{name}: truncated: {len(into) - done} bytes are missing{_REMEDY}")
        done += count


def write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write all pieces in order, however short the kernel's writes are."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        # 1,024 is the least IOV_MAX of the systems we know.
        written = os.writev(descriptor, left[:1024])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]


def _check_table(table: npt.NDArray[np.void], head: int, length: int, where: str) -> None:
    """Every payload lies behind the table, behind its predecessor and inside the block."""
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
        raise CorruptBlock(f"{where}: its table points outside of it{_REMEDY}")
