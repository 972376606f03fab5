"""Samples of blocks that are not complete yet, in a tier's folder, shared by a node's processes.

    00000042.part   the samples of block 42 that have been read, one record after another
    samples         byte s is locked by the process that is reading sample s from the source;
                    byte 2^40 + b by the one that adds to the samples of block b

A record is a header (magic, place in the block, bytes, xxh3_64 seeded with the place) and the
payload. Records are only ever appended, under the block's lock. A process that is killed while it
appends leaves a torn record, which the next one to append cuts off. So what one process has read,
all others of the node use, and later jobs as well where the tier is a disk.
"""

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import xxhash

from dlio.data.schema import Buffer
from dlio.errors import TierError
from dlio.plan.layout import Layout
from dlio.storage.block import MAX_SAMPLE_BYTES, write_all
from dlio.storage.byte_locks import lock_byte
from dlio.storage.tier import Tier
from dlio.util.folders import unlink
from dlio.util.memory import new_memory
from dlio.util.opening import open_file

__all__ = ["Pieces"]

_HEAD: Final = struct.Struct("<8sQQQ")
"""Magic, place, bytes, checksum."""
_MAGIC: Final = b"DLIOPCE1"
_BLOCKS_AT: Final = 1 << 40
_STRIPES: Final = 64
_POLL_S: Final = 0.001
_LOCK_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class _Index:
    """The records of a block that this process has seen."""

    entries: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """(offset of the payload, bytes, checksum) by place."""
    end: int = 0
    """End of the last whole record."""
    size: int = 0
    """Bytes of the file when it was looked at."""
    file: int = -1
    """Inode of the file that was indexed."""


class Pieces:
    """Samples of a tier's incomplete blocks. Thread-safe. Owner: the gathering, which closes it.

    Args:
        tier: writable; not owned.
        layout: of the data set's blocks.
    """

    def __init__(self, tier: Tier, layout: Layout) -> None:
        self.tier = tier
        self._layout = layout
        self._folder = os.dup(tier.folder)
        self._locks = open_file(self._folder, "samples", os.O_RDWR | os.O_CREAT)
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._indices: dict[int, _Index] = {}

    def claim(self, sample: int) -> bool:
        """Become the one process that reads `sample` from the source; False while another is.

        One thread of a process at a time may claim a sample.
        """
        return lock_byte(self._locks, sample)

    def release(self, sample: int) -> None:
        """Let other processes read `sample`."""
        with suppress(OSError):  # The lock ends with the descriptor at last.
            lock_byte(self._locks, sample, fcntl.F_UNLCK)

    def places(self, block: int) -> set[int]:
        """Return the places of a block whose samples are here."""
        with self._stripe(block):
            return set(self._scan(block).entries)

    def has(self, block: int, place: int) -> bool:
        """True if a sample is here."""
        with self._stripe(block):
            try:
                status = os.stat(_name(block), dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
            index = self._indices.get(block)
            if index is None or (index.file, index.end) != (status.st_ino, status.st_size):
                index = self._scan(block)
            return place in index.entries

    def read(self, block: int, place: int) -> memoryview | None:
        """Return the payload of a sample that is here, checked; None if it is not, or damaged."""
        with self._stripe(block):
            descriptor = self._open(block)
            if descriptor is None:
                return None
            try:
                entry = self._scan(block, descriptor).entries.get(place)
                return None if entry is None else _payload(descriptor, place, entry)
            finally:
                os.close(descriptor)

    def read_all(self, block: int) -> list[memoryview] | None:
        """Return all payloads of a block; None, and the file removed, if one is damaged."""
        count = self._count(block)
        with self._appending(block):
            descriptor = self._open(block)
            if descriptor is None:
                return None
            try:
                entries = self._scan(block, descriptor).entries
                if len(entries) < count:
                    return None
                read = [_payload(descriptor, place, entries[place]) for place in range(count)]
            finally:
                os.close(descriptor)
            payloads = [payload for payload in read if payload is not None]
            if len(payloads) == count:
                return payloads
            self._remove(block)
            return None

    def add(self, block: int, samples: Mapping[int, Buffer]) -> bool:
        """Keep samples until their block is complete; True if it is complete now.

        Args:
            samples: payloads by place in the block.

        Raises OSError when the tier has no room or cannot be written.
        """
        with self._appending(block):
            descriptor = open_file(self._folder, _name(block), os.O_RDWR | os.O_CREAT)
            try:
                index = self._scan(block, descriptor)
                missing = {p: each for p, each in samples.items() if p not in index.entries}
                if missing:
                    if index.size > index.end:
                        os.ftruncate(descriptor, index.end)  # Torn: its writer was killed.
                    self._append(descriptor, index, missing)
                return len(index.entries) == self._count(block)
            finally:
                os.close(descriptor)

    def remove(self, block: int) -> None:
        """Forget the samples of a block, which is in its tier."""
        with self._appending(block):
            self._remove(block)

    def close(self) -> None:
        """Close the files; the samples stay."""
        with self._lock:
            if self._folder < 0:
                return
            for descriptor in (self._locks, self._folder):
                with suppress(OSError):
                    os.close(descriptor)
            self._locks = self._folder = -1

    def _count(self, block: int) -> int:
        starts = self._layout.starts
        return int(starts[block + 1] - starts[block])

    def _stripe(self, block: int) -> threading.Lock:
        return self._stripes[block % _STRIPES]

    @contextmanager
    def _appending(self, block: int) -> Iterator[None]:
        """Hold the lock of a block. Raises TierError when another process never lets go of it."""
        with self._stripe(block):
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while not lock_byte(self._locks, _BLOCKS_AT + block):
                if time.monotonic() > deadline:
                    raise TierError(
                        f"tier {self.tier.path}: another process has held block {block} for "
                        f"{_LOCK_TIMEOUT_S:.0f} s: end or continue it"
                    )
                time.sleep(_POLL_S)
            try:
                yield
            finally:
                with suppress(OSError):
                    lock_byte(self._locks, _BLOCKS_AT + block, fcntl.F_UNLCK)

    def _open(self, block: int) -> int | None:
        try:
            return open_file(self._folder, _name(block), os.O_RDONLY)
        except FileNotFoundError:
            self._indices.pop(block, None)
            return None

    def _scan(self, block: int, descriptor: int | None = None) -> _Index:
        """Return the index of a block, up to date. The caller holds its stripe."""
        opened = None
        if descriptor is None:
            descriptor = opened = self._open(block)
        if descriptor is None:
            return _Index()
        try:
            status = os.fstat(descriptor)
            index = self._indices.get(block)
            if index is None or index.file != status.st_ino or index.end > status.st_size:
                index = self._indices[block] = _Index(file=status.st_ino)
            count, index.size = self._count(block), status.st_size
            while index.end + _HEAD.size <= status.st_size:
                head = os.pread(descriptor, _HEAD.size, index.end)
                if len(head) < _HEAD.size:
                    break
                magic, place, size, digest = _HEAD.unpack(head)
                end = index.end + _HEAD.size + size
                sound = magic == _MAGIC and place < count and size <= MAX_SAMPLE_BYTES
                if not sound or end > status.st_size:
                    break
                index.entries[place] = (index.end + _HEAD.size, size, digest)
                index.end = end
            return index
        finally:
            if opened is not None:
                os.close(opened)

    def _append(self, descriptor: int, index: _Index, samples: Mapping[int, Buffer]) -> None:
        parts: list[Buffer] = []
        entries: dict[int, tuple[int, int, int]] = {}
        end = index.end
        for place, payload in samples.items():
            digest = xxhash.xxh3_64_intdigest(payload, seed=place)
            entries[place] = (end + _HEAD.size, len(payload), digest)
            parts += [_HEAD.pack(_MAGIC, place, len(payload), digest), payload]
            end += _HEAD.size + len(payload)
        try:
            os.lseek(descriptor, index.end, os.SEEK_SET)
            write_all(descriptor, parts)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, index.end)
            raise
        index.entries |= entries
        index.end = end

    def _remove(self, block: int) -> None:
        self._indices.pop(block, None)
        with suppress(FileNotFoundError):
            unlink(self._folder, _name(block))


def _payload(descriptor: int, place: int, entry: tuple[int, int, int]) -> memoryview | None:
    offset, size, digest = entry
    memory, done = new_memory(size), 0
    while done < size:
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if not count:
            return None
        done += count
    return memory if xxhash.xxh3_64_intdigest(memory, seed=place) == digest else None


def _name(block: int) -> str:
    return f"{block:08d}.part"
